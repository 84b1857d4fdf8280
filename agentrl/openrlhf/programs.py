"""The options of `serve_rm` and `lora_combiner` as the words of a command of ours."""

from __future__ import annotations

from collections.abc import Sequence

from .shared import Theirs

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_rm(theirs: Theirs, notes: list[str]) -> Sequence[str]:
    """`agentrl serve reward`."""
    model, host, batch = theirs["reward.model_name_or_path"], theirs["host"], theirs["batch_size"]
    if not model:
        notes.append("reward.model_name_or_path is not given: name the model in the place of MODEL")
    words = ["agentrl", "serve", "reward", "--model", model or "MODEL", "--host", host, "--port", str(theirs["port"])]
    if batch is not None:
        words += ["--max-batch", str(batch)]
    if not theirs["reward.normalize_enable"]:
        words += ["--no-normalize"]
    if host not in LOOPBACK:
        notes.append(f"host {host}: where other machines reach a server it wants a token; write one into TOKEN_FILE")
        words += ["--token-file", "TOKEN_FILE"]
    return words


def lora_combiner(theirs: Theirs, notes: list[str]) -> Sequence[str]:
    """`agentrl export`."""
    adapters, model, out = (theirs[name] for name in ("lora_path", "model_path", "output_path"))
    notes.append(
        "lora_path: agentrl export merges the adapters of a run of agentrl, runs/NAME or one of its checkpoints; an adapter "
        "folder of another program is what lora.path starts a run from"
    )
    moved = ["--model", model] if model else []
    return ["agentrl", "export", adapters or "CKPT", out or "OUT", *moved]
