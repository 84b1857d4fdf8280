"""From verdicts to rewards and loss masks, in the order the contract gives, through the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers import compute_advantages
from agentrl.trainers.rewards import Shaping
from agentrl.trainers.slots import trained_mask

from agentrl import ConfigError, Row, Task
from agentrl.config import Config
from agentrl.engine import Generation, Span
from agentrl.trajectory import Trajectory

from .rollouts import make_row, make_rows, weights

Make = Callable[..., Any]


def shaping(**sections: Any) -> Shaping:
    return Shaping.of(Config.model_validate(sections))


def turns(seed: int, rewards: list[float], *, rows: int = 1, **about: Any) -> list[Row]:
    """A rollout with one trained token a turn, every other token said by the environment, cut into rows."""
    made = []
    for part, chunk in enumerate(np.array_split(np.array(rewards, np.float32), rows)):
        row = make_row(10 * seed + part, 2 * len(chunk) + 1, rollout=f"r{seed}", **about)
        row.loss_mask[:] = np.arange(len(row)) % 2 == 0
        row.loss_mask[0] = False
        row.rewards[2::2] = chunk
        row.total_reward = float(np.sum(rewards))
        made.append(row)
    return made


def test_clip_then_overlong_then_stop_properly() -> None:
    """R = 9 is clipped to 2; 18 of 20 tokens with a buffer of 4 cost 0.5 * 2 / 4; what is left of it is halved."""
    algo = {"reward_clip": (-1.0, 2.0), "stop_properly": 0.5, "overlong": {"penalty": True, "buffer": 4, "factor": 0.5}}
    rules = shaping(algo=algo, rollout={"max_total_tokens": 20})
    row = make_row(0, 30, trained=18, reward=9.0)
    cut = replace(row, truncated=True)
    silent = replace(cut, total_reward=None)
    assert rules.outcomes([replace(row, rollout_id="a"), replace(cut, rollout_id="b")]).tolist() == [1.75, 0.875]
    assert rules.outcomes([silent]).isnan().all()
    assert shaping(algo={"stop_properly": -3.0}).outcomes([row, cut]).tolist() == [9.0, -3.0]
    assert shaping().outcomes([row, cut]).tolist() == [9.0, 9.0]


def test_the_length_that_is_penalised_is_the_rollouts() -> None:
    rules = shaping(algo={"overlong": {"penalty": True, "buffer": 10}}, rollout={"max_total_tokens": 20})
    parts = [make_row(i, 12, trained=8, rollout="one", reward=1.0) for i in range(2)]
    assert rules.outcomes(parts).tolist() == pytest.approx([1.0 - 6 / 10] * 2)


def test_a_preset_with_the_penalty_can_leave_it_out_and_the_limit_bounds_the_buffer() -> None:
    assert shaping(algo={"name": "dapo"}, rollout={"max_total_tokens": 100}).overlong_buffer == 20
    assert shaping(algo={"name": "dapo", "overlong": {"penalty": False}}).overlong_buffer is None
    with pytest.raises(ConfigError, match=r"overlong\.buffer 30 .* 20 tokens"):
        shaping(algo={"name": "dapo", "overlong": {"buffer": 30}}, rollout={"max_total_tokens": 20})


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "reinforce_pp_baseline", "ppo"])
def test_turn_credit_pays_each_turn_where_it_was_earned(make_trainer: Make, algorithm: str) -> None:
    """The definition by hand for one rollout of two rows: rewards to go, the group's mean sum off at its last token."""
    rows = [*turns(1, [1.0, 0.0, 2.0, 0.5], rows=2), *turns(2, [0.0, 0.25])]
    trainer = make_trainer(algo={"name": algorithm, "credit": "turn"})
    report = trainer.train(rows, 0)
    to_go = np.array([3.5, 2.5, 2.5, 0.5, 0.25, 0.25])
    if algorithm == "reinforce_pp_baseline":
        to_go = to_go - (3.5 + 0.25) / 2
    expected = (to_go - to_go.mean()) / to_go.std()
    got = np.concatenate([a[row.loss_mask] for a, row in zip(report.advantages, rows, strict=True)])
    assert np.allclose(got, expected, atol=1e-5)
    outcome = make_trainer(algo={"name": algorithm}).train(rows, 0)
    assert not np.allclose(np.concatenate(outcome.advantages), np.concatenate(report.advantages), atol=0.1)


def test_with_turn_credit_shaping_falls_on_the_last_trained_token() -> None:
    rules = shaping(algo={"credit": "turn", "reward_clip": (-1.0, 3.0)})
    rows = [*turns(1, [1.0, 0.0, 2.0, 0.5], rows=2), *turns(2, [0.0, 0.25])]
    assert rules.token_rewards(rows).tolist() == [[1.0, 0.0], [2.0, 0.0], [0.0, 0.25]]
    assert shaping().token_rewards(rows) is None


def test_what_a_turn_without_tokens_earned_falls_on_the_last_trained_token() -> None:
    """Turns of +0.25 and, with nothing sampled, of -1: the credit adds up to the outcome, in the rollout it belongs to."""
    episode = Trajectory(Task("t"), "r", "g")
    said = episode.add(None, "user", [1, 2])
    for ids, reward in (([3, 4], 0.25), ([], -1.0)):
        turn = episode.add_sampled(said, Generation(tuple(ids), (-1.0,) * len(ids), spans(len(ids)), "stop"))
        turn.reward, said = reward, episode.add(turn, "user", [5])
    rows = [*turns(2, [0.5, 0.25], rows=2), *episode.rows()]
    rules = shaping(algo={"credit": "turn"})
    assert rules.outcomes(rows).tolist() == [0.75, 0.75, -0.75]
    assert rules.token_rewards(rows).tolist() == [[0.5, 0.0], [0.25, 0.0], [0.0, -0.75]]
    clipped = shaping(algo={"credit": "turn", "reward_clip": (-0.5, 0.5)})
    assert clipped.token_rewards(rows).tolist() == [[0.5, 0.0], [0.0, 0.0], [0.0, -0.5]]


def spans(tokens: int) -> tuple[Span, ...]:
    return (Span(0, 0, tokens),) if tokens else ()


def test_an_overlong_rollout_leaves_the_loss_and_stays_in_the_baseline(make_trainer: Make) -> None:
    rows = [make_row(i, 20 + i, reward=float(i % 2)) for i in range(4)]
    rows[1].truncated = True
    algo = {"name": "reinforce_pp_baseline", "overlong": {"mask": True}}
    trainer = make_trainer(algo=algo)
    before = weights(trainer)
    report = trainer.train(rows, 0)
    unmasked = make_trainer(algo={"name": "reinforce_pp_baseline"}).train(rows, 0)
    for one, other in zip(report.advantages, unmasked.advantages, strict=True):
        assert np.array_equal(one, other)
    model = make_trainer().policy.model
    total, count = torch.zeros(()), 0
    for i in (0, 2, 3):
        ids = torch.from_numpy(rows[i].token_ids).long()
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total - (logp * torch.from_numpy(report.advantages[i])[1:]).sum()
        count += int(rows[i].loss_mask.sum())
    (total / count).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights(trainer)[name], before[name] - 0.1 * parameter.grad, atol=1e-6)
    for row in rows:
        row.truncated = True
    assert not trainer.train(rows, 1).updated


@pytest.mark.parametrize("budget", [100_000, 40])
def test_stale_tokens_leave_the_loss_and_stay_in_the_advantages(make_trainer: Make, budget: int) -> None:
    """Weights of version 2 are trained, one version behind is allowed: tokens of version 0 carry no gradient."""
    sections = {"rollout": {"mask_stale_tokens": True}, "train": {"max_staleness": 1, "micro_batch_tokens": budget}}
    trainer, plain = make_trainer(**sections), make_trainer(train=sections["train"])
    rows = make_rows()
    for row in rows:
        places = np.flatnonzero(row.loss_mask)
        row.versions[places] = 2
        row.versions[places[: len(places) // 2]] = 0
    for one in (trainer, plain):
        one.publish(2)
        one.release()
    before = weights(trainer)
    masked, everything = trainer.train(rows, 0), plain.train(rows, 0)
    for one, other in zip(masked.advantages, everything.advantages, strict=True):
        assert np.array_equal(one, other)
    assert masked.metrics["policy/loss"] != pytest.approx(everything.metrics["policy/loss"], abs=1e-3)
    model = make_trainer().policy.model
    total, count = torch.zeros(()), 0
    for row, advantages in zip(rows, masked.advantages, strict=True):
        fresh = torch.from_numpy(row.loss_mask & (row.versions >= 1))
        ids = torch.from_numpy(row.token_ids).long()
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        weight = (logp.detach() + 5.5).exp().clamp(0, 2) * torch.from_numpy(advantages)[1:]
        total = total - torch.where(fresh[1:], logp * weight, 0.0).sum()
        count += int(fresh.sum()) if row.total_reward is not None else 0
    (total / count).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights(trainer)[name], before[name] - 0.1 * parameter.grad, atol=1e-6)


def test_turn_credit_crosses_a_change_of_row_without_a_step() -> None:
    """A rollout of two rows is worth what one row with the same decisions is."""
    split, whole = turns(1, [0.0, 0.0, 0.0, 1.0], rows=2), turns(1, [0.0, 0.0, 0.0, 1.0])
    rules = shaping(algo={"credit": "turn"})
    for rows in (split, whole):
        token_rewards = rules.token_rewards(rows)
        ids = [row.rollout_id for row in rows]
        found = compute_advantages(
            "reinforce",
            rules.outcomes(rows),
            trained_mask(rows),
            rollout_ids=ids,
            token_rewards=token_rewards,
            gamma=0.5,
            whiten=False,
        )
        assert found.advantages.flatten().tolist() == [0.125, 0.25, 0.5, 1.0]
