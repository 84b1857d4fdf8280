"""Image placeholders between a record (expanded, one id per patch group) and what vLLM takes (one id per image)."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import EngineError


def collapse(token_ids: Sequence[int], image_token_id: int | None, n_images: int) -> list[int]:
    """Every run of the placeholder id becomes one id.

    Raises an EngineError when the runs are not as many as the images: an id more or less would shift everything after it.
    """
    if image_token_id is None:
        if n_images:
            raise refusal(f"the request has {n_images} images, but the model takes none")
        return list(token_ids)
    kept = [
        token
        for i, token in enumerate(token_ids)
        if token != image_token_id or i == 0 or token_ids[i - 1] != image_token_id
    ]
    runs = kept.count(image_token_id)
    if runs != n_images:
        raise refusal(f"the request has {n_images} images and {runs} runs of the placeholder id {image_token_id}")
    return kept


def check_expansion(sent: Sequence[int], expanded: Sequence[int]) -> None:
    """Raise EngineError unless the engine's expanded prompt is, id for id, the request's."""
    if list(sent) == list(expanded):
        return
    pairs = enumerate(zip(sent, expanded, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(sent), len(expanded)))
    raise refusal(
        f"the engine expands the prompt to {len(expanded)} ids where the request has {len(sent)}; "
        f"they differ from position {first} on"
    )


def refusal(message: str) -> EngineError:
    """An EngineError about the request itself: the same request would fail again."""
    error = EngineError(message)
    error.retryable = False
    return error
