"""The command line of `benchmarks/http_servers.py`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

PARTS = ("env", "rendering", "openenv", "policy", "overhead")
RESULTS = Path(__file__).resolve().parents[1] / "results" / "http.json"


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks/http_servers.py", description="What HTTP costs.")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["env", "rendering"], help="default: env rendering"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--openenv", metavar="DIR", help="where OpenEnv is installed")
    parser.add_argument(
        "--model", metavar="PATH", help="for rendering, policy and overhead; absent: an untrained tiny one"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the parts that were measured are replaced in it")
    options = parser.parse_args()
    if "openenv" in options.parts and not options.openenv:
        parser.error("the part openenv needs --openenv DIR")
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            print(f"-- {part}")
            known[part] = {**_measure(part, options, Path(folder)), **_machine()}
            options.out.write_text(json.dumps(known, indent=2) + "\n")
    print(f"written to {options.out}")


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def _measure(part: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if part == "env":
        from . import env_part

        return asyncio.run(env_part.measure(options.seconds))
    if part == "openenv":
        from . import openenv_part

        return asyncio.run(openenv_part.measure(options.seconds, options.openenv))
    model = options.model or _tiny(folder)
    if part == "rendering":
        from . import rendering_part

        return rendering_part.measure(model)
    from . import overhead_part, policy_part

    of = policy_part if part == "policy" else overhead_part
    return asyncio.run(of.measure(options.seconds, model))


def _tiny(folder: Path) -> str:
    from agentrl.trainers.tiny import make_tiny

    path = folder / "tiny"
    return str(path if path.is_dir() else make_tiny("tiny-text", path, max_steps=0))
