"""A program: `killed_runs.py MODEL FOLDER`. One short run in each mode, uninterrupted and killed in every step.

The loop, the checkpoints and the trainer are the real ones, in one process a life; the engine is scripted and its replies
depend on the task, the sample and the turn alone. Killed = SIGKILL in the middle of training, of a publication, of a save or
of an evaluation, with episodes in flight and finished groups waiting. Writes FOLDER/MODE/{whole,killed}/.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from agentrl import Env, GenerationRequest, Limits, MultiTurnExecutor, Renderer, Reply, ScriptedEngine, Task
from agentrl.checkpoint import Checkpoints, RunState, read_state
from agentrl.config import Config
from agentrl.engines.fleet import EngineFleet
from agentrl.evaluation import BackgroundEvaluation, Evaluator
from agentrl.loop import Loop
from agentrl.replay import RecordedBatches
from agentrl.report.progress import SilentReporter
from agentrl.report.read_record import read_held
from agentrl.report.run_folder import RunFolder
from agentrl.rollout.dispatcher import Dispatcher
from agentrl.rollout.episode import EpisodeOrder, EpisodeResult
from agentrl.rollout.ledger import GroupLedger, signal_filter
from agentrl.rollout.task_source import TaskSource
from agentrl.rollout.worker import EpisodePlayer
from agentrl.torchvision_ops import ensure_torchvision_imports
from agentrl.training import TrainReport
from agentrl.trajectory import Row
from agentrl.weight_sync import WeightSync

STEPS, TASKS, GROUPS = 4, 4, 2  # a pass over the tasks ends with every second batch
LIMITS = Limits(max_turns=2, max_new_tokens=8, max_len=256)
MODES: dict[str, dict[str, Any]] = {
    "sync": {"train": {"max_staleness": 0}},
    "async": {"train": {"max_staleness": 1}, "rollout": {"partial": False}, "algo": {"filter": {"enable": True}}},
    "partial": {"train": {"max_staleness": 2}},
    "evaluated": {"train": {"max_staleness": 2}, "eval": {"every": 1}},
}
DEATHS = {
    "sync": ("train", "publish", "train", "save"),
    "async": ("save", "train", "publish", "train"),
    "partial": ("train", "save", "save", "publish"),
    "evaluated": ("evaluate", "train", "evaluate", "save"),
}
"""Where the life that is killed in step 1, 2, … dies; an evaluation of step n plays the weights that it gave."""


class Parity(Env):
    """Two turns; the first earns 1 for an odd number of letters."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.turn = 0
        return f"task {self.task.id}", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return "go on", float(self.turn == 1 and len(str(action)) % 2), self.turn == 2, False, {}


def reply(request: GenerationRequest) -> Reply:
    """By the seed, which is made from draw, sample and turn. The delays make episodes overtake each other."""
    seed = request.sampling.seed or 0
    ids = [65 + (seed >> 5 * i) % 26 for i in range(1 + seed % 3)]
    return Reply([*ids, 258], [-3.0 - 0.1 * (seed % 5)] * (len(ids) + 1), delay_s=0.002 * (seed % 11))


class InProcess:
    """The trainer of one rank, killed with its process in the `place` in step `dies_in`: before the update, with the weights
    published, or with a checkpoint half written.
    """

    def __init__(self, trainer: Any, place: str, dies_in: int) -> None:
        self.trainer = trainer
        self.place, self.dies_in = place, dies_in
        self.step = 0

    async def train(self, rows: list[Row], step: int) -> TrainReport:
        await asyncio.sleep(0.03)
        self.step = step
        self.die("train")
        return self.trainer.train(rows, step)

    def die(self, place: str) -> None:
        """If it is to die here."""
        if (place, self.step) == (self.place, self.dies_in):
            os.kill(os.getpid(), signal.SIGKILL)

    async def publish(self, version: int) -> Any:
        source = self.trainer.publish(version)
        self.die("publish")
        return source

    async def release(self, source: Any) -> None:
        self.trainer.release()

    async def save(self, folder: Path) -> None:
        self.trainer.save(folder)
        self.die("save")

    async def load(self, folder: Path) -> None:
        self.trainer.load(folder)

    async def export(self, folder: Path) -> None:
        self.trainer.export(folder)

    async def close(self) -> None:
        self.trainer.close()


class HeldOut:
    """A player of held-out episodes that dies with the trainer's process."""

    def __init__(self, player: EpisodePlayer, trainer: InProcess) -> None:
        self.player, self.trainer = player, trainer

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        result = await self.player.play(order)
        self.trainer.die("evaluate")
        return result


async def live(
    model: str, path: Path, mode: dict[str, Any], place: str = "", dies_in: int = 0, replay: Path | None = None
) -> None:
    """From the newest checkpoint, or from the start, to the end or to the `place` in step `dies_in`; on what `replay` holds
    if it is given.
    """
    from agentrl.trainers.policy_trainer import PolicyTrainer
    from transformers import AutoTokenizer

    sections: dict[str, Any] = {
        "optim": {"name": "sgd", "lr": 0.5, "schedule": "linear"},
        "ckpt": {"every": 1},
        "eval": {"tasks": 2, "n": 2},
        **mode,
        "train": {"batch_groups": GROUPS, "steps": STEPS, **mode["train"]},
        "rollout": {"n_samples": 3, "max_len": 256, **mode.get("rollout", {})},
    }
    config = Config.model_validate(sections)
    folder = RunFolder(path)
    checkpoints = Checkpoints(folder.checkpoints, 2)
    resumed = checkpoints.find("latest") if (checkpoints.folder / "latest").is_file() else None
    state = RunState() if resumed is None else read_state(resumed)
    if resumed is None:
        shutil.rmtree(path, ignore_errors=True)  # as a user has to who has no checkpoint to go on from
    folder.begin("", None if resumed is None else state.step)
    engine = ScriptedEngine(reply, state.version)
    player = EpisodePlayer(
        [engine], Renderer(AutoTokenizer.from_pretrained(model)), MultiTurnExecutor(Parity, "parity")
    )
    ledger = GroupLedger(
        config,
        draws=None,
        wanted=(STEPS - state.step) * GROUPS,
        keep=signal_filter(config) if config.algo.filter.enable else lambda group: True,
        version=state.version,
        held=None if resumed is None else read_held(resumed, state.next_draw, state.reissue),
    )
    source = TaskSource([Task(str(i)) for i in range(TASKS)], seed=0, shuffle=True)
    trainer = InProcess(PolicyTrainer(config, model, str(folder.images), STEPS, 1e-3), place, dies_in)
    sync = WeightSync(config, trainer, EngineFleet([engine] if replay is None else []), state.version)
    held_out = HeldOut(player, trainer)
    evaluator = Evaluator(config, held_out, [Task("held out")] * 2, LIMITS) if config.eval.every else None
    batches = (
        Dispatcher(config, player, source, LIMITS, ledger) if replay is None else RecordedBatches(replay, state.step)
    )
    loop = Loop(
        config, batches, sync, BackgroundEvaluation(evaluator), checkpoints, folder, SilentReporter(), STEPS, state
    )  # fmt: skip
    if resumed is not None:
        await loop.restore(resumed)
    await loop.run()


def fork(model: str, path: Path, mode: dict[str, Any], *death: Any, replay: Path | None = None) -> int:
    """One life; how it ended: 0, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(live(model, path, mode, *death, replay=replay))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def load_libraries(model: str) -> None:
    """Here, once: the lives are forks of this process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    ensure_torchvision_imports()
    import deepspeed  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)


def main(model: str, folder: Path) -> None:
    load_libraries(model)
    for name, mode in MODES.items():
        assert fork(model, folder / name / "whole", mode) == 0
        for step, place in enumerate(DEATHS[name], 1):
            assert fork(model, folder / name / "killed", mode, place, step) == -signal.SIGKILL
        assert fork(model, folder / name / "killed", mode) == 0
    recorded = folder / "partial" / "whole" / "rollouts"
    assert fork(model, folder / "partial" / "replayed", MODES["partial"], replay=recorded) == 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
