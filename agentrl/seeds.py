"""Seeds that depend on what is drawn and on nothing else: no step, worker, engine or attempt enters."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed from any integers and names; the same parts give the same seed on every machine."""
    joined = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big") >> 1


def call_id(*parts: int | str) -> str:
    """A tool call's id: nine letters and digits, the only form that every chat template takes."""
    return hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=5).hexdigest()[:9]


def env_seed(run_seed: int, draw: int) -> int:
    """Seed of `Env.reset`, equal for all members of a group and every retry."""
    return derive(run_seed, "env", draw)


def sampling_seed(run_seed: int, draw: int, sample: int) -> int:
    """Base of a member's sampling seeds; each turn derives its own from it."""
    return derive(run_seed, "sampling", draw, sample)
