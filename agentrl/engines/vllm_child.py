"""Stands in for the main module of the processes vLLM spawns: imported there before anything of vLLM is."""

from agentrl.torchvision_ops import ensure_torchvision_imports

ensure_torchvision_imports()
