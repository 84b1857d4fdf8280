"""Collapse of image placeholders, and the check of what the engine made of them."""

from __future__ import annotations

import pytest

from agentrl.engines.placeholders import check_expansion, collapse
from agentrl.errors import EngineError


def test_each_run_becomes_one_id() -> None:
    assert collapse([1, 9, 9, 9, 2, 9, 3, 9, 9], 9, 3) == [1, 9, 2, 9, 3, 9]
    assert collapse([1, 2, 3], 9, 0) == [1, 2, 3]
    assert collapse([1, 9, 9], None, 0) == [1, 9, 9]
    assert collapse([], 9, 0) == []


@pytest.mark.parametrize(("ids", "pad", "images"), [([9, 9, 1], 9, 2), ([9, 1, 9], 9, 1), ([1], 9, 1), ([1], None, 1)])
def test_runs_and_images_must_be_as_many(ids: list[int], pad: int | None, images: int) -> None:
    with pytest.raises(EngineError) as caught:
        collapse(ids, pad, images)
    assert not caught.value.retryable


def test_another_expansion_names_where_it_differs() -> None:
    check_expansion([1, 9, 9, 2], [1, 9, 9, 2])
    with pytest.raises(EngineError, match="position 3"):
        check_expansion([1, 9, 9, 2], [1, 9, 9, 9, 2])
    with pytest.raises(EngineError, match="position 2"):
        check_expansion([1, 9, 2], [1, 9])
