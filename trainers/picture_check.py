"""Found out at the start of a run: whether the trainer sees pictures as the model's own code does, packed or row by row."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor

from ..errors import ConfigError
from ..messages import Image
from ..trajectory import ImageSlot, Row
from .models import Policy, agree, trunk_states, unpacked
from .packing import pack
from .pixels import PixelCache

logger = logging.getLogger(__name__)
_FAILURES = (ValueError, RuntimeError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""What a model's code raises when it is called in a way that is not its own."""


def check_pictures(policy: Policy, pictures: PixelCache | None) -> Policy:
    """The policy, told not to pack where rows with pictures do not come out of a pack as they went in.

    The model's own code on one row with two pictures is what the rest is compared with. Raises ConfigError for a model
    that the trainer cannot show pictures to, which must not be trained on any.
    """
    if pictures is None:
        return policy
    rows, expected = _probe(policy, pictures)
    if policy.packs:
        if _comes_out_as(expected, rows, policy, pictures):
            return policy
        logger.warning("%s: rows with pictures cannot share a pack; each is computed by itself", _kind(policy))
        policy = unpacked(policy)
    if not _comes_out_as(expected, rows[-1:], policy, pictures):
        raise ConfigError(
            f"Pictures of a {_kind(policy)} model cannot be trained on: its states differ from those of its own code."
        )
    return policy


def _kind(policy: Policy) -> str:
    return str(policy.model.config.model_type)


def _probe(policy: Policy, pictures: PixelCache) -> tuple[list[Row], Tensor]:
    """(a row of text, a row with two pictures; the states [T, H] of the second by the model's own code and attention)."""
    shown = [_picture(84, 56, 0), _picture(56, 112, 1)]
    inputs = pictures.whole_inputs(shown)
    row = _row(inputs["input_ids"][0].numpy())
    row.images = _slots(row.token_ids.tolist(), shown, pictures)
    alone = unpacked(policy)
    device = policy.model.device
    with torch.no_grad():
        states = alone.trunk(**{name: tensor.to(device) for name, tensor in inputs.items()}, use_cache=False)
    if policy.packs:
        policy.use_segments()
    text = _row(np.arange(1, 8))
    return [text, row], states.last_hidden_state[0]


def _picture(width: int, height: int, seed: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    return Image(PILImage.fromarray(pixels))


def _row(ids: Any) -> Row:
    count = len(ids)
    return Row(
        token_ids=np.asarray(ids, np.int32),
        loss_mask=np.zeros(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        versions=np.full(count, -1, np.int32),
        rewards=np.zeros(count, np.float32),
    )


def _slots(ids: list[int], shown: list[Image], pictures: PixelCache) -> list[ImageSlot]:
    """Where the run of each picture stands."""
    slots: list[ImageSlot] = []
    place = 0
    for image in shown:
        run = list(pictures.run(image))
        place = next(i for i in range(place, len(ids)) if ids[i : i + len(run)] == run)
        slots.append((pictures.keep(image), place, len(run)))
        place += len(run)
    return slots


@torch.no_grad()
def _comes_out_as(expected: Tensor, rows: list[Row], policy: Policy, pictures: PixelCache) -> bool:
    """Whether the last of the rows, laid into one pack, has the expected states."""
    try:
        packed = pack(rows, policy, pictures).to(policy.model.device)
        states = trunk_states(policy.model, packed.ids, packed.positions, packed.segments, **packed.pixels)
    except _FAILURES as error:
        logger.warning("%s: %s", _kind(policy), error)
        return False
    return agree(states[-len(rows[-1]) :], expected)
