"""Training rows as the model reads them: several sequences in one row of tokens, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..trajectory import Row
from .models import Policy, text_positions
from .pixels import BLANK, PixelCache, Pixels


@dataclass
class Pack:
    """Sequences laid end to end: T tokens, N of them trained.

    ids int64[T]; positions int64[1, T] or [4, 1, T]; segments = the sequences' lengths; predict int64[N] = index of the
    token before each trained token, whose output predicts it; labels int64[N] = the trained tokens; counts = trained
    tokens of each sequence, summing to N; pixels = the pictures in order of appearance, empty without any; most = trained
    tokens in the largest of the packs that the ranks go through together, where these keep in step, else 0.
    """

    ids: Tensor
    positions: Tensor
    segments: tuple[int, ...]
    predict: Tensor
    labels: Tensor
    counts: tuple[int, ...]
    pixels: Pixels = field(default_factory=dict)
    most: int = 0

    def to(self, device: torch.device) -> Pack:
        """The same on another device."""
        return Pack(
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            segments=self.segments,
            predict=self.predict.to(device),
            labels=self.labels.to(device),
            counts=self.counts,
            pixels={name: tensor.to(device) for name, tensor in self.pixels.items()},
            most=self.most,
        )


def pack(rows: Sequence[Row], policy: Policy, pictures: PixelCache | None) -> Pack:
    """Lay rows end to end.

    Raises DataError when a row's pictures and placeholders do not fit together, or its first token is trained: nothing
    predicts it.
    """
    for row in rows:
        if row.loss_mask[0]:
            raise DataError(f"rollout {row.rollout_id}: the first token of a row cannot be trained")
    starts = np.cumsum([0, *(len(row) for row in rows)])
    trained = [np.flatnonzero(row.loss_mask) for row in rows]
    images = [_pictures(row, pictures) for row in rows]
    tokens = np.concatenate([row.token_ids for row in rows])
    labelled = np.concatenate([start + places for start, places in zip(starts[:-1], trained, strict=True)])
    return Pack(
        ids=torch.from_numpy(_readable(tokens, _slots(rows, starts), policy)).long(),
        positions=_positions(rows, images, policy),
        segments=tuple(len(row) for row in rows),
        predict=torch.from_numpy(labelled - 1),
        labels=torch.from_numpy(tokens[labelled]).long(),
        counts=tuple(len(places) for places in trained),
        pixels=_joined([pixels for row_images in images for pixels in row_images]),
    )


def split_packs(
    rows: Sequence[Row], policy: Policy, pictures: PixelCache | None, *, always_look: bool = False
) -> list[Pack]:
    """One pack of all rows, or one a row for a model whose sequences cannot share a row.

    always_look: rows without any picture are followed by a black one, untrained. Ranks that shard a vision model reduce
    and gather its vision half together, so none may skip it.
    """
    if always_look and pictures is not None and not any(row.images for row in rows):
        rows = [*rows, _blank_row(pictures)]
    if policy.packs:
        return [pack(rows, policy, pictures)]
    return [pack([row], policy, pictures) for row in rows]


def _blank_row(pictures: PixelCache) -> Row:
    run = pictures.blank()
    return Row(
        token_ids=np.array(run, np.int32),
        loss_mask=np.zeros(len(run), np.bool_),
        logprobs=np.zeros(len(run), np.float32),
        versions=np.full(len(run), -1, np.int32),
        rewards=np.zeros(len(run), np.float32),
        images=[(BLANK, 0, len(run))],
    )


def _slots(rows: Sequence[Row], starts: np.ndarray) -> np.ndarray:
    """bool[T]: the token belongs to a picture."""
    inside = np.zeros(starts[-1], np.bool_)
    for row, offset in zip(rows, starts[:-1], strict=True):
        for _, start, count in row.images:
            inside[offset + start : offset + start + count] = True
    return inside


def _readable(tokens: np.ndarray, slots: np.ndarray, policy: Policy) -> np.ndarray:
    """A placeholder outside a picture was sampled: read as it is, it would claim a picture's features."""
    sampled = np.isin(tokens, policy.placeholders) & ~slots
    return np.where(sampled, policy.stand_in, tokens)


def _pictures(row: Row, pictures: PixelCache | None) -> list[Pixels]:
    if not row.images:
        return []
    if pictures is None:
        raise DataError(f"rollout {row.rollout_id} has pictures, but the model reads text only")
    return [pictures.get(sha, count) for sha, _, count in sorted(row.images, key=lambda slot: slot[1])]


def _joined(pixels: list[Pixels]) -> Pixels:
    if not pixels:
        return {}
    return {name: torch.cat([one[name] for one in pixels]) for name in pixels[0]}


def _positions(rows: Sequence[Row], images: Sequence[list[Pixels]], policy: Policy) -> Tensor:
    if not policy.mrope:
        return text_positions(tuple(len(row) for row in rows), mrope=False)
    return torch.cat([_grid_positions(row, pixels, policy) for row, pixels in zip(rows, images, strict=True)], dim=-1)


def _grid_positions(row: Row, pixels: list[Pixels], policy: Policy) -> Tensor:
    """[4, 1, T]: the row's place in the text, then M-RoPE's time, height and width (Qwen2-VL, Wang 2024)."""
    plain = text_positions((len(row),), mrope=True)
    if not pixels:
        return plain
    kinds = torch.from_numpy(_slots([row], np.array([0, len(row)]))).int()[None]
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    grids = _joined(pixels)["image_grid_thw"]
    places, _ = policy.trunk.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    return torch.cat([plain[:1], places])
