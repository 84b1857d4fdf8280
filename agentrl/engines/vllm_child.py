"""Stands in for the main module of the processes vLLM spawns: imported there before anything of vLLM is."""

from agentrl.engines.vllm_noise import silence_expected
from agentrl.torchvision_ops import ensure_torchvision_imports

silence_expected()
ensure_torchvision_imports()
