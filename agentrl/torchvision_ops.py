"""Makes `import torchvision` work where its compiled half does not load (a CUDA build beside a CPU torch).

Torchvision's pure-Python half is all that image processors use, but its import fails unless two operator schemas exist.
Call `ensure_torchvision_imports` before the first import of transformers' processors or vLLM, in every process.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def ensure_torchvision_imports() -> Any:
    """Define the schemas torchvision's import needs, unless its own operators load or it is not installed.

    The result owns the definitions and stays in the cache: dropping it would undo them. None = nothing was needed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or importlib.util.find_spec("torch") is None:
        return None
    import torch

    if _operators_load(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library


def _operators_load(folder: Path) -> bool:
    """True when torchvision's compiled operators load into this torch; loading them here is what its import does next."""
    import torch

    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_C{suffix}"
        if path.is_file():
            try:
                torch.ops.load_library(str(path))
            except OSError:
                return False
            return True
    return False
