"""The machine that agentrl runs on, as far as it can be seen without loading anything."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import psutil

from .findings import Finding

GB = 10**9
ENOUGH_MEMORY, ENOUGH_SHARED = 6 * GB, 1 * GB
COMPILERS = ("g++", "clang++", "c++")
SHARED = Path("/dev/shm")


def findings() -> list[Finding]:
    """Processor, memory, compiler, shared memory, cache and tiny policies."""
    return [_processor(), _memory(), _compiler(), _shared_memory(), *_cache()]


def _processor() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding(
        "ok", f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}, {usable} cores"
    )


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    what = f"memory: {memory.available / GB:.1f} GB free of {memory.total / GB:.1f} GB"
    if memory.available >= ENOUGH_MEMORY:
        return Finding("ok", what)
    return Finding("note", what, f"the tiny policies want {ENOUGH_MEMORY / GB:g} GB: end other programs")


def _compiler() -> Finding:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found:
        return Finding("ok", f"C++ compiler: {found}")
    return Finding("note", "no C++ compiler", "kernels that torch compiles on the fly need one: install g++")


def _shared_memory() -> Finding:
    if not SHARED.is_dir():
        return Finding("note", f"no {SHARED}", "Ray keeps its objects in /tmp, which is slower")
    usage = shutil.disk_usage(SHARED)
    what = f"shared memory: {usage.free / GB:.1f} GB free in {SHARED}"
    if usage.free >= ENOUGH_SHARED:
        return Finding("ok", what)
    return Finding("note", what, "Ray falls back to /tmp: in a container pass --shm-size=2g")


def _cache() -> list[Finding]:
    """The cache folder, and the tiny policies in it."""
    from agentrl.trainers.tiny import KINDS, tiny_path

    root = tiny_path(KINDS[0]).parent
    present = next(folder for folder in (root, *root.parents) if folder.exists())
    found = [Finding("ok", f"cache: {root}")]
    if not os.access(present, os.W_OK):
        found = [Finding("missing", f"cache: {root} cannot be written", "set XDG_CACHE_HOME to a folder that can")]
    for kind in KINDS:
        made = (tiny_path(kind) / "config.json").is_file()
        todo = "" if made else f"the first run that needs it makes it, or agentrl init {kind}"
        found.append(Finding("ok" if made else "note", f"{kind}: {tiny_path(kind) if made else 'not made yet'}", todo))
    return found
