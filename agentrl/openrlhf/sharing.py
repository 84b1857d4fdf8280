"""Engines and trainer on the same GPUs, as OpenRLHF's train.colocate_all has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SLEEPS = ("vllm.enable_sleep", "ds.enable_sleep")


def sharing(theirs: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """engine.colocated where that is possible; else a note that says why it is not, and the GPUs that the run wants."""
    sleeps = [name for name in SLEEPS if theirs[name]]
    if not theirs["train.colocate_all"]:
        notes += [
            f"{name}: it does nothing without train.colocate_all; here it is part of engine.colocated"
            for name in sleeps
        ]
        return {}
    against = list(_against(theirs))
    if not against:
        return {"engine.colocated": True, **_reference(theirs, notes)}
    spread = theirs["vllm.tensor_parallel_size"]
    engines, ranks = (theirs["vllm.num_engines"] or 1) * spread, _ranks(theirs)
    notes.append(
        "train.colocate_all: engine.colocated is for one engine and one trainer rank on one GPU, without a critic, at "
        f"train.max_staleness 0; here are {', '.join(against)}. The run wants {engines + ranks} GPUs: {engines} for engines, "
        f"{ranks} for the trainer"
    )
    return {}


def _against(theirs: Mapping[str, Any]) -> Iterator[str]:
    """What keeps engine and trainer from taking turns."""
    engines, spread, ranks = theirs["vllm.num_engines"] or 1, theirs["vllm.tensor_parallel_size"], _ranks(theirs)
    if engines > 1:
        yield f"{engines} engines"
    if spread > 1:
        yield f"engines on {spread} GPUs each"
    if ranks > 1:
        yield f"{ranks} ranks"
    if theirs["algo.advantage.estimator"] == "gae":
        yield "a critic"
    if theirs["train.async_enable"] and theirs["train.async_queue_size"]:
        yield f"train.max_staleness {theirs['train.async_queue_size']}"


def _reference(theirs: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A reference of its own stays in CPU memory, as there is room for one model on the GPU."""
    if not theirs["algo.kl.init_coef"] or theirs["ds.lora.rank"] or theirs["ref.offload"]:
        return {}
    notes.append("train.colocate_all: ref.offload keeps the reference in CPU memory, which engine.colocated needs")
    return {"ref.offload": True}


def _ranks(theirs: Mapping[str, Any]) -> int:
    ranks: int = theirs["actor.num_nodes"] * theirs["actor.num_gpus_per_node"]
    return ranks
