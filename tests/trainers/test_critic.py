"""PPO's critic: its values, its updates beside the policy's, warm-up, and what is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers import compute_advantages
from agentrl.trainers.critic import ValueModel
from agentrl.trainers.models import load_policy
from agentrl.trainers.packing import split_packs
from agentrl.trainers.slots import rollout_ids, trained_mask

from agentrl import ConfigError, DataError, Image, Row
from agentrl.image_store import ImageStore

from .rollouts import distance, make_row, make_rows, weights

Make = Callable[..., Any]
PPO = {"name": "ppo", "gamma": 0.95, "lam": 0.9}
CUTS = (100_000, 60)


def values_of(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the critic's weights."""
    return {name: p.detach().clone() for name, p in trainer._critic.model.named_parameters()}


def plain_values(model: ValueModel, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """V before and after each trained token by a plain forward pass of the trunk."""
    ids = torch.from_numpy(row.token_ids).long()
    states = model.trunk(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    places = torch.from_numpy(row.loss_mask).nonzero()[:, 0]
    values = model.head(states)[:, 0]
    return values[places - 1], values[places]


def opinionated(trainer: Any) -> Any:
    """The trainer, its critic with a head that says something."""
    with torch.no_grad():
        trainer._critic.model.head.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5))
    return trainer


@pytest.mark.parametrize("name", ["tied", "vision"])
def test_values_are_those_of_the_state_before_and_after_each_token(models: Path, name: str) -> None:
    policy = load_policy(str(models / name))
    model = ValueModel(policy.trunk)
    assert not any(parameter is policy.model.lm_head.weight for parameter in model.head.parameters())
    rows = [make_row(seed, length) for seed, length in enumerate([20, 33, 7])]
    assert not model(split_packs(rows, policy, None))[0].any()
    torch.nn.init.normal_(model.head.weight)
    before, after = model(split_packs(rows, policy, None))
    expected = [plain_values(model, row) for row in rows]
    assert torch.allclose(before, torch.cat([one for one, _ in expected]), atol=1e-5)
    assert torch.allclose(after, torch.cat([one for _, one in expected]), atol=1e-5)
    assert before.dtype == torch.float32


def test_the_critic_reads_pictures(models: Path, make_trainer: Make, tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image as PILImage

    store = ImageStore(tmp_path / "images")
    trainer = opinionated(make_trainer("vision", algo=PPO))
    pixels = np.random.default_rng(0).integers(0, 255, (2, 56, 56, 3)).astype(np.uint8)
    shas = [store.put(Image(PILImage.fromarray(one))) for one in pixels]
    about = {"trained": 8, "placeholder": trainer.policy.image_id}
    first, second = (make_row(1, 40, images=((sha, 3, 16),), **about) for sha in shas)
    with torch.no_grad():
        values = trainer._critic.values([first, second])[0]
    assert not torch.allclose(values[0], values[1])
    before = values_of(trainer)
    trainer.train([first, replace(second, rollout_id="other", total_reward=0.0)], 0)
    moved = {name for name, tensor in values_of(trainer).items() if not torch.equal(tensor, before[name])}
    assert any("visual" in name for name in moved) and "head.weight" in moved


@pytest.mark.parametrize("bootstrap", [False, True])
def test_advantages_and_the_first_step_follow_the_definitions(make_trainer: Make, bootstrap: bool) -> None:
    """GAE on V before each token; one sgd step along the gradient of 0.5 * mean((V - G)^2) over all trained tokens."""
    rows = make_rows(2, 3)
    for row in rows:
        row.truncated = row.rollout_id in ("r1", "r2")
    algo = PPO | {"bootstrap_truncated": bootstrap}
    trainer, twin = (opinionated(make_trainer(algo=algo, critic={"lr": 0.02, "max_norm": 0.0})) for _ in range(2))
    model = twin._critic.model
    both = [plain_values(model, row) for row in rows]
    values = torch.nn.utils.rnn.pad_sequence([before for before, _ in both], batch_first=True)
    after = torch.tensor(
        [float(after[-1].detach()) * row.truncated for (_, after), row in zip(both, rows, strict=True)]
    )
    found = compute_advantages(
        "ppo",
        torch.tensor([float("nan") if row.total_reward is None else row.total_reward for row in rows]),
        trained_mask(rows),
        rollout_ids=rollout_ids(rows),
        values=values.detach(),
        bootstrap=after if bootstrap else None,
        gamma=0.95,
        lam=0.9,
    )
    before = values_of(trainer)
    report = trainer.train(rows, 0)
    for row, expected, given in zip(rows, found.advantages, report.advantages, strict=True):
        assert torch.allclose(torch.from_numpy(given[row.loss_mask]), expected[: row.loss_mask.sum()], atol=1e-5)
    used = trained_mask(rows) & found.valid[:, None]
    (0.5 * torch.where(used, values - found.returns, 0.0).square().sum() / used.sum()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(values_of(trainer)[name], before[name] - 0.02 * parameter.grad, atol=1e-6), name
    assert report.metrics["critic/loss"] == pytest.approx(report.metrics["critic/error"] / 2, rel=1e-5)
    assert report.metrics["critic/lr"] == 0.02
    assert report.metrics["critic/explained_variance"] < 1.0


def test_policy_and_critic_do_not_depend_on_the_cut(make_trainer: Make) -> None:
    batches = [make_rows(), make_rows(2, 5)]
    sections = {"algo": PPO | {"bootstrap_truncated": True}, "critic": {"value_clip": 0.1, "lr": 0.05}}
    runs = []
    for budget in CUTS:
        train = {"micro_batch_tokens": budget, "updates_per_batch": 2, "epochs": 2}
        trainer = opinionated(make_trainer(train=train, **sections))
        metrics = [trainer.train(rows, step).metrics for step, rows in enumerate(batches)]
        runs.append((metrics, weights(trainer), values_of(trainer)))
    for metrics, policy, critic in runs[1:]:
        assert distance(policy, runs[0][1]) < 1e-6
        assert distance(critic, runs[0][2]) < 1e-6
        for one, other in zip(metrics, runs[0][0], strict=True):
            assert one == pytest.approx(other, abs=1e-5, rel=1e-4)
    assert runs[0][0][0]["critic/clip_fraction"] > 0


def test_the_critic_learns_the_value_of_what_it_sees(make_trainer: Make) -> None:
    trainer = make_trainer(algo={"name": "ppo"}, critic={"lr": 0.05}, optim={"lr": 1e-9})
    rows = [make_row(i % 2, 20, rollout=f"{i}", reward=float(i % 2)) for i in range(8)]
    errors = [trainer.train(rows, step).metrics["critic/error"] for step in range(15)]
    assert errors[-1] < errors[0] / 4


def test_the_critic_warms_up_alone(make_trainer: Make) -> None:
    trainer = make_trainer(
        algo=PPO, critic={"warmup_steps": 2}, train={"updates_per_batch": 2}, optim={"schedule": "linear"}, planned=8
    )
    policy, critic = weights(trainer), values_of(trainer)
    for step in (1, 2):
        report = trainer.train(make_rows(), step)
        assert not report.updated and "policy/loss" not in report.metrics
    assert distance(policy, weights(trainer)) == 0.0
    assert distance(critic, values_of(trainer)) > 0.0
    report = trainer.train(make_rows(), 3)
    assert report.updated and distance(policy, weights(trainer)) > 0.0
    assert report.metrics["policy/lr"] == pytest.approx(0.1 * (1 - 5 / 8))


def test_a_batch_without_signal_for_the_policy_trains_the_critic(make_trainer: Make) -> None:
    """One trained token a rollout, all worth the same: whitened advantages are exactly 0, but V is not yet G."""
    trainer = make_trainer(algo={"name": "ppo"})
    policy, critic = weights(trainer), values_of(trainer)
    report = trainer.train([make_row(i, 20, trained=1, reward=1.0) for i in range(4)], 0)
    assert not report.updated and distance(policy, weights(trainer)) == 0.0
    assert distance(critic, values_of(trainer)) > 0.0
    assert report.metrics["critic/return"] == pytest.approx(1.0)
    nothing = trainer.train([make_row(i, 20, reward=None) for i in range(4)], 1)
    assert not nothing.updated and "critic/loss" not in nothing.metrics


@pytest.mark.parametrize("stage", [0, 2])
def test_policy_and_critic_are_resumed_bit_for_bit(make_trainer: Make, tmp_path: Path, stage: int) -> None:
    sections: dict[str, Any] = {
        "algo": PPO,
        "optim": {"name": "adamw", "lr": 1e-2, "max_norm": 1.0},
        "critic": {"schedule": "cosine", "lr_warmup": 1},
        "parallel": {"zero_stage": stage},
    }
    batches = [make_rows(2, 3 + i) for i in range(3)]
    straight = make_trainer(planned=6, **sections)
    straight.train(batches[0], 0)
    straight.train(batches[1], 1)
    straight.save(tmp_path)
    expected = straight.train(batches[2], 2).metrics
    resumed = make_trainer(planned=6, **sections)
    resumed.load(tmp_path)
    assert resumed.train(batches[2], 2).metrics == expected
    assert distance(weights(straight), weights(resumed)) == 0.0
    assert distance(values_of(straight), values_of(resumed)) == 0.0


def test_a_checkpoint_without_critic_is_an_error(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer().save(tmp_path)
    with pytest.raises(DataError, match="no critic"):
        make_trainer(algo={"name": "ppo"}).load(tmp_path)


def test_a_critic_may_begin_as_a_reward_model(make_trainer: Make, models: Path, tmp_path: Path) -> None:
    """It lacks a policy's head, which nothing needs."""
    import shutil

    shutil.copytree(models / "untied", tmp_path / "rm")
    load_policy(str(models / "untied"), head="score").model.save_pretrained(tmp_path / "rm")
    trainer = make_trainer("untied", algo={"name": "ppo"}, critic={"path": str(tmp_path / "rm")})
    assert trainer.train(make_rows(), 0).updated


def test_a_critic_with_other_words_is_refused(make_trainer: Make, models: Path, tmp_path: Path) -> None:
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(models / "tied", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"--critic\.path .* another vocabulary"):
        make_trainer(algo={"name": "ppo"}, critic={"path": str(other)})
