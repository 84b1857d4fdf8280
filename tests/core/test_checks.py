"""What a training run may not ask for, and options that would change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import ConfigError
from agentrl.config import Config
from agentrl.config.checks import AlgorithmFacts, check_training

ENV: dict[str, Any] = {"env": {"name": "screenshot_math"}}
FILE: dict[str, Any] = {"data": {"path": "x.jsonl"}, "reward": {"name": ["r.py:f"]}}


def check(*, grouped: bool = False, filters: bool = False, values: bool = False, **sections: Any) -> None:
    """Sections of the configuration, and facts of the algorithm under their names."""
    facts = {name: sections.pop(name) for name in ("penalizes", "by_turn", "discounted", "teaches") if name in sections}
    facts |= {"teacher": facts.pop("teaches")} if "teaches" in facts else {}
    config = Config.model_validate(ENV | sections)
    facts["trust"] = config.algo.trust or ("cispo" if config.algo.name == "cispo" else "clip")
    check_training(config, AlgorithmFacts(config.algo.name, grouped, values, filters, **facts))


@pytest.mark.parametrize(
    ("flag", "sections"),
    [
        ("--env", {"env": {"name": "http://bob:hunter2@h/x", "opt": ["a=1"]}}),
        ("--agent", {"agent": {"name": ["http://h:1", "https://bob:hunter2@h"]}}),
        ("--agent.advertise-url", {"agent": {"name": "http://h:1", "advertise_url": "http://bob:hunter2@h:{port}"}}),
        ("--reward", {"env": {}, "data": {"path": "x.jsonl"}, "reward": {"name": ["http://h, http://bob:hunter2@h"]}}),
        ("--engine", {"engine": {"name": "openai:http://bob:hunter2@h/v1"}}),
    ],
)
def test_an_address_with_a_password_is_refused_and_not_shown(flag: str, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: no name or password in an address; .*token-file") as raised:
        check(**sections)
    assert "hunter2" not in str(raised.value)


def test_the_defaults_pass() -> None:
    check()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature 0"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top-p 0.9"),
        ({"rollout": {"top_k": 5}}, "rollout.top-k 5"),
        ({"rollout": {"n_samples": 1}, "grouped": True}, "n-samples 1 must be at least 2"),
        ({"rollout": {"n_samples": 1}, "filters": True}, "group filter"),
        ({"algo": {"clip": (1.0, 0.2)}}, "algo.clip"),
        ({"algo": {"dual_clip": 1.0}}, "algo.dual-clip 1"),
        ({"algo": {"correction_range": (3.0, 2.0)}}, "algo.correction-range 3 2"),
        ({"algo": {"correction": "none"}}, "allow-uncorrected"),
        ({"train": {"max_staleness": 0}, "rollout": {"partial": True}}, "rollout.partial"),
        ({"rollout": {"order": "first_done"}}, "rollout.order first_done needs --train.stale drop"),
        ({"rollout": {"oversample": 1.5}}, "rollout.oversample 1.5 needs --train.stale drop"),
        (
            {"watchdog": {"warn_after": 9, "fail_after": 9}},
            "watchdog.warn-after 9 must be below --watchdog.fail-after 9",
        ),
        ({"run": {"replay": "nowhere"}}, "--replay nowhere: there are no step_"),
        ({"run": {"replay": "nowhere"}, "eval": {"every": 2}}, "eval.every is not used with --replay"),
        ({"train": {"batch_groups": 3, "updates_per_batch": 5}}, "updates-per-batch 5"),
        ({"parallel": {"ranks": 200}}, "parallel.ranks 200"),
        ({"train": {"micro_batch_tokens": 100}}, "micro-batch-tokens 100.*--rollout.max-len 4096"),
        ({"reward": {"name": ["r.py:f"]}}, "brings its own reward"),
        ({"reward": {"normalize": False}}, "reward.no-normalize is not used without --reward"),
        ({"agent": {"bind": "127.0.0.1:8100"}}, "--agent.bind is not used"),
        ({"agent": {"name": ["a.py:run", "http://127.0.0.1:9000"]}}, "must all be URLs"),
        (
            {
                "agent": {"name": "http://127.0.0.1:9000", "advertise_url": "http://h:1"},
                "rollout": {"workers": 2},
            },
            "{port}",
        ),
        ({"data": {"label_key": "x"}}, "data.label-key is not used"),
        ({"engine": {"name": "vlm"}}, "Did you mean vllm"),
        ({"engine": {"script": "s.py:f"}}, "engine.script is not used"),
        ({"algo": {"trust": "cispo", "dual_clip": 3.0}}, "algo.dual-clip is not used with cispo"),
        ({"algo": {"correction_range": (0.0, 2.0)}, "train": {"max_staleness": 0}}, "correction-range is not used"),
        ({"algo": {"correction_level": "sequence", "old_logp": "rollout"}}, "correction-level is not used"),
        ({"algo": {"correction_range": (0.5, 4.0), "correction": "decoupled"}}, "decoupled has no lower bound"),
        ({"algo": {"allow_uncorrected": True}}, "allow-uncorrected is not used"),
        (
            {"algo": {"correction": "none", "allow_uncorrected": True}, "train": {"max_staleness": 0}},
            "allow-uncorrected is not used",
        ),
        ({"algo": {"filter": {"range": (0.1, 0.9)}}}, "algo.filter.range is not used"),
        (
            {"algo": {"filter": {"range": (0.8, 0.2)}}, "filters": True},
            "algo.filter.range 0.8 0.2 would keep no group",
        ),
        ({"algo": {"filter": {"range": (2.0, 3.0)}}, "filters": True}, "scores are in 0..1"),
        ({"algo": {"correction": "tis", "old_logp": "rollout"}}, "algo.correction tis is not used with .*old-logp"),
        ({"algo": {"old_logp": "current"}, "train": {"epochs": 4}}, "old-logp current with --train.epochs 4"),
        ({"optim": {"betas": (0.9, 1.5)}}, r"optim.betas 0.9 1.5: both must be in \[0, 1\)"),
        ({"optim": {"schedule": "constant", "min_lr_ratio": 0.1}}, "optim.min-lr-ratio is not used"),
        ({"optim": {"warmup": 3, "warmup_ratio": 0.1}}, "optim.warmup is not used"),
        ({"critic": {"schedule": "constant", "min_lr_ratio": 0.1}, "values": True}, "critic.min-lr-ratio is not used"),
        ({"optim": {"name": "sgd", "eps": 1e-6}}, "optim.eps is not used"),
        ({"eval": {"enable": False, "n": 4}}, "eval.n is not used with --eval.no-enable"),
        ({"lora": {"alpha": 8}}, "lora.alpha is not used without --lora.rank"),
        ({"lora": {"path": "adapter", "rank": 8}}, "lora.rank is not used with --lora.path"),
        (
            {"lora": {"path": "adapter", "dropout": 0.1}, "algo": {"old_logp": "current"}},
            "old-logp current does not go",
        ),
        (
            {"lora": {"rank": 8}, "ref": {"offload": True}, "algo": {"kl": {"coef": 0.1}}},
            "ref.offload is not used with --lora.rank",
        ),
        ({"optim": {"name": "muon"}, "parallel": {"zero_stage": 2}}, "optim.name muon.*--parallel.zero-stage 2"),
        ({"optim": {"name": "muon"}, "model": {"dtype": "bfloat16"}}, "optim.name muon.*--model.dtype bfloat16"),
        ({"parallel": {"offload_optimizer": True}}, "parallel.offload-optimizer needs --parallel.zero-stage 1"),
        ({"parallel": {"offload_params": True, "zero_stage": 2}}, "parallel.offload-params needs .* 3, not 2"),
        ({"algo": {"lam": 0.9}}, "algo.lam is not used without a critic"),
        ({"algo": {"bootstrap_truncated": True}}, "algo.bootstrap-truncated is not used without a critic"),
        ({"algo": {"gamma": 0.9}, "discounted": False}, "algo.gamma is not used"),
        ({"algo": {"credit": "turn"}, "by_turn": False}, "algo.credit turn"),
        ({"algo": {"reward_clip": (1.0, 0.0)}}, "algo.reward-clip 1 0"),
        ({"algo": {"overlong": {"factor": 2.0}}}, "algo.overlong.factor is not used"),
        (
            {"algo": {"overlong": {"penalty": False, "buffer": 9}}, "penalizes": True},
            "algo.overlong.buffer is not used",
        ),
        ({"algo": {"overlong": {"penalty": True, "buffer": 5000}}}, "algo.overlong.buffer 5000 is more than the 4096"),
        (
            {"env": {}, **FILE, "algo": {"overlong": {"penalty": True, "buffer": 300}}},
            "algo.overlong.buffer 300 is more than the 256",
        ),
        ({"algo": {"kl": {"where": "loss"}}}, "algo.kl.where is not used without --algo.kl.coef"),
        ({"algo": {"kl": {"coef": 0.1, "horizon": 5.0}}}, "algo.kl.horizon is not used without --algo.kl.target"),
        ({"algo": {"kl": {"coef": 0.1, "kind": "k3"}}}, "algo.kl.kind k3 with --algo.kl.where reward"),
        ({"algo": {"kl": {"coef": 0.1, "where": "loss", "kind": "k1"}}}, "algo.kl.kind k1 with --algo.kl.where loss"),
        ({"ref": {"offload": True}}, "ref.offload is not used without --algo.kl.coef"),
        ({"teacher": {"path": "t"}}, "teacher.path is not used"),
        ({"teaches": True}, "name its model with --teacher.path"),
        ({"teaches": True, "teacher": {"path": "t"}, "algo": {"kl": {"coef": 0.1}}}, "use --algo.kl.where loss"),
        ({"teaches": True, "teacher": {"path": "t"}, "algo": {"stop_properly": 0.5}}, "algo.stop-properly is not used"),
        ({"critic": {"value_clip": 0.1}}, "critic.value-clip is not used"),
        ({"rollout": {"mask_stale_tokens": True}, "train": {"max_staleness": 0}}, "mask-stale-tokens is not used"),
    ],
)
def test_what_cannot_be_is_refused_and_named(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(**sections)


def test_options_that_are_used_pass() -> None:
    check(algo={"old_logp": "current"}, train={"updates_per_batch": 2}, optim={"min_lr_ratio": 0.1, "warmup": 3})
    check(algo={"filter": {"range": (0.0, 1.0)}}, filters=True)
    check(critic={"schedule": "cosine", "min_lr_ratio": 0.1}, optim={"schedule": "constant"}, values=True)
    check(algo={"filter": {"range": (0.1, 0.9)}}, filters=True)
    check(algo={"correction": "tis", "correction_range": (0.0, 2.0)}, train={"max_staleness": 0})
    check(rollout={"order": "first_done", "oversample": 1.5}, train={"stale": "drop"})
    check(rollout={"oversample": 1.5}, train={"stale": "drop"})
    check(watchdog={"fail_after": 20})
    check(algo={"name": "cispo", "clip": (1.0, 0.3)}, grouped=True)
    check(lora={"rank": 8, "alpha": 8, "targets": "all-linear"})
    check(parallel={"offload_optimizer": True, "offload_params": True, "zero_stage": 3})
    check(algo={"kl": {"coef": 0.1, "target": 6.0, "horizon": 100.0, "kind": "k1"}}, ref={"path": "r", "offload": True})
    check(algo={"kl": {"coef": 0.1, "where": "loss", "kind": "k2"}}, teaches=True, teacher={"path": "t"})
    check(algo={"overlong": {"buffer": 10, "mask": True}}, penalizes=True)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("eval/pass@4", r"measured for 1 and --eval.n 1. Did you mean .*eval/pass@1.* Measured: eval/reward/mean"),
        ("eval/scor/mean", "Did you mean eval/score/mean"),
        ("xyz", "Measured: eval/reward/mean, eval/score/mean, eval/pass@1, eval/greedy/reward/mean"),
        ("eval/other/score/mean", "no evaluation of this run measures it"),
    ],
)
def test_the_best_checkpoint_is_so_by_a_metric_that_is_measured(wanted: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(ckpt={"best_by": wanted})


def test_metrics_that_make_the_best_checkpoint() -> None:
    check(ckpt={"best_by": "eval/pass@4"}, eval={"n": 4})
    check(ckpt={"best_by": "eval/greedy/pass@1"})
    check(ckpt={"best_by": "none"})
    sets = {"path": "a.jsonl", "test_path": ["easy.jsonl", "hard.jsonl"]}
    check(ckpt={"best_by": "eval/hard/score/mean"}, env={}, data=sets, reward={"name": ["r.py:f"]})
    with pytest.raises(ConfigError, match=r"best-by is not used without --data.test-path"):
        check(ckpt={"best_by": "eval/score/mean"}, env={}, data={"path": "a"}, reward={"name": ["r.py:f"]})


def test_a_critic_has_options_and_leaves_steps_for_the_policy() -> None:
    critic = {"path": "c", "value_clip": 0.1, "warmup_steps": 2}
    check(values=True, critic=critic, algo={"lam": 0.9, "bootstrap_truncated": True}, train={"steps": 3})
    with pytest.raises(ConfigError, match=r"critic.warmup-steps 2 of --train.steps 2"):
        check(values=True, critic=critic, train={"steps": 2})
