"""The loop over a trainer that says what it is told to: what it saves and when, and whose reference it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl import DataError
from agentrl.checkpoint import Checkpoints, read_state
from agentrl.config import DpoConfig, SftConfig
from agentrl.report.run_folder import RunFolder
from agentrl.supervised.examples import Examples, ExamplesOnDemand, Item, Pair
from agentrl.supervised.loop import SupervisedLoop
from agentrl.supervised.plan import make_plan
from agentrl.supervised.references import give_references, reference_of
from agentrl.supervised.run import SupervisedParts, supervised_run
from agentrl.training import TrainReport

from ..trainers.rollouts import make_row


class Told:
    """A trainer without a model: `losses[step]` is what an evaluation after that many updates finds."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.updates = 0
        self.asked = 0

    async def train(self, items: list[Item], step: int) -> TrainReport:
        self.updates += 1
        return TrainReport(True, {})

    async def evaluate(self, items: list[Item]) -> dict[str, float]:
        return {"loss": self.losses[self.updates]}

    async def reference(self, items: list[Item]) -> list[float]:
        self.asked += 1
        return [float(self.asked)] * 2 * len(items)

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.updates))

    async def load(self, folder: Path) -> None:
        self.updates = int((folder / "weights").read_text())

    async def export(self, folder: Path) -> None:
        folder.mkdir()

    async def close(self) -> None:
        pass


class Silent:
    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def stage(self, what: str) -> None: ...


async def test_the_weights_with_the_lowest_loss_are_kept(tmp_path: Path) -> None:
    """Without any checkpoint being due there, and after others that were not as good."""
    config = SftConfig.model_validate({"train": {"batch": 1, "steps": 8}, "eval": {"every": 2}, "ckpt": {"keep": 1}})
    examples = Examples([make_row(i, 8) for i in range(4)])
    trainer = Told([9.0, 9.0, 3.0, 9.0, 1.0, 9.0, 4.0, 9.0, 5.0])
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.ckpt.keep)
    plan = make_plan(config, len(examples), tiny=True)
    loop = SupervisedLoop(config, trainer, examples, examples, plan, checkpoints, RunFolder(tmp_path), Silent())  # type: ignore[arg-type]
    await loop.run()
    best = checkpoints.find("best")
    assert read_state(best).step == 4 and (best / "weights").read_text() == "4"
    assert read_state(best).best == -1.0 and read_state(checkpoints.find("latest")).step == 8
    assert [path.name for path in checkpoints.complete()] == ["step_000004", "step_000008"]


async def test_time_alone_makes_a_checkpoint_due(tmp_path: Path) -> None:
    config = SftConfig.model_validate({"train": {"batch": 1, "steps": 3}})
    examples = Examples([make_row(0, 8)])
    checkpoints = Checkpoints(tmp_path / "checkpoints", 9, minutes=1e-9)
    plan = make_plan(config, 1, tiny=True)
    loop = SupervisedLoop(config, Told([]), examples, None, plan, checkpoints, RunFolder(tmp_path), Silent())  # type: ignore[arg-type]
    await loop.run()
    assert [path.name for path in checkpoints.complete()] == [f"step_00000{step}" for step in (1, 2, 3)]


async def test_a_row_that_cannot_be_read_when_its_turn_comes_loses_nothing(tmp_path: Path) -> None:
    """The run stops with a checkpoint, and goes on from it once the data are mended; a row that is left out is no update."""
    config = SftConfig.model_validate({"train": {"batch": 1, "shuffle": False}})
    trainer = Told([])

    def row(number: int, broken: int) -> list[Item]:
        if number == broken:
            raise DataError(f"row {number} is broken")
        return [] if number == 1 else [make_row(number, 8)]

    async def start(*_: Any) -> Any:
        return trainer

    def parts(broken: int, checkpoint: Path | None) -> SupervisedParts:
        examples = ExamplesOnDemand(count=5, make=lambda i: row(i, broken))
        plan = make_plan(config, 5, tiny=True)
        return SupervisedParts(config, "", examples, None, plan, RunFolder(tmp_path), start, checkpoint)

    with pytest.raises(DataError, match="row 3 is broken"):
        await supervised_run(parts(3, None), Silent())  # type: ignore[arg-type]
    checkpoint = Checkpoints(tmp_path / "checkpoints", 1).find("latest")
    assert read_state(checkpoint).step == 3 and trainer.updates == 2
    await supervised_run(parts(9, checkpoint), Silent())  # type: ignore[arg-type]
    assert trainer.updates == 4 and (tmp_path / "final").is_dir()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["tokens"]) for record in records] == [(1, 8), (2, 0), (3, 8), (4, 8), (5, 8)]


async def test_an_answer_of_one_reference_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    """A run of a name whose folder holds nothing but what another model said of the same pairs."""
    for name in ("one", "two", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("weights")
    trainer = Told([])

    async def references(of: str, **sections: Any) -> tuple[float, float] | None:
        pairs: list[Item] = [Pair(make_row(0, 8), make_row(1, 8))]
        whose = reference_of(DpoConfig.model_validate(sections), str(tmp_path / of))
        examples = Examples(pairs)
        await give_references(trainer, examples, tmp_path / "run", "train", whose, Silent())
        (pair,) = examples.batch([0])
        assert isinstance(pair, Pair)
        return pair.reference

    two = str(tmp_path / "two")
    assert await references("one") == await references("one") == (1.0, 1.0)
    assert await references("two") == (2.0, 2.0)
    assert await references("one", ref={"path": two}) == (2.0, 2.0), "the same model, by another option"
    assert await references("one", lora={"path": str(tmp_path / "adapter")}) == (3.0, 3.0)
    assert await references("one", model={"dtype": "bfloat16"}) == (4.0, 4.0)
    shutil.rmtree(two)
    shutil.copytree(tmp_path / "one", two)
    (tmp_path / "two" / "model.safetensors").write_text("other weights")
    assert await references("two") == (5.0, 5.0), "another model where the first one lay"
    assert await references("one") == (1.0, 1.0) and trainer.asked == 5


async def test_of_many_pairs_some_are_asked_about_at_once_and_each_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.supervised.references.AT_A_TIME", 2)
    trainer, changed = Told([]), False

    def made(number: int) -> list[Item]:
        other = 100 if changed and number == 3 else number
        return [] if number == 1 else [Pair(make_row(other, 8), make_row(50 + number, 9))]

    async def examples() -> Examples:
        some = ExamplesOnDemand(items=made(0), count=5, make=made)
        await give_references(trainer, some, tmp_path, "train", "reference", Silent())
        return some

    first = await examples()
    assert trainer.asked == 3
    again = await examples()
    assert trainer.asked == 3, "kept in the folder"
    for one in (first, again):
        pairs = one.batch([4, 1, 0, 3])
        assert [pair.reference for pair in pairs if isinstance(pair, Pair)] == [(3.0, 3.0), (1.0, 1.0), (2.0, 2.0)]
    changed = True
    with pytest.raises(DataError, match="not the pair that the reference was asked about"):
        (await examples()).batch([0, 3])


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_is_shuffled_once(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SftConfig.model_validate({"train": {"batch": 2, "epochs": 2, "shuffle": shuffle}})
    plan = make_plan(config, 6, tiny=True)
    shuffled = 0

    def count(seed: int, *parts: Any) -> int:
        nonlocal shuffled
        shuffled += 1
        return hash(parts)

    monkeypatch.setattr("agentrl.supervised.plan.derive", count)
    passes = [[i for step in steps for i in plan.indices(step)] for steps in ((1, 2, 3), (4, 5, 6))]
    assert shuffled == (2 if shuffle else 0)
    assert all(sorted(order) == list(range(6)) for order in passes)
