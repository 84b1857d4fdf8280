"""Tokenizers, processors and renderers, one of each kind a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from agentrl import Renderer

from .templates import FAMILIES
from .tokenizers import FakeProcessor


@cache
def _tokenizer(family: str) -> Any:
    return FAMILIES[family].tokenizer()


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    """tokenizer_of(family)"""
    return _tokenizer


@pytest.fixture(scope="session")
def renderer_of() -> Callable[..., Renderer]:
    """renderer_of(family, **options)"""

    @cache
    def build(family: str, **options: Any) -> Renderer:
        tokenizer = _tokenizer(family)
        return Renderer(FakeProcessor(tokenizer) if family.startswith("vision") else tokenizer, **options)

    return build
