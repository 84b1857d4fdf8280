"""The whole configuration as typed, documented models. Validation happens in this package and nowhere else."""

from .config import Config
from .how import (
    AlgoSection,
    CkptSection,
    EngineSection,
    EvalSection,
    FilterSection,
    LoraSection,
    OptimSection,
    ParallelSection,
    RolloutSection,
    TrainSection,
    WatchdogSection,
)
from .where import AgentSection, DataSection, EnvSection, LogSection, ModelSection, RewardSection, RunSection

__all__ = [
    "AgentSection",
    "AlgoSection",
    "CkptSection",
    "Config",
    "DataSection",
    "EngineSection",
    "EnvSection",
    "EvalSection",
    "FilterSection",
    "LogSection",
    "LoraSection",
    "ModelSection",
    "OptimSection",
    "ParallelSection",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "TrainSection",
    "WatchdogSection",
]
