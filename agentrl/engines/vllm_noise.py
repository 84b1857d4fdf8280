"""vLLM's and torch's warnings that say nothing about a run of ours, by logger and beginning of the message."""

from __future__ import annotations

import logging
import warnings

EXPECTED = {
    "vllm.triton_utils.importing": ("Triton is installed, but",),
    "vllm.engine.arg_utils": ("The global random seed is set to", "This model does not officially support disabling"),
    "vllm.config.vllm": (
        "Enforce eager set",
        "Inductor compilation was disabled",
        "Model Runner V2 requires Triton",
        "TORCH_COMPILE_DISABLE is set",
    ),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "vllm.v1.worker.cpu_worker": ("%s is not found in LD_PRELOAD", "CPU backend doesn't allow to use"),
    "vllm.model_executor.model_loader.reload.layerwise": ("%s: Failed to load weights",),
    "vllm.v1.utils": ("[shutdown] Process manager: force killing",),
    "vllm.v1.engine.core": ("Resetting the multi-modal cache when", "Resetting the encoder cache when"),
}
"""Each is a consequence of how `engine_arguments` starts vLLM or of a weight update with requests held back; names are checked
by us.
"""


class _Expected(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginnings)


def silence_expected() -> None:
    """Drop those messages, and nothing else, in this process. Before vLLM is imported; once is enough."""
    for name, beginnings in EXPECTED.items():
        logging.getLogger(name).addFilter(_Expected(beginnings))
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # malformed calls are the model's daily bread
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
