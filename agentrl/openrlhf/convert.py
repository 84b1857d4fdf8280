"""A command line of OpenRLHF's `train_ppo_ray` as a configuration of ours.

What counts is the value an option has, given or by default: what differs from our default is set, so that the run is the
one they had. What cannot be said here is a note.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.load import validated
from ..errors import ConfigError
from .command_line import parse
from .options import CONVERTED, options
from .sharing import sharing

SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
ALL_ROWS = 100_000_000


@dataclass
class Converted:
    """`values` = dotted options of ours with their values; `notes` = what has no counterpart, in words."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def nested(self) -> dict[str, Any]:
        """Sections of options, without those that have our default. Raises ConfigError for what cannot be."""
        tree: dict[str, Any] = {}
        for name, value in self.values.items():
            *sections, key = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return changed(validated(Config, tree, None).model_dump(), Config().model_dump())


def changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults, section by section."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            inner = changed(value, defaults[key])
            found |= {key: inner} if inner else {}
        elif value != defaults[key]:
            found[key] = value
    return found


def convert(argv: Sequence[str]) -> Converted:
    """Raises ConfigError for what is unknown, and for what cannot be here, with the reason."""
    theirs, given = parse(argv)
    out = Converted()
    for part in (_data, _models, _optimizers, _rewards, _rollouts, _updates, _algorithm, _evaluation, _folder, sharing):
        out.values |= {name: value for name, value in part(theirs, out.notes).items() if value is not None}
    reasons = {option.name: option.reason for option in options()[CONVERTED]}
    out.notes += [f"{name}: {reasons[name]}" for name in sorted(given) if reasons[name] is not None]
    return out


Theirs = dict[str, Any]


def _data(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    pictures = theirs["data.max_images_per_prompt"] > 0
    probs = theirs["data.prompt_probs"]
    rows = theirs["data.max_samples"]
    if not theirs["data.prompt_dataset"]:
        notes.append("data.prompt_dataset is not given: say what to train on with data.path")
    return {
        "data.path": _listed(theirs["data.prompt_dataset"]),
        "data.probs": [float(word) for word in probs.split(",")] if probs else None,
        "data.split": theirs["data.prompt_split"],
        "data.max_samples": rows if rows < ALL_ROWS else None,
        "data.input_key": theirs["data.input_key"],
        "data.label_key": theirs["data.label_key"],
        "data.template": theirs["data.input_template"],
        "data.image_key": theirs["data.image_key"] if pictures else None,
        "model.chat_template": "auto" if theirs["data.apply_chat_template"] else "none",
    }


def _listed(text: str | None) -> list[str] | None:
    return [word.strip() for word in text.split(",")] if text else None


def _models(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    if theirs["ds.param_dtype"] == "fp16":
        raise ConfigError(
            "from-openrlhf: ds.param_dtype fp16: there is no float16 training here; bfloat16 is model.dtype."
        )
    if not theirs["actor.model_name_or_path"]:
        notes.append("actor.model_name_or_path is not given: name the model with model.path")
    rank = theirs["ds.lora.rank"]
    targets = theirs["ds.lora.target_modules"]
    parallel = theirs["vllm.tensor_parallel_size"]
    arguments = [
        f"tensor_parallel_size={parallel}" if parallel > 1 else None,
        f"gpu_memory_utilization={theirs['vllm.gpu_memory_utilization']:g}",
        "enforce_eager=true" if theirs["vllm.enforce_eager"] else None,
    ]
    return {
        "model.path": theirs["actor.model_name_or_path"],
        "model.freeze_vision": theirs["actor.freeze_visual_encoder"],
        "parallel.ranks": theirs["actor.num_nodes"] * theirs["actor.num_gpus_per_node"],
        "parallel.zero_stage": 0 if theirs["actor.optim"] == "muon" else theirs["ds.zero_stage"],
        "parallel.offload_optimizer": theirs["ds.adam_offload"] and theirs["actor.optim"] != "muon",
        "train.gradient_checkpointing": theirs["actor.gradient_checkpointing_enable"],
        "lora.rank": rank,
        "lora.alpha": theirs["ds.lora.alpha"] if rank else None,
        "lora.dropout": theirs["ds.lora.dropout"] if rank else None,
        "lora.targets": targets if rank and targets != ["all-linear"] else None,
        "engine.count": theirs["vllm.num_engines"],
        "engine.gpus": float(parallel) if parallel > 1 else None,
        "engine.args": [argument for argument in arguments if argument],
    }


def _optimizers(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    muon = theirs["actor.optim"] == "muon"
    if muon:
        notes.append("actor.optim muon: whole matrices need parallel.zero_stage 0; optim.lr is that of AdamW")
    found = {
        "optim.name": "muon" if muon else "adamw",
        "optim.lr": theirs["actor.adam.lr"],
        "optim.betas": theirs["actor.adam.betas"],
        "optim.eps": theirs["actor.adam.eps"],
        "optim.weight_decay": theirs["actor.adam.weight_decay"],
        "optim.max_norm": theirs["actor.max_norm"],
        "optim.ema": theirs["train.ema_beta"] if theirs["train.enable_ema"] else None,
        **_schedule(theirs, "actor", "optim", "warmup_ratio"),
    }
    if theirs["algo.advantage.estimator"] != "gae":
        return found
    return found | {
        "critic.path": theirs["critic.model_name_or_path"] or theirs["reward.model_name_or_path"],
        "critic.lr": theirs["critic.adam.lr"],
        "critic.weight_decay": theirs["critic.adam.weight_decay"],
        "critic.max_norm": theirs["critic.max_norm"],
        "critic.value_clip": theirs["critic.value_clip"],
        "critic.warmup_steps": max(0, theirs["critic.freezing_steps"]),
        **_schedule(theirs, "critic", "critic", "lr_warmup_ratio"),
    }


def _schedule(theirs: Theirs, who: str, section: str, warmup: str) -> dict[str, Any]:
    name = theirs[f"{who}.lr_scheduler"]
    if name not in SCHEDULES:
        raise ConfigError(f"from-openrlhf: {who}.lr_scheduler {name}: here it is one of {', '.join(SCHEDULES)}.")
    least = theirs[f"{who}.min_lr_ratio"] if name == "cosine_with_min_lr" else None
    ratio = None if name == "constant" else theirs[f"{who}.lr_warmup_ratio"]
    return {f"{section}.schedule": SCHEDULES[name], f"{section}.min_lr_ratio": least, f"{section}.{warmup}": ratio}


def _rewards(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    agent, remote = theirs["train.agent_func_path"], theirs["reward.remote_url"]
    model = theirs["reward.model_name_or_path"]
    if agent is None and remote is None and model is None:
        notes.append("who gives rewards is not said: name a reward file or server with reward.name")
    if remote is not None and not remote.endswith(".py"):
        remote = ",".join(url.removesuffix("/get_reward") for url in remote.split(","))
        notes.append(
            "reward.remote_url: reward servers speak agentrl's protocol, see docs/http.md; `agentrl serve reward` serves both"
        )
    buffer = theirs["reward.overlong_buffer_len"]
    return {
        "agent.name": [agent] if agent else None,
        "reward.name": [name for name in (remote, model) if name] if not agent else None,
        "algo.reward_clip": theirs["reward.clip_range"],
        "algo.stop_properly": theirs["reward.stop_properly_penalty_coef"],
        "algo.overlong.penalty": True if buffer else None,
        "algo.overlong.buffer": buffer,
        "algo.overlong.factor": theirs["reward.overlong_penalty_factor"] if buffer else None,
    }


def _rollouts(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    if theirs["rollout.top_p"] != 1.0:
        raise ConfigError(
            f"from-openrlhf: rollout.top_p {theirs['rollout.top_p']:g}: training samples from the whole distribution, as the "
            "trainer's log-probabilities are over the whole one. Leave it out."
        )
    batch, generated = theirs["rollout.batch_size"], theirs["rollout.vllm_generate_batch_size"]
    more = generated is not None and generated > batch
    longest = theirs["data.max_len"]
    return {
        "train.batch_groups": batch,
        "rollout.oversample": generated / batch if more else None,
        "train.stale": "drop" if more else None,
        "rollout.n_samples": theirs["rollout.n_samples_per_prompt"],
        "rollout.temperature": theirs["rollout.temperature"],
        "rollout.max_len": longest,
        "rollout.max_new_tokens": theirs["rollout.max_new_tokens"] or longest,
        "rollout.partial": theirs["train.partial_rollout_enable"] or None,
        "train.max_staleness": theirs["train.async_queue_size"] if theirs["train.async_enable"] else 0,
    }


def _updates(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    rollouts = theirs["rollout.batch_size"] * theirs["rollout.n_samples_per_prompt"]
    update = theirs["train.batch_size"]
    if update > rollouts or rollouts % update:
        raise ConfigError(
            f"from-openrlhf: rollout.batch_size times rollout.n_samples_per_prompt is {rollouts}, which does not divide into "
            f"updates of train.batch_size {update}."
        )
    return {
        "train.updates_per_batch": rollouts // update,
        "train.epochs": theirs["train.max_epochs"],
        "train.passes": theirs["train.num_episodes"],
        "train.micro_batch_tokens": max(theirs["train.max_tokens_per_gpu"], theirs["data.max_len"]),
        "run.seed": theirs["train.seed"],
    }


def _algorithm(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    name = theirs["algo.advantage.estimator"]
    centred = theirs["algo.advantage.no_std_norm"]
    if centred and name not in ("group_norm", "dr_grpo"):
        notes.append(f"algo.advantage.no_std_norm: advantages of {name} are whitened here, with their deviation")
    corrected = theirs["algo.advantage.is_correction_enable"]
    loss, coef = theirs["algo.kl.use_loss"], theirs["algo.kl.init_coef"]
    kind = theirs["algo.kl.estimator"]
    if coef and kind != ("k2" if loss else "k1"):
        notes.append(
            f"algo.kl.estimator {kind}: in the {'loss the estimate is k2' if loss else 'reward the estimate is k1'}"
        )
    target = theirs["algo.kl.target"]
    clip, both = theirs["actor.eps_clip"], theirs["actor.eps_clip_low_high"]
    return {
        "algo.name": name,
        "algo.advantage": "dr_grpo" if centred and name == "group_norm" else None,
        "algo.gamma": theirs["algo.advantage.gamma"],
        "algo.lam": theirs["algo.advantage.lambd"],
        "algo.level": "sequence" if theirs["actor.policy_loss_type"] == "gspo" else None,
        "algo.clip": both or [clip, clip],
        "algo.dual_clip": theirs["actor.dual_clip"],
        "algo.entropy_coef": theirs["actor.entropy_coef"],
        "algo.correction": theirs["algo.advantage.is_correction_type"].replace("-", "_") if corrected else None,
        "algo.correction_range": theirs["algo.advantage.is_correction_threshold"] if corrected else None,
        "algo.kl.coef": coef,
        "algo.kl.where": "loss" if loss and coef else None,
        "algo.kl.target": target if coef else None,
        "algo.kl.horizon": theirs["algo.kl.horizon"] if coef and target else None,
        "algo.filter.enable": True if theirs["algo.dynamic_filtering_enable"] else None,
        "algo.filter.range": theirs["algo.dynamic_filtering_range"]
        if theirs["algo.dynamic_filtering_enable"]
        else None,
        "ref.offload": theirs["ref.offload"] and bool(coef) and not theirs["ds.lora.rank"],
    }


def _evaluation(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    every, dataset = theirs["eval.steps"], theirs["eval.dataset"]
    if every < 1 or not dataset:
        return {"eval.enable": False}
    return {
        "data.test_path": _listed(dataset),
        "data.test_split": theirs["eval.split"],
        "eval.every": every,
        "eval.temperature": theirs["eval.temperature"],
        "eval.n": theirs["eval.n_samples_per_prompt"],
        "eval.greedy": False,
        "ckpt.best_by": _best(theirs, notes),
    }


def _best(theirs: Theirs, notes: list[str]) -> str | None:
    key, n = theirs["ckpt.best_metric_key"] or "pass1", theirs["eval.n_samples_per_prompt"]
    if key == "none":
        return "none"
    passed = re.search(r"pass@?(\d+)$", key)
    if passed is not None and int(passed[1]) in (1, n):
        return f"eval/pass@{passed[1]}"
    notes.append(
        f"ckpt.best_metric_key {key}: say which metric here with ckpt.best_by, as in eval/reward/mean or eval/pass@{n}"
    )
    return None


def _folder(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    output, wandb = Path(theirs["ckpt.output_dir"]), theirs["logger.wandb.key"] is not None
    return {
        "run.dir": str(output.parent),
        "run.name": theirs["logger.wandb.run_name"] or output.name,
        "run.resume": "latest" if theirs["ckpt.load_enable"] else None,
        "ckpt.every": max(0, theirs["ckpt.save_steps"]),
        "ckpt.keep": theirs["ckpt.max_num"],
        "log.wandb": wandb,
        "log.wandb_project": theirs["logger.wandb.project"] if wandb else None,
        "log.wandb_entity": theirs["logger.wandb.org"] if wandb else None,
        "log.wandb_group": theirs["logger.wandb.group"] if wandb else None,
        "log.tensorboard": theirs["logger.tensorboard_dir"] is not None,
    }
