"""The options of `train_ppo_ray` as those of `agentrl train`."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigError
from .shared import Theirs, adapters, folder, listed, model_path, numbers, optimizer, schedule
from .sharing import sharing

ALL_ROWS = 100_000_000
DISCOUNTED = ("gae", "reinforce")
"""The estimators that read gamma, theirs as ours."""


def _data(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    pictures = theirs["data.max_images_per_prompt"] > 0
    rows, templated = theirs["data.max_samples"], theirs["data.apply_chat_template"]
    if not theirs["data.prompt_dataset"]:
        notes.append("data.prompt_dataset is not given: say what to train on with data.path")
    return {
        "data.path": listed(theirs["data.prompt_dataset"]),
        "data.probs": numbers(theirs["data.prompt_probs"]),
        "data.split": theirs["data.prompt_split"],
        "data.max_samples": rows if rows < ALL_ROWS else None,
        "data.input_key": theirs["data.input_key"],
        "data.label_key": theirs["data.label_key"],
        "data.template": None if templated else theirs["data.input_template"],
        "data.image_key": theirs["data.image_key"] if pictures else None,
        "model.chat_template": "auto" if templated else "none",
    }


def _models(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    parallel = theirs["vllm.tensor_parallel_size"]
    arguments = [
        f"tensor_parallel_size={parallel}" if parallel > 1 else None,
        f"gpu_memory_utilization={theirs['vllm.gpu_memory_utilization']:g}",
        "enforce_eager=true" if theirs["vllm.enforce_eager"] else None,
    ]
    return {
        **model_path("actor.model_name_or_path", theirs, notes),
        "model.freeze_vision": theirs["actor.freeze_visual_encoder"],
        "parallel.ranks": theirs["actor.num_nodes"] * theirs["actor.num_gpus_per_node"],
        "train.gradient_checkpointing": theirs["actor.gradient_checkpointing_enable"],
        **adapters(theirs),
        "engine.count": theirs["vllm.num_engines"],
        "engine.gpus": float(parallel) if parallel > 1 else None,
        "engine.args": [argument for argument in arguments if argument],
    }


def _optimizers(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    found = {
        **optimizer(theirs, notes, "actor."),
        "optim.ema": theirs["train.ema_beta"] if theirs["train.enable_ema"] else None,
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
        **schedule(theirs, "critic.", "critic", "lr_warmup_ratio"),
    }


def _rewards(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    agent, remote = theirs["train.agent_func_path"], theirs["reward.remote_url"]
    model = theirs["reward.model_name_or_path"]
    if agent is None and remote is None and model is None:
        notes.append("who gives rewards is not said: name a reward file or server with reward.name")
    if remote is not None and not remote.endswith(".py"):
        remote = ",".join(url.removesuffix("/get_reward") for url in remote.split(","))
        notes.append(
            "reward.remote_url: reward servers speak agentrl's protocol, see docs/http.md; `agentrl serve reward` serves both, "
            "and one that speaks OpenRLHF's alone is asked by an agent file, see docs/from-openrlhf.md"
        )
    normalized = theirs["reward.normalize_enable"]
    if normalized and (model is None or agent):
        notes.append("reward.normalize_enable: it is for a reward model of the run; a reward server has its own")
    buffer = theirs["reward.overlong_buffer_len"]
    if buffer and agent:
        notes.append(
            "reward.overlong_buffer_len: it counts back from rollout.max_new_tokens there, here from the longest episode, "
            "rollout.max_total_tokens"
        )
    return {
        "agent.name": [agent] if agent else None,
        "reward.name": [name for name in (remote, model) if name] if not agent else None,
        "reward.normalize": normalized if model and not agent else None,
        "algo.reward_clip": theirs["reward.clip_range"],
        "algo.stop_properly": theirs["reward.stop_properly_penalty_coef"],
        "algo.overlong.penalty": True if buffer else None,
        "algo.overlong.buffer": buffer or None,
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
    longest, partial = theirs["data.max_len"], theirs["train.partial_rollout_enable"]
    staleness = theirs["train.async_queue_size"] if theirs["train.async_enable"] else 0
    if partial and not staleness:
        notes.append("train.partial_rollout_enable: it does nothing without train.async_enable")
    return {
        "train.batch_groups": batch,
        "rollout.oversample": generated / batch if more else None,
        "rollout.order": "first_done" if more else None,
        "train.stale": "drop" if more else None,
        "rollout.n_samples": theirs["rollout.n_samples_per_prompt"],
        "rollout.temperature": theirs["rollout.temperature"],
        "rollout.max_len": longest,
        "rollout.max_new_tokens": theirs["rollout.max_new_tokens"] or longest,
        "rollout.max_turns": longest if theirs["train.agent_func_path"] else 1,
        "rollout.partial": partial if staleness and partial else None,
        "train.max_staleness": staleness,
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
    gamma, lam = theirs["algo.advantage.gamma"], theirs["algo.advantage.lambd"]
    if gamma != 1 and name not in DISCOUNTED:
        notes.append(f"algo.advantage.gamma: it does nothing with {name}")
    if lam != 1 and name != "gae":
        notes.append(f"algo.advantage.lambd: it does nothing with {name}")
    target, by_sequence = theirs["algo.kl.target"], theirs["actor.policy_loss_type"] == "gspo"
    clip, both = theirs["actor.eps_clip"], theirs["actor.eps_clip_low_high"]
    return {
        "algo.name": name,
        "algo.advantage": "dr_grpo" if centred and name == "group_norm" else None,
        "algo.gamma": gamma if name in DISCOUNTED else None,
        "algo.lam": lam if name == "gae" else None,
        "algo.level": "sequence" if by_sequence else None,
        "algo.aggregation": "sequence_mean" if by_sequence else "token_mean",
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
        "data.test_path": listed(dataset),
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


PARTS = (
    _data,
    _models,
    _optimizers,
    _rewards,
    _rollouts,
    _updates,
    _algorithm,
    _evaluation,
    folder,
    sharing,
)
