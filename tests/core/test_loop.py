"""The loop on a scripted engine and a trainer that only counts: staleness, conservation, records, resume."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentrl import (
    Env,
    GenerationRequest,
    InfrastructureError,
    Limits,
    MultiTurnExecutor,
    Renderer,
    Reply,
    ScriptedEngine,
    Task,
)
from agentrl.checkpoint import Checkpoints, RunState, read_state
from agentrl.config import Config
from agentrl.engines.fleet import EngineFleet
from agentrl.errors import RunStoppedError
from agentrl.evaluation import BackgroundEvaluation
from agentrl.loop import Loop
from agentrl.report.progress import SilentReporter
from agentrl.report.read_record import read_held
from agentrl.report.run_folder import RunFolder
from agentrl.rollout.dispatcher import Dispatcher
from agentrl.rollout.ledger import GroupLedger, signal_filter
from agentrl.rollout.task_source import TaskSource
from agentrl.rollout.worker import EpisodePlayer
from agentrl.training import TrainReport
from agentrl.trajectory import Row
from agentrl.weight_sync import WeightSync

WORDS = {"<pad>": 0, "<end>": 1, "go": 2, "a": 3, "b": 4}


class Guess(Env):
    """Two turns; the reward of each is 1 for the token `a`."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.turn = 0
        if self.task.label == "broken":
            raise ValueError("no such thing")
        self.verdict = self.task.label != "unjudged"
        return "go", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        reward = float(str(action).startswith("a"))
        return "go", reward if self.verdict else math.nan, self.turn == 2, False, {}


class Counting:
    """A trainer whose weights are the number of batches it was given."""

    def __init__(self) -> None:
        self.batches: list[list[Row]] = []
        self.log: list[str] = []
        self.began = asyncio.Event()

    async def train(self, rows: list[Row], step: int) -> TrainReport:
        self.began.set()
        await asyncio.sleep(0.002)
        self.batches.append(rows)
        return TrainReport(True, {"policy/loss": 0.0}, [np.zeros(len(row), np.float32) for row in rows])

    async def publish(self, version: int) -> int:
        self.log.append(f"publish {version}")
        return version

    async def release(self, source: Any) -> None:
        self.log.append("release")

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text(str(len(self.batches)))

    async def load(self, folder: Path) -> None:
        pass

    async def export(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)

    async def close(self) -> None:
        pass


def reply(request: GenerationRequest) -> Reply:
    """Depends on the seed alone; the delays make episodes overtake each other."""
    seed = request.sampling.seed or 0
    return Reply([3 + seed % 2, 1], [-0.5, -0.1], delay_s=0.001 * (seed % 7))


def tokenizer() -> PreTrainedTokenizerFast:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(WORDS, "<pad>")), eos_token="<end>")
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return words


def make_loop(
    folder: Path,
    tasks: Iterable[Task],
    *,
    resume: Path | None = None,
    evaluator: Any = None,
    script: Any = reply,
    more: dict[str, Any] | None = None,
    filter_groups: bool = False,
    limits: dict[str, float] | None = None,
    **train: Any,
) -> tuple[Loop, Counting, ScriptedEngine]:
    state = RunState() if resume is None else read_state(resume)
    sections = {
        "train": {"batch_groups": 2, "max_staleness": 1} | train,
        "rollout": {"n_samples": 3, "sampler": "in_order"},
        "watchdog": {"fail_after": 20},
    }
    config = Config.model_validate(sections | (more or {}))
    engine = ScriptedEngine(script, state.version)
    player = EpisodePlayer([engine], Renderer(tokenizer()), MultiTurnExecutor(Guess, "guess"), env="guess")
    steps = config.train.steps
    ledger = GroupLedger(
        config,
        draws=len(tasks) if steps is None and isinstance(tasks, Sized) else None,
        wanted=None if steps is None else (steps - state.step) * config.train.batch_groups,
        keep=signal_filter(config) if filter_groups else lambda group: True,
        version=state.version,
        held=None if resume is None else read_held(resume, state.next_draw, state.reissue),
    )
    bounds = Limits(max_turns=4, max_new_tokens=4, max_len=64, **limits or {})
    trainer = Counting()
    loop = Loop(
        config,
        Dispatcher(config, player, TaskSource(tasks, seed=0, shuffle=False), bounds, ledger),
        WeightSync(config, trainer, EngineFleet([engine]), state.version),
        BackgroundEvaluation(evaluator),
        Checkpoints(folder / "checkpoints", 2),
        RunFolder(folder),
        SilentReporter(),
        steps,
        state,
    )
    return loop, trainer, engine


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted((folder / "rollouts").glob("*.jsonl")) for line in path.open()]


def kept_draws(dispatcher: Dispatcher) -> list[int]:
    """Draws that a checkpoint of this moment would keep."""
    held = dispatcher.held()
    return sorted([*held.reissue, *(group.draw for group in held.groups)])


def tasks(n: int, broken: tuple[int, ...] = ()) -> list[Task]:
    return [Task(id=str(i), label="broken" if i in broken else "fine") for i in range(n)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_every_draw_is_trained_once_and_never_too_stale(tmp_path: Path, staleness: int) -> None:
    loop, trainer, engine = make_loop(tmp_path, tasks(10), max_staleness=staleness)
    await loop.run()
    assert [len(rows) for rows in trainer.batches] == [6, 6, 6, 6, 6]
    trained = Counter(row.rollout_id for rows in trainer.batches for row in rows)
    assert len(trained) == 30 and set(trained.values()) == {1}
    for version, rows in enumerate(trainer.batches):
        assert all(0 <= version - row.oldest_version <= staleness for row in rows)
    metrics = [json.loads(line) for line in loop.folder.metrics.open()]
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5]
    assert max(record["staleness/max"] for record in metrics) <= staleness
    assert engine.version == 5 and loop.sync.version == 5


async def test_what_is_trained_is_what_the_engine_sampled(tmp_path: Path) -> None:
    loop, trainer, engine = make_loop(tmp_path, tasks(4))
    await loop.run()
    sampled = {r.request_id: reply(r).token_ids for r in engine.requests}
    for row in (row for rows in trainer.batches for row in rows):
        turns = [sampled[f"{row.rollout_id}-{turn}"] for turn in (0, 1)]
        assert row.token_ids[row.loss_mask].tolist() == [*turns[0], *turns[1]]


async def test_a_short_last_batch_is_trained(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(5))
    await loop.run()
    assert [len(rows) for rows in trainer.batches] == [6, 6, 3]
    assert all(record["outcome"] == "trained" for record in records(tmp_path))


async def test_a_fixed_number_of_steps_starts_no_group_too_many(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(50), steps=3)
    await loop.run()
    assert len(trainer.batches) == 3
    assert loop.dispatcher.ledger.next_draw == 6
    assert [path.stem for path in sorted((tmp_path / "rollouts").iterdir())] == [f"step_{i:06d}" for i in (1, 2, 3)]


async def test_failed_groups_are_recorded_and_give_their_place_back(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(8, broken=(1, 5)))
    await loop.run()
    outcomes = Counter((record["draw"], record["outcome"]) for record in records(tmp_path))
    assert {draw for draw, outcome in outcomes if outcome == "failed"} == {1, 5}
    assert {draw for draw, outcome in outcomes if outcome == "trained"} == {0, 2, 3, 4, 6, 7}
    assert set(outcomes.values()) == {3}
    assert [len(rows) for rows in trainer.batches] == [6, 6, 6]


@pytest.mark.parametrize(("label", "why"), [("broken", "ValueError: no such thing"), ("unjudged", "no verdict")])
async def test_a_run_that_cannot_train_anything_stops_and_says_why(label: str, why: str, tmp_path: Path) -> None:
    """Also where the tasks have no end."""
    loop, trainer, _ = make_loop(tmp_path, [Task(str(i), label=label) for i in range(8)], steps=2)
    with pytest.raises(RunStoppedError, match=why):
        await asyncio.wait_for(loop.run(), 20)
    assert not trainer.batches
    await loop.dispatcher.stop()


async def test_an_interrupted_run_goes_on_with_the_draws_it_owes(tmp_path: Path) -> None:
    whole, trainer, _ = make_loop(tmp_path / "whole", tasks(12), max_staleness=0)
    await whole.run()
    first, before, _ = make_loop(tmp_path / "cut", tasks(12), max_staleness=0, steps=3)
    await first.run()
    checkpoint = first.checkpoints.find("latest")
    assert read_state(checkpoint) == RunState(step=3, version=3, next_draw=6)
    second, after, engine = make_loop(tmp_path / "cut", tasks(12), resume=checkpoint, max_staleness=0)
    await second.restore(checkpoint)
    await second.run()
    assert engine.calls[0] == ("pause", "keep")
    ids = [[row.rollout_id for row in rows] for rows in [*before.batches, *after.batches]]
    assert ids == [[row.rollout_id for row in rows] for rows in trainer.batches]
    steps = [json.loads(line)["step"] for line in second.folder.metrics.open()]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("end", ["steps", "data"])
async def test_no_draw_is_lost_where_a_run_that_had_ended_goes_on(tmp_path: Path, end: str) -> None:
    """Whether it ended with groups in flight, or with one that failed after the last batch."""

    def slow(request: GenerationRequest) -> Reply:
        late = request.episode_id.startswith("000004") or (request.sampling.seed or 0) % 5 == 0
        return Reply([3, 1], delay_s=0.05 if late else 0.001)

    names = ["fine"] * 4 + ["unjudged"] + ["fine"] * 5
    given = [Task(str(i), label=name) for i, name in enumerate(names)]
    drop = {"n_samples": 3, "sampler": "in_order", "order": "first_done", "oversample": 1.5}
    more = {"rollout": drop} if end == "steps" else {"rollout": {"n_samples": 3, "sampler": "in_order"}}
    stale = "drop" if end == "steps" else "wait"
    lives = [(10, 3), (10, 6)] if end == "steps" else [(5, None), (10, None)]
    checkpoint = None
    for known, steps in lives:
        source = given[:known] if steps is None else tasks(200)
        loop, _, _ = make_loop(tmp_path, source, script=slow, more=more, resume=checkpoint, stale=stale, steps=steps)
        loop.folder.begin("", None if checkpoint is None else read_state(checkpoint).step)
        await loop.run()
        found = records(tmp_path)
        begun = set(range(loop.dispatcher.ledger.next_draw))
        ended = Counter((r["draw"], r["sample"]) for r in found if r["outcome"] != "stale")
        assert {draw for draw, _ in ended} == begun and set(ended.values()) == {1}
        if checkpoint is None:
            kept = [path.name for path in (tmp_path / "rollouts").iterdir()]
            assert f"step_{loop.step + 1:06d}.jsonl" in kept, "something was left over"
        checkpoint = loop.checkpoints.find("latest")


async def test_cancelling_finishes_the_step_and_owes_the_rest(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(40))
    run = asyncio.ensure_future(loop.run())
    await trainer.began.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await loop.dispatcher.stop()
    assert loop.resumable
    owed = kept_draws(loop.dispatcher)
    loop.record_unfinished()
    seen = {record["draw"] for record in records(tmp_path)}
    assert seen == set(range(loop.dispatcher.ledger.next_draw)) and set(owed) <= seen


async def test_an_engine_is_never_left_paused(tmp_path: Path) -> None:
    loop, _, engine = make_loop(tmp_path, tasks(4))

    async def refuse(source: Any, version: int) -> None:
        raise RuntimeError("no room")

    engine.update_weights = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no room"):
        await loop.run()
    assert engine.calls[-1] == ("resume",)
    await loop.dispatcher.stop()


async def test_one_engine_that_does_not_pause_leaves_no_other_paused() -> None:
    good, deaf = ScriptedEngine(reply), ScriptedEngine(reply)

    async def refuse(mode: Any) -> None:
        raise RuntimeError("deaf")

    deaf.pause = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="deaf"):
        await EngineFleet([deaf, good]).publish(None, 1)
    assert [call[0] for call in good.calls] == ["pause", "resume"]


async def test_no_engine_is_resumed_while_another_still_loads() -> None:
    slow, bad = ScriptedEngine(reply), ScriptedEngine(reply)

    async def load(source: Any, version: int) -> None:
        await asyncio.sleep(0.02)
        slow.calls.append(("loaded",))

    async def refuse(source: Any, version: int) -> None:
        raise RuntimeError("no room")

    slow.update_weights, bad.update_weights = load, refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no room"):
        await EngineFleet([bad, slow]).publish(None, 1)
    assert [call[0] for call in slow.calls] == ["pause", "loaded", "resume"]


async def test_records_are_written_only_where_they_are_wanted(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(4), more={"log": {"rollouts": False}})
    await loop.run()
    assert len(trainer.batches) == 2 and not (tmp_path / "rollouts").exists()


async def test_a_batch_of_a_cancelled_wait_is_still_there(tmp_path: Path) -> None:
    """Cancelled in the very moment in which the last episode ends: the groups are owed, not lost."""
    loop, _, _ = make_loop(tmp_path, tasks(40))
    dispatcher = loop.dispatcher
    fill, waiting = dispatcher._fill, asyncio.ensure_future(dispatcher.next_batch())

    def fill_and_cancel() -> None:
        fill()
        if sum(group.finished for group in dispatcher.ledger.groups) == 2:
            asyncio.get_running_loop().call_soon(waiting.cancel)

    dispatcher._fill = fill_and_cancel  # type: ignore[method-assign]
    dispatcher.start()
    await asyncio.wait([waiting])
    await dispatcher.stop()
    assert kept_draws(dispatcher) == list(range(dispatcher.ledger.next_draw))


async def test_ended_groups_without_a_record_are_owed_and_keep_their_outcome(tmp_path: Path) -> None:
    loop, _, _ = make_loop(tmp_path, tasks(4, broken=(0, 1, 2, 3)), max_staleness=0, batch_groups=4)
    loop.dispatcher.start()
    await asyncio.wait(set(loop.dispatcher._episodes))
    assert kept_draws(loop.dispatcher) == [0, 1, 2, 3]
    await loop.dispatcher.stop()
    loop.record_unfinished()
    assert {record["outcome"] for record in records(tmp_path)} == {"failed"}


async def test_a_step_that_fails_after_the_interrupt_is_not_saved(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(40))
    began = asyncio.Event()

    async def fail(rows: list[Row], step: int) -> TrainReport:
        began.set()
        await asyncio.sleep(0.02)
        raise RuntimeError("out of memory")

    trainer.train = fail  # type: ignore[method-assign]
    run = asyncio.ensure_future(loop.run())
    await began.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await loop.dispatcher.stop()
    assert loop.step == 1 and not loop.resumable
    loop.record_unfinished()
    assert {(record["step"], record["outcome"]) for record in records(tmp_path)} == {(1, "cancelled")}


async def test_a_trainer_that_hangs_ends_the_run(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(4), more={"watchdog": {"warn_after": 0.1, "fail_after": 0.3}})

    async def hang(rows: list[Row], step: int) -> TrainReport:
        await asyncio.Event().wait()
        raise AssertionError

    trainer.train = hang  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="the trainer, in step 1"):
        await loop.run()
    await loop.dispatcher.stop()


async def test_a_batch_may_take_longer_than_the_watch_as_long_as_episodes_end(tmp_path: Path) -> None:
    def slow(request: GenerationRequest) -> Reply:
        return Reply([3, 1], delay_s=0.1)

    more = {"watchdog": {"warn_after": 1, "fail_after": 0.5}, "rollout": {"n_samples": 2, "max_episodes": 1}}
    loop, trainer, _ = make_loop(tmp_path, tasks(2), script=slow, more=more, max_staleness=0)
    await loop.run()
    assert len(trainer.batches) == 1


async def test_time_alone_makes_a_checkpoint_due(tmp_path: Path) -> None:
    loop, _, _ = make_loop(tmp_path, tasks(6))
    loop.checkpoints = Checkpoints(tmp_path / "checkpoints", 9, minutes=1e-9)
    await loop.run()
    assert [path.name for path in loop.checkpoints.complete()] == [f"step_00000{step}" for step in (1, 2, 3)]


async def test_what_is_awaited_for_too_long_is_named(tmp_path: Path) -> None:
    async def never(engine: int) -> None:
        await asyncio.Event().wait()

    loop, _, _ = make_loop(tmp_path, tasks(2), more={"watchdog": {"warn_after": 0.1, "fail_after": 0.2}})
    loop.dispatcher._ready = never
    with pytest.raises(InfrastructureError, match=r"group 000000 \(0/3 episodes\).*waits for engine 0"):
        await loop.run()
    await loop.dispatcher.stop()


async def test_an_episode_that_hangs_costs_itself_however_short_the_watch(tmp_path: Path) -> None:
    """Also where none has ended yet: every episode hangs once, one of them for ever."""
    hung: set[str] = set()

    def script(request: GenerationRequest) -> Reply:
        hangs = request.episode_id == "000000-1" or request.episode_id not in hung
        hung.add(request.episode_id)
        return Reply([3, 1], hang=hangs)

    limits = {"episode_timeout_s": 0.7, "call_timeout_s": 0.4}
    more = {"watchdog": {"warn_after": 0.1, "fail_after": 0.2}, "rollout": {"n_samples": 3, "retries": 3}}
    loop, trainer, _ = make_loop(tmp_path, tasks(2), script=script, more=more, limits=limits, max_staleness=0)
    await loop.run()
    assert len(trainer.batches) == 1 and len(hung) == 6
    failed = [record["rollout_id"] for record in records(tmp_path) if record["error"]]
    assert failed == ["000000-1"]


async def test_an_update_waits_for_the_bound_of_the_episodes_that_run(tmp_path: Path) -> None:
    """Of a single version each: those that run are finished first, however short the watch."""

    def script(request: GenerationRequest) -> Reply:
        return Reply([3, 1], delay_s=0.0 if request.episode_id.startswith("000000") else 0.4)

    more = {"watchdog": {"warn_after": 0.05, "fail_after": 0.1}, "rollout": {"n_samples": 2, "partial": False}}
    loop, trainer, _ = make_loop(tmp_path, tasks(2), script=script, more=more, batch_groups=1)
    await loop.run()
    assert len(trainer.batches) == 2


def test_the_newest_checkpoint_stays_beside_later_ones_of_a_run_that_was_gone_back_on(tmp_path: Path) -> None:
    async def write(folder: Path) -> None:
        (folder / "weights").write_text("w")

    for keep, left in ((1, ["step_000002"]), (2, ["step_000002", "step_000009"])):
        checkpoints = Checkpoints(tmp_path / str(keep), 9)
        for step in (4, 9):
            asyncio.run(checkpoints.save(RunState(step), write))
        checkpoints.keep = keep
        asyncio.run(checkpoints.save(RunState(2), write))
        assert [path.name for path in checkpoints.complete()] == left
        assert checkpoints.find("latest").name == "step_000002"


def test_a_stream_of_tasks_gives_a_draw_again() -> None:
    source = TaskSource(iter(tasks(4)), seed=0, shuffle=False)
    assert [source.at(draw).id for draw in (2, 0, 3, 1)] == ["2", "0", "3", "1"]
    assert source.at(4) is None
