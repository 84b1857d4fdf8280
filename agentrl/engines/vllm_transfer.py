"""vLLM's worker side of a weight update: check the names, reload layer by layer, repack; and the transfer through shared
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .weights import WeightReader, WeightSource

Shapes = dict[str, tuple[int, ...]]


@dataclass
class TransferInit(WeightTransferInitInfo):
    """Announces one update. `source` is `WeightSource.to_dict()`."""

    source: dict[str, Any]


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """Nothing to add: the update was announced whole."""


class CheckedTransfer:
    """Every update is announced by `init_weight_transfer_engine`, which checks it and touches no weight, then loaded whole.

    The announcement raises ValueError for a missing or unknown name or another shape; the engine then still has its old
    weights. Stands before one of vLLM's `WeightTransferEngine` classes: `attach` gets ready for a source, `receive` loads it.
    """

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    supports_draft_weight_update = False
    device: torch.device
    model: Any
    model_config: Any
    _announced: WeightSource | None = None

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        self._announced = None
        source = WeightSource.from_dict(init_info.source)
        sent = {spec.name: spec.shape for spec in source.tensors}
        expected = _checkpoint_shapes(Path(self.model_config.model))
        check_names(self._renamed(sent), self._renamed(expected), self._tied())
        self.attach(source)
        self._announced = source

    def attach(self, source: WeightSource) -> None:
        raise NotImplementedError

    def receive(self, source: WeightSource) -> None:
        raise NotImplementedError

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does, but the CPU has no accelerator to wait for."""
        self.receive_weights(TransferUpdate(**update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        if self._announced is None:
            raise RuntimeError("the weight update was not announced")
        self.receive(self._announced)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_head()
        self._announced = None

    def _repack_head(self) -> None:
        """vLLM prepacks the output head for its CPU kernel and, when it is tied, does not renew that at a reload."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _renamed(self, shapes: Shapes) -> Shapes:
        """Under vLLM's prefixes, as checkpoints and HF modules disagree on them; names vLLM ignores are left out.

        What vLLM fuses (q, k, v into one) keeps its own names here, so that each part is checked.
        """
        if not hasattr(self.model, "hf_to_vllm_mapper"):
            return shapes
        mapper = replace(self.model.hf_to_vllm_mapper, orig_to_new_stacked={})
        named = ((mapper.map_name(name), shape) for name, shape in shapes.items())
        return {name: shape for name, shape in named if name is not None}

    def _tied(self) -> bool:
        config = self.model_config.hf_config
        return bool(config.tie_word_embeddings or config.get_text_config().tie_word_embeddings)


class SharedMemoryTransfer(CheckedTransfer, WeightTransferEngine[TransferInit, TransferUpdate]):  # type: ignore[misc]
    """From blocks of shared memory, refused in the announcement when they do not hold what was published."""

    _reader: WeightReader | None = None

    def attach(self, source: WeightSource) -> None:
        reader = WeightReader(source)
        if reader.fingerprint() != source.fingerprint:
            raise ValueError(f"the blocks of weight version {source.version} do not hold what was published")
        self._reader = reader

    def receive(self, source: WeightSource) -> None:
        assert self._reader is not None
        self.model.load_weights(self._reader.tensors())

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self.shutdown()

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def check_names(sent: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    """Raise ValueError that names what is missing, unknown or of another shape. A tied head may be there or not."""
    optional = {name for name in {*sent, *expected} if tied and name.endswith("lm_head.weight")}
    problems = {
        "missing": sorted(set(expected) - set(sent) - optional),
        "unknown": sorted(set(sent) - set(expected) - optional),
        "of another shape": sorted(
            f"{name} {list(sent[name])} instead of {list(expected[name])}"
            for name in set(sent) & set(expected)
            if tuple(sent[name]) != tuple(expected[name])
        ),
    }
    found = [f"{len(names)} {kind} ({_some(names)})" for kind, names in problems.items() if names]
    if found:
        raise ValueError(f"the published weights do not fit the engine's model: {'; '.join(found)}")


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _checkpoint_shapes(folder: Path) -> Shapes:
    """Names and shapes of the checkpoint the engine was loaded from, out of the safetensors headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors files to check published weights against")
    return dict(_headers(files))


def _headers(files: Iterable[Path]) -> Iterable[tuple[str, tuple[int, ...]]]:
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 (safe_open is no dict)
                yield name, tuple(checkpoint.get_slice(name).get_shape())
