"""The loop under each rule: what is dropped and played again, masked, of a single version, evaluated beside training."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import GenerationRequest, Limits, Reply, Task
from agentrl.config import Config
from agentrl.config.best_metric import measured
from agentrl.config.plan import describe, draws_in_all, make_plan
from agentrl.evaluation import Evaluator
from agentrl.rollout.episode import EpisodeOrder, EpisodeResult, failed
from agentrl.rollout.worker import EpisodePlayer
from agentrl.seeds import derive
from agentrl.training import TrainReport
from agentrl.trajectory import Row

from .test_loop import make_loop, records, tasks


def uneven(request: GenerationRequest) -> Reply:
    """Every seventh turn takes long."""
    seed = request.sampling.seed or 0
    return Reply([3 + seed % 2, 1], delay_s=0.06 if seed % 7 == 0 else 0.002)


def dropping(**rollout: Any) -> dict[str, Any]:
    more = {"n_samples": 3, "sampler": "in_order", "order": "first_done", "oversample": 2.0}
    return {"rollout": more | rollout, "algo": {"allow_uncorrected": True}}


async def test_stale_groups_are_recorded_and_their_draws_trained_later(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(
        tmp_path, tasks(24), script=uneven, more=dropping(), stale="drop", max_staleness=0, batch_groups=2
    )
    await loop.run()
    lines = records(tmp_path)
    outcomes = Counter(line["outcome"] for line in lines)
    assert outcomes["stale"] and outcomes["trained"] == 24 * 3 and not outcomes["cancelled"]
    ends = defaultdict(list)
    for line in lines:
        ends[line["draw"], line["sample"]].append(line["outcome"])
    assert all(found.count("trained") == 1 and found.count("stale") == len(found) - 1 for found in ends.values())
    for version, rows in enumerate(trainer.batches):
        assert all(row.oldest_version == version for row in rows)
    stale = sum(json.loads(line)["groups/stale"] for line in loop.folder.metrics.open())
    assert stale == outcomes["stale"] / 3


async def test_with_drop_alone_training_goes_on_without_a_slow_group(tmp_path: Path) -> None:
    """In order too: what was too old when it came is played again, and goes first then."""
    third_step = asyncio.Event()

    async def script(request: GenerationRequest) -> Reply:
        if request.request_id == "000000-0-0":
            await third_step.wait()
        return Reply([3, 1])

    loop, trainer, _ = make_loop(tmp_path, tasks(16), script=script, stale="drop")
    train = trainer.train

    async def told(rows: list[Row], step: int) -> TrainReport:
        if step == 3:
            third_step.set()
        return await train(rows, step)

    trainer.train = told  # type: ignore[method-assign]
    await asyncio.wait_for(loop.run(), 20)
    ends = [(line["draw"], line["outcome"]) for line in records(tmp_path) if line["sample"] == 0]
    assert sorted(outcome for draw, outcome in ends if draw == 0) == ["stale", "trained"]
    assert Counter(outcome for _, outcome in ends)["trained"] == 16


async def test_where_stale_tokens_are_masked_no_batch_waits_for_a_slow_group(tmp_path: Path) -> None:
    """The trainer gets the rows as they were sampled and masks them itself; what is counted as stale is what it sees."""
    more = {"rollout": {"n_samples": 3, "sampler": "in_order", "mask_stale_tokens": True}}
    loop, trainer, _ = make_loop(tmp_path, tasks(24), script=uneven, more=more, max_staleness=1, batch_groups=1)
    await loop.run()
    lines = [line for line in records(tmp_path) if line["outcome"] == "trained"]
    assert len(lines) == 24 * 3
    recorded = {line["rollout_id"]: line["rows"][0]["loss_mask"] for line in lines}
    ages = []
    for version, rows in enumerate(trainer.batches):
        ages += [version - row.oldest_version for row in rows]
        assert all(row.loss_mask.astype(int).tolist() == recorded[row.rollout_id] for row in rows)
    assert max(ages) > 1
    assert max(json.loads(line)["staleness/max"] for line in loop.folder.metrics.open()) <= 1


async def test_without_partial_rollouts_every_episode_is_of_one_version(tmp_path: Path) -> None:
    """Also with fewer seats than episodes: who waits for one begins after the update."""
    more = {"rollout": {"n_samples": 3, "sampler": "in_order", "partial": False, "max_episodes": 2}}
    loop, trainer, engine = make_loop(tmp_path, tasks(8), script=uneven, more=more, max_staleness=2, batch_groups=1)
    await loop.run()
    rows = [row for batch in trainer.batches for row in batch]
    assert len(rows) == 24 and all(len(set(row.versions[row.loss_mask])) == 1 for row in rows)
    assert len({row.oldest_version for row in rows}) > 1
    pauses = [i for i, call in enumerate(engine.calls) if call[0] == "pause"]
    assert len(pauses) == 8


async def test_partial_rollouts_go_on_across_updates(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(24), script=uneven, max_staleness=2, batch_groups=1)
    await loop.run()
    rows = [row for batch in trainer.batches for row in batch]
    assert any(len(set(row.versions[row.loss_mask])) > 1 for row in rows)


def evaluated(engine: Any, player: Any, timeout_s: float = 600.0) -> Evaluator:
    config = Config.model_validate({"eval": {"n": 2, "tasks": 2, "timeout_s": timeout_s, "greedy": False}})
    return Evaluator(config, player, tasks(2), Limits(max_turns=4, max_new_tokens=4, max_len=64))


async def test_the_next_update_waits_for_an_evaluation_and_what_is_late_is_counted(tmp_path: Path) -> None:
    """Held-out episodes take long, one of them for ever; training goes on meanwhile and its batches are the same."""
    held_out = {derive(0, "eval", i, sample) for i in range(2) for sample in range(2)}
    first_turns = {derive(seed, 0) for seed in held_out}
    hanging = derive(derive(0, "eval", 1, 1), 0)

    def script(request: GenerationRequest) -> Reply:
        if request.sampling.seed in first_turns:
            return Reply([3, 1], delay_s=0.05, hang=request.sampling.seed == hanging)
        return uneven(request)

    more = {"eval": {"every": 2}, "rollout": {"n_samples": 3, "sampler": "in_order"}}
    plain, before, _ = make_loop(tmp_path / "plain", tasks(8), script=script, more=more, max_staleness=1)
    loop, trainer, engine = make_loop(tmp_path / "eval", tasks(8), script=script, more=more, max_staleness=1)
    for run in (plain, loop):
        run.folder.begin("", None)
    await plain.run()
    loop.evaluation.evaluator = evaluated(engine, loop.dispatcher.player, timeout_s=1.5)  # type: ignore[attr-defined]
    await loop.run()
    assert what_was_trained(trainer.batches) == what_was_trained(before.batches)
    lines = [json.loads(line) for line in loop.folder.metrics.open()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    found = {line["step"]: (line["eval/version"], line["eval/excluded"]) for line in lines if "eval/version" in line}
    assert found == {0: (0.0, 1.0), 2: (2.0, 1.0), 4: (4.0, 1.0)}
    first_update = engine.calls.index(("update_weights", 1))
    evaluating = [call for call in engine.calls[:first_update] if str(call[1]).startswith("eval-")]
    assert len(evaluating) == 7, "two turns each, of the late one the first"


async def test_an_evaluation_keeps_to_the_seats_and_comes_first(tmp_path: Path) -> None:
    """With fewer seats than episodes no more environments than seats are open, and those that are held out go first."""
    now, most, begun = 0, 0, []

    class Seated(EpisodePlayer):
        async def play(self, order: EpisodeOrder) -> EpisodeResult:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            begun.append(order.training)
            try:
                return await super().play(order)
            finally:
                now -= 1

    more = {"rollout": {"n_samples": 2, "max_episodes": 3}, "eval": {"n": 2}}
    loop, _, _ = make_loop(tmp_path, tasks(6), more=more, steps=2)
    dispatcher: Any = loop.dispatcher
    dispatcher.player.__class__ = Seated
    loop.evaluation.evaluator = Evaluator(
        loop.config, dispatcher.player, tasks(4), dispatcher.limits, seats=dispatcher.seats
    )
    await loop.run()
    assert most == 3
    assert begun.count(False) == 2 * 4 * 3, "twice, of four tasks two samples and a greedy one"
    assert not any(begun[3:15]), "after the three that had their seats already"
    records = [json.loads(line) for line in loop.folder.metrics.open()]
    assert [record.get("eval/excluded") for record in records] == [0.0, None, 0.0]


def what_was_trained(batches: list[list[Row]]) -> list[list[tuple[str, list[int]]]]:
    return [[(row.rollout_id, row.token_ids.tolist()) for row in rows] for rows in batches]


async def test_the_best_evaluated_checkpoint_is_marked_and_stays(tmp_path: Path) -> None:
    """A score of only some of the episodes is never the best."""
    more = {"eval": {"every": 1}, "ckpt": {"every": 1}, "rollout": {"n_samples": 2, "sampler": "in_order"}}
    loop, _, _ = make_loop(tmp_path, tasks(10), more=more, max_staleness=0)
    scores = iter([0.2, 0.1, 0.9, 1.0, 0.4, 0.5])

    class Scripted:
        episodes = 1

        async def engines_back(self) -> None:
            pass

        async def run(self) -> dict[str, float]:
            await asyncio.sleep(0)
            score = next(scores)
            return {"eval/score/mean": score, "eval/reward/mean": 0.0, "eval/excluded": float(score == 1.0)}

    loop.evaluation.evaluator = Scripted()  # type: ignore[assignment]
    await loop.run()
    assert [path.name for path in loop.checkpoints.complete()] == ["step_000002", "step_000004", "step_000005"]
    assert loop.checkpoints.find("best").name == "step_000002"


async def test_a_run_that_goes_back_behind_its_best_has_another(tmp_path: Path) -> None:
    more = {"eval": {"every": 1}, "ckpt": {"every": 1}, "rollout": {"n_samples": 2, "sampler": "in_order"}}
    back = None
    for scores, best in (([0.1, 0.5, 0.2, 0.9], "step_000003"), ([0.3, 0.4], "step_000001")):
        loop, _, _ = make_loop(tmp_path, tasks(20), more=more, max_staleness=0, steps=3, resume=back)
        loop.checkpoints.keep = 9
        coming = iter(scores)

        class Scripted:
            episodes = 1

            async def run(self, coming: Any = coming) -> dict[str, float]:
                return {"eval/score/mean": next(coming), "eval/reward/mean": 0.0}

        loop.evaluation.evaluator = Scripted()  # type: ignore[assignment]
        if back is not None:
            await loop.restore(back)
        await loop.run()
        assert loop.checkpoints.find("best").name == best
        back = loop.checkpoints.folder / "step_000002"


@pytest.mark.parametrize(("best_by", "best"), [("eval/pass@4", 3), ("eval/other", None), ("none", None)])
async def test_the_best_checkpoint_is_so_by_a_metric_of_ones_own(
    best_by: str, best: int | None, tmp_path: Path
) -> None:
    more = {"eval": {"every": 1}, "ckpt": {"every": 1, "best_by": best_by}, "rollout": {"n_samples": 2}}
    loop, _, _ = make_loop(tmp_path, tasks(10), more=more, max_staleness=0)
    passed = iter([0.5, 0.2, 0.4, 0.8, 0.1, 0.3])

    class Scripted:
        episodes = 1

        async def engines_back(self) -> None:
            pass

        async def run(self) -> dict[str, float]:
            return {"eval/score/mean": 1.0, "eval/pass@4": next(passed)}

    loop.evaluation.evaluator = Scripted()  # type: ignore[assignment]
    await loop.run()
    assert loop.state.best_step == best


async def test_several_evaluation_sets_are_reported_each(tmp_path: Path) -> None:
    """Scores of 1 on the first set, of 0 on the second; pass@k of n samples of each."""
    names = ("easy", "hard")
    held_out = [Task(f"{name}/row-{i}", f"{name} {i}") for name in names for i in range(3)]
    sets = {"path": "x", "test_path": [f"{name}.jsonl" for name in names]}
    config = Config.model_validate({"data": sets, "eval": {"n": 2, "greedy": False}})

    class Graded:
        async def play(self, order: Any) -> Any:
            score = float(order.task.id.startswith("easy"))
            return replace(failed(order, ValueError("x")), error=None, total_reward=score, score=score)

    found = await Evaluator(config, Graded(), held_out, Limits()).run()  # type: ignore[arg-type]
    assert found["eval/pass@2"] == 0.5 and found["eval/score/mean"] == 0.5 and found["eval/episodes"] == 12
    assert found["eval/easy/pass@2"] == 1.0 and found["eval/hard/pass@2"] == 0.0
    assert found["eval/easy/episodes"] == found["eval/hard/episodes"] == 6


@pytest.mark.parametrize(
    "sections",
    [
        {"env": {"name": "a"}},
        {"env": {"name": ["a", "pkg:b"]}, "eval": {"n": 4}},
        {"data": {"path": "x", "test_path": ["p/easy.jsonl", "hard.jsonl"]}, "eval": {"n": 2, "greedy": False}},
        {"data": {"path": "x", "test_path": ["e.jsonl", "q/e.jsonl"]}, "eval": {"temperature": 0.0}},
    ],
)
async def test_what_may_make_the_best_checkpoint_is_what_an_evaluation_measures(sections: dict[str, Any]) -> None:
    config = Config.model_validate(sections)
    names = [f"{label}/" for label in config.data.test_labels] or [""]
    held_out = [Task(f"{name}row-{i}", name) for name in names for i in range(2)]
    envs = iter([*config.env.labels.values(), ""] * 100)

    class Graded:
        async def play(self, order: Any) -> Any:
            result = replace(failed(order, ValueError("x")), error=None, total_reward=1.0, score=1.0)
            return replace(result, env=next(envs))

    found = await Evaluator(config, Graded(), held_out, Limits()).run()  # type: ignore[arg-type]
    counts = {key for key in found if key.endswith(("/episodes", "/excluded"))}
    listed = {f"eval/{name}" for name in measured(config)}
    assert found.keys() - counts <= listed
    assert all(name in found for name in listed if "/env/" not in name)


def test_passes_over_the_tasks() -> None:
    """Three passes over 10 tasks in batches of 4: the short batch is the last of all, not of each pass."""
    config = Config.model_validate({"train": {"passes": 3, "batch_groups": 4}})
    assert make_plan(config, 10, tiny=True).steps == 8
    assert draws_in_all(config, 10) == 30 and draws_in_all(config, None) is None
    assert draws_in_all(Config.model_validate({"train": {"steps": 2}}), 10) is None


def test_ckp_02_the_plan_of_a_run_counts_optimizer_updates() -> None:
    """16 prompts x 4 samples in updates of 16, 2 epochs, 5 batches in each of 3 passes."""
    train = {"batch_groups": 16, "updates_per_batch": 4, "epochs": 2, "passes": 3}
    config = Config.model_validate({"train": train, "rollout": {"n_samples": 4}})
    plan = make_plan(config, 80, tiny=True)
    assert (plan.steps, plan.updates_per_step, plan.updates) == (15, 8, 120)


def test_a_plan_says_that_a_filter_may_end_the_run_sooner() -> None:
    """Groups that are dropped use up tasks, so the updates cannot be known; --train.steps makes as many as it says."""

    def said(filters: bool = True, **sections: Any) -> bool:
        config = Config.model_validate({"train": {"batch_groups": 4}} | sections)
        return any(
            "--train.steps" in line for line in describe(config, make_plan(config, 64, tiny=True), 64, filters=filters)
        )

    assert said() and not said(filters=False)
    assert not said(train={"steps": 16}) and not said(optim={"schedule": "constant"})
