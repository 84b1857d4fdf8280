"""The configuration of one run."""

from __future__ import annotations

from typing import ClassVar

from .how import (
    AlgoSection,
    CkptSection,
    CriticSection,
    EngineSection,
    EvalSection,
    LoraSection,
    OptimSection,
    ParallelSection,
    RefSection,
    RolloutSection,
    TeacherSection,
    TrainSection,
    WatchdogSection,
)
from .section import Section
from .where import AgentSection, DataSection, EnvSection, LogSection, ModelSection, RewardSection, RunSection


class Config(Section):
    """Everything a run can be told. `agentrl train --dry-run` prints the effective one."""

    kind: ClassVar[str] = "train"

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    env: EnvSection = EnvSection()
    reward: RewardSection = RewardSection()
    agent: AgentSection = AgentSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algo: AlgoSection = AlgoSection()
    optim: OptimSection = OptimSection()
    critic: CriticSection = CriticSection()
    ref: RefSection = RefSection()
    teacher: TeacherSection = TeacherSection()
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    lora: LoraSection = LoraSection()
    eval: EvalSection = EvalSection()
    ckpt: CkptSection = CkptSection()
    log: LogSection = LogSection()
    watchdog: WatchdogSection = WatchdogSection()
