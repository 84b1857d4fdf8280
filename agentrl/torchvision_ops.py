"""Makes transformers and vLLM import where torchvision and its siblings were built for another torch (CUDA beside CPU).

Torchvision's pure-Python half is all that image processors use, but its import fails unless two operator schemas exist.
A torchaudio or torchcodec that does not import is hidden, so that transformers and vLLM take it for not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_UNUSED = ("torchaudio", "torchcodec")


@functools.cache
def ensure_torchvision_imports() -> Any:
    """Call before the first use of transformers' processors or models, and before importing vLLM, in every process.

    Does nothing where torchvision loads by itself or is not installed. The result owns the operator definitions and stays
    in the cache, as dropping it would undo them; None = none were needed.
    """
    if importlib.util.find_spec("torch") is None or _torchvision_loads():
        return None
    for name in _UNUSED:
        _hide_if_broken(name)
    if "transformers" in sys.modules:
        _let_transformers_look_again()
    if "datasets" in sys.modules:
        _let_datasets_look_again()
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library


def _torchvision_loads() -> bool:
    """False when torchvision's compiled operators do not load into this torch; loading is what its import does next."""
    if "torchvision" in sys.modules:
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    import torch

    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(spec.origin).parent / f"_C{suffix}"
        if path.is_file():
            try:
                torch.ops.load_library(str(path))
            except OSError:
                return False
            return True
    return False


def _hide_if_broken(name: str) -> None:
    """Leave a package that imports as it is; make one that does not look absent (`None` in sys.modules)."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        sys.modules[name] = None  # type: ignore[assignment]


def _let_transformers_look_again() -> None:
    """Transformers remembers from its import which packages there are."""
    from transformers.utils import import_utils

    import_utils.is_torchaudio_available.cache_clear()
    import_utils.is_torchcodec_available.cache_clear()


def _let_datasets_look_again() -> None:
    """`datasets` remembers as well, and imports what it takes for loaded whenever it writes a table."""
    from datasets import config

    config.TORCHCODEC_AVAILABLE = importlib.util.find_spec("torchcodec") is not None
