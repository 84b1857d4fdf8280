"""Recorded episodes as examples: the files of `agentrl rollout --out` and of a run's rollouts/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import SftConfig
from ..errors import DataError
from ..image_store import ImageStore
from ..messages import Image, as_message
from ..renderer import Renderer
from ..report.read_record import read_episode, read_lines
from ..rollout.episode import EpisodeResult
from ..trajectory import Row
from .examples import Examples, as_row
from .recorded import recorded_files
from .spelling import Speller, Spelling, said

NO_TOKENS, FAILED, LOW, TOO_LONG = (
    "nothing was sampled",
    "failed",
    "score below sft.min_score",
    "longer than train.max_len",
)


def recorded_examples(
    paths: Sequence[str], config: SftConfig, speller: Speller, renderer: Renderer, store: ImageStore | None
) -> Examples:
    """One example a training row, in the tokens that were sampled; an episode of another model is one, its conversation
    spelled anew. Raises DataError for a line that is no record.
    """
    found = Examples()
    for episode, images in _episodes(paths, config.data.max_samples):
        reason, own = _reason(episode, config.sft.min_score), _spells(episode, renderer)
        spellings = [] if reason else list(_spellings(episode, images, speller, own, config))
        kept = [(spelling.cut(config.train.max_len), spelling) for spelling in spellings]
        usable = [(short, whole) for short, whole in kept if any(short.trained)]
        if not usable:
            found.left_out[reason or (TOO_LONG if spellings else NO_TOKENS)] += 1
        found.respelled += bool(usable) and not own
        for i, (short, whole) in enumerate(usable):
            found.cut += len(short) < len(whole)
            found.items.append(as_row(short, f"{episode.rollout_id}-{i}", store))
    return found


def _episodes(paths: Sequence[str], most: int | None) -> Iterator[tuple[EpisodeResult, ImageStore]]:
    """The first `most` episodes of each path, with the pictures that lie beside them."""
    for path in paths:
        records = ((file, *line) for file in recorded_files(path) for line in enumerate(read_lines(file), 1))
        for file, number, record in islice(records, most):
            beside = file.parent / "images"
            images = ImageStore(beside if beside.is_dir() else file.parent.parent / "images")
            yield _episode(record, f"{file}, line {number}"), images


def _episode(record: Any, where: str) -> EpisodeResult:
    try:
        return read_episode(record)
    except KeyError as error:
        raise DataError(f"{where} is no record of an episode: there is no {error} in it") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where} is no record of an episode: {error}") from error


def _reason(episode: EpisodeResult, min_score: float | None) -> str | None:
    """Why an episode is no example."""
    if episode.error is not None:
        return FAILED
    if min_score is not None and (episode.score is None or episode.score < min_score):
        return LOW
    return None if episode.rows else NO_TOKENS


def _spells(episode: EpisodeResult, renderer: Renderer) -> bool:
    """Whether the tokens that were sampled last say, to this model, what the assistant said and called last."""
    replies = [message for message in episode.messages if message["role"] == "assistant"]
    rows = [row for row in episode.rows if row.loss_mask.any()]
    if not rows or not replies:
        return True
    if max(rows[-1].token_ids.tolist()) >= len(renderer.tokenizer):
        return False
    text = renderer.text(rows[-1].token_ids[_last_turn(rows[-1].loss_mask)].tolist())
    calls = [str(call.get("function", call).get("name")) for call in replies[-1].get("tool_calls") or ()]
    told = _told(replies[-1])
    return all(part in text for part in (told, *calls)) if told or calls else not text.strip()


def _told(reply: Mapping[str, Any]) -> str:
    content = reply.get("content") or ""
    return (content if isinstance(content, str) else "".join(part.get("text", "") for part in content)).strip()


def _spellings(
    episode: EpisodeResult, images: ImageStore, speller: Speller, own: bool, config: SftConfig
) -> Iterator[Spelling]:
    if own:
        yield from (_of_row(row, images, config) for row in episode.rows)
        return
    messages = [_with_pictures(message, images) for message in episode.messages]
    if any(said(as_message(message)) for message in messages if message["role"] == "assistant"):
        yield speller.spell(messages, episode.tools, last_only=config.sft.turns == "last")


def _of_row(row: Row, images: ImageStore, config: SftConfig) -> Spelling:
    mask = _last_turn(row.loss_mask) if config.sft.turns == "last" else row.loss_mask
    pictures = tuple(images.get(sha) for sha, _, _ in row.images)
    whole = Spelling(tuple(row.token_ids.tolist()), tuple(mask.tolist()), tuple(row.images), pictures)
    return whole.cut(len(whole))


def _last_turn(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The last run of trained tokens alone."""
    trained = np.flatnonzero(mask)
    last = mask.copy()
    breaks = np.flatnonzero(~mask[: trained[-1]]) if len(trained) else trained
    last[: breaks[-1] + 1 if len(breaks) else 0] = False
    return last


def _with_pictures(message: Mapping[str, Any], images: ImageStore) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = [_picture(part, images) for part in content]
    return {**message, "content": content}


def _picture(part: Any, images: ImageStore) -> Any:
    if isinstance(part, dict) and "sha256" in part:
        image: Image = images.get(part["sha256"])
        return image
    return part
