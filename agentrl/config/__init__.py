"""The whole configuration as typed, documented models. Validation happens in this package and nowhere else."""

from .config import Config
from .how import (
    AlgoSection,
    CkptSection,
    CriticSection,
    EngineSection,
    EvalSection,
    FilterSection,
    KLSection,
    LoraSection,
    OptimSection,
    OverlongSection,
    ParallelSection,
    RefSection,
    RolloutSection,
    TeacherSection,
    TrainSection,
    WatchdogSection,
)
from .where import AgentSection, DataSection, EnvSection, LogSection, ModelSection, RewardSection, RunSection

__all__ = [
    "AgentSection",
    "AlgoSection",
    "CkptSection",
    "Config",
    "CriticSection",
    "DataSection",
    "EngineSection",
    "EnvSection",
    "EvalSection",
    "FilterSection",
    "KLSection",
    "LogSection",
    "LoraSection",
    "ModelSection",
    "OptimSection",
    "OverlongSection",
    "ParallelSection",
    "RefSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "TeacherSection",
    "TrainSection",
    "WatchdogSection",
]
