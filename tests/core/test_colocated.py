"""One GPU for engine and trainer, in turn: the order of calls, on a scripted engine that refuses any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import ConfigError, EngineError, GenerationRequest, Limits, Reply, ScriptedEngine
from agentrl.cluster import check_gpus
from agentrl.config import Config
from agentrl.evaluation import BackgroundEvaluation, Evaluator
from agentrl.loop import Loop

from .test_checks import check
from .test_loop import Counting, make_loop, reply, tasks

MORE: dict[str, Any] = {
    "engine": {"colocated": True},
    "eval": {"every": 1, "tasks": 2, "greedy": False},
    "ckpt": {"every": 1},
}
TURN = [
    ("pause", "wait"), ("sleep",), ("onload",), ("offload",), ("wake", "weights"), ("update_weights",), ("wake", "kv_cache"),
    ("resume",),
]  # fmt: skip


def colocated(folder: Path, resume: Path | None = None) -> tuple[Loop, Counting, ScriptedEngine]:
    """A run whose engine answers nothing while the trainer has the GPU; it begins with the engine awake."""
    folder.mkdir(exist_ok=True)
    on_gpu: list[str] = []

    def script(request: GenerationRequest) -> Reply:
        assert not on_gpu, "sampled while the trainer has the GPU"
        return reply(request)

    loop, trainer, engine = make_loop(
        folder, tasks(6), resume=resume, script=script, more=MORE, max_staleness=0, steps=3
    )  # fmt: skip

    async def onload() -> None:
        on_gpu.append("trainer")
        engine.calls.append(("onload",))

    async def offload() -> None:
        on_gpu.clear()
        engine.calls.append(("offload",))

    trainer.onload, trainer.offload = onload, offload  # type: ignore[attr-defined]
    limits = Limits(max_turns=4, max_new_tokens=4, max_len=64)
    loop.evaluation = BackgroundEvaluation(Evaluator(loop.config, loop.dispatcher.player, tasks(2), limits))  # type: ignore[attr-defined]
    return loop, trainer, engine


def check_turns(engine: ScriptedEngine) -> None:
    """Every sleep is followed by the calls that bring the engine back, in order, and nothing is sampled in between."""
    calls = [(call[0],) if call[0] == "update_weights" else call for call in engine.calls]
    begins = [i for i, call in enumerate(calls) if call == ("pause", "wait")]
    assert begins and all(calls[i : i + len(TURN)] == TURN for i in begins)
    assert sum(call[0] in ("wake", "sleep") for call in calls) == 3 * len(begins)


async def test_everything_is_sampled_by_the_trainers_weights(tmp_path: Path) -> None:
    """Training, evaluation, checkpoints in between, and the same again after a resume from the first one."""
    loop, trainer, engine = colocated(tmp_path / "whole")
    await loop.run()
    check_turns(engine)
    assert len(trainer.batches) == 3 and engine.version == 3
    for version, rows in enumerate(trainer.batches):
        assert all((row.versions[row.loss_mask] == version).all() for row in rows)
    records = [json.loads(line) for line in loop.folder.metrics.open()]
    assert [record["eval/version"] for record in records if "eval/version" in record] == [0, 1, 2, 3]
    checkpoint = min((tmp_path / "whole" / "checkpoints").glob("step_*"))
    resumed, after, other = colocated(tmp_path / "whole", resume=checkpoint)
    first = resumed.step
    await resumed.restore(checkpoint)
    await resumed.run()
    check_turns(other)
    assert [row.rollout_id for rows in after.batches for row in rows] == [
        row.rollout_id for rows in trainer.batches[first:] for row in rows
    ]
    for version, rows in enumerate(after.batches, first):
        assert all((row.versions[row.loss_mask] == version).all() for row in rows)


async def test_a_scripted_engine_refuses_another_order() -> None:
    engine = ScriptedEngine([Reply([1])])
    with pytest.raises(EngineError, match="sleep is called paused"):
        await engine.sleep()
    await engine.pause("wait")
    await engine.sleep()
    await engine.wake("weights")
    with pytest.raises(EngineError, match="kv_cache, loading"):
        await engine.resume()
    await engine.wake("kv_cache")
    with pytest.raises(EngineError, match="between wake"):
        await engine.update_weights(None, 1)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"max_staleness": 1}}, "engine.colocated needs --train.max-staleness 0"),
        ({"algo": {"kl": {"coef": 0.1}}}, "algo.kl.coef without --ref.offload"),
        ({"values": True}, "its critic stays on the GPU"),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(**{"train": {"max_staleness": 0}, "engine": {"colocated": True}, **sections})


@pytest.mark.parametrize(
    ("gpus", "count", "said"), [(0.0, 1, "there is no GPU"), (4.0, 2, "one engine and one trainer")]
)
def test_it_is_for_one_gpu(gpus: float, count: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    there = {"GPU": gpus, "CPU": 8.0}
    for name, found in {"cluster_resources": there, "available_resources": there}.items():
        monkeypatch.setattr(ray, name, lambda found=found: found)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": there}])
    config = Config.model_validate({"engine": {"colocated": True, "count": count}})
    with pytest.raises(ConfigError, match=said):
        check_gpus(config)
    one = Config.model_validate({"engine": {"colocated": True}})
    assert gpus == 0 or check_gpus(one) == gpus
