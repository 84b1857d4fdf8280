"""Stands in for the main module of the processes vLLM spawns: imported there before anything of vLLM is."""

import os
import signal
import threading
import time

from agentrl.engines.vllm_noise import silence_expected
from agentrl.torchvision_ops import ensure_torchvision_imports

LOOKS_EVERY_S = 1.0


def _end_with(parent: int) -> None:
    """vLLM's processes outlive one that was killed, with all their memory."""
    while os.getppid() == parent:
        time.sleep(LOOKS_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)


# An interrupt from the terminal is for the program that started vLLM: that ends it in order.
os.setpgid(0, 0)
threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
silence_expected()
ensure_torchvision_imports()
