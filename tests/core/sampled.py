"""Samples that can be told apart by their log-probabilities, and which of them a trajectory trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl import Trajectory

from .templates import FAMILIES

TOKENIZER = FAMILIES["chatml"].tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
Sample = tuple[tuple[int, ...], tuple[int, ...]]
"""(the context it was sampled in, its ids)"""


def spelled(text: str) -> list[int]:
    """The ids of a text letter by letter: another spelling than the tokenizer's own."""
    return [i for letter in text for i in TOKENIZER(letter, add_special_tokens=False).input_ids]


def logprobs_of(number: int, length: int) -> list[float]:
    return [-(number + 1) - k / 1024 for k in range(length)]


def sample_number(logprob: float) -> int:
    """Which sample a reply is, from its first log-probability."""
    return -round(float(logprob)) - 1


def trained_samples(record: Trajectory, sampled: Sequence[Sample]) -> list[int]:
    """Which samples are trained, over all rows; each stands whole in the very context that it was sampled in."""
    found = []
    for row in record.rows():
        mask = np.concatenate([[False], row.loss_mask, [False]]).astype(int)
        for start, end in zip(*(np.flatnonzero(np.diff(mask) == way) for way in (1, -1)), strict=True):
            number = sample_number(row.logprobs[start])
            ids = tuple(row.token_ids.tolist())
            assert (ids[:start], ids[start:end]) == sampled[number]
            assert np.allclose(row.logprobs[start:end], logprobs_of(number, end - start))
            found.append(number)
    return sorted(found)
