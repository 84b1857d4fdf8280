"""Attention over sequences packed into one row: each token sees its own sequence up to itself, and nothing else.

The borders travel through the model's keyword arguments to every layer as `segments`, the lengths of the sequences. No
[T, T] mask is ever built, so the cost is the sum of the squared lengths, and with a sliding window of W tokens that of the
lengths times 2 W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAME = "agentrl_segments"


def register_segments() -> str:
    """Make the attention known to transformers under `NAME`, and return the name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, segment_attention)
    return NAME


def segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: tuple[int, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    `segments` sum to T; None = one sequence. The signature is that of transformers' attention functions. Raises
    NotImplementedError for what this attention lacks (soft caps, sinks, masks), so that the model is not packed.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise NotImplementedError("segment attention has no masks, soft caps or attention sinks")
    lengths = (query.shape[2],) if segments is None else segments
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [_causal(q, k, v, scaling, dropout, sliding_window) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float, window: int | None) -> Tensor:
    """One sequence; longer than its window, in blocks of as many queries, with the keys that these can see."""
    length = q.shape[2]
    if window is None or length <= window:
        return _attend(q, k, v, scale, dropout, None)
    blocks = []
    for start in range(0, length, window):
        stop, first = min(start + window, length), max(0, start - window + 1)
        band = _band(range(start, stop), range(first, stop), window, q.device)
        seen = slice(first, stop)
        blocks.append(_attend(q[:, :, start:stop], k[:, :, seen], v[:, :, seen], scale, dropout, band))
    return torch.cat(blocks, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float, band: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=band,
        dropout_p=dropout,
        is_causal=band is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _band(queries: range, keys: range, window: int, device: torch.device) -> Tensor:
    """bool[queries, keys]: the `window` tokens up to and with oneself."""
    own = torch.arange(queries.start, queries.stop, device=device)
    distance = own[:, None] - torch.arange(keys.start, keys.stop, device=device)
    return (distance >= 0) & (distance < window)
