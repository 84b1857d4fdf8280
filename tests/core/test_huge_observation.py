"""Text that is sure not to fit is never tokenised: megabytes of it would hold up every episode of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Env, Limits, Renderer, Reply, ScriptedEngine, Task, run_episode

from .templates import FAMILIES

HUGE = "word " * 1_000_000
CHAT = Renderer(FAMILIES["chatml"].tokenizer())


class Floods(Env):
    """Says something huge at reset or in the first step."""

    def __init__(self, at_reset: bool) -> None:
        self.at_reset = at_reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return HUGE if self.at_reset else "go", {}

    def step(self, action: Any) -> Any:
        return [{"role": "user", "content": [HUGE]}], 0.5, False, False, {}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that were rendered."""
    lengths: list[int] = []
    render = CHAT.template.render

    def counted(messages: Any, *rest: Any, **options: Any) -> str:
        text = render(messages, *rest, **options)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(CHAT.template, "render", counted)
    return lengths


async def play(at_reset: bool) -> Any:
    ids = CHAT.tokenizer("yes<|im_end|>", add_special_tokens=False).input_ids
    return await run_episode(
        Floods(at_reset), ScriptedEngine([Reply(ids)]), CHAT, Task("t"), limits=Limits(max_len=200)
    )


async def test_at_reset_it_is_the_envs_error(encoded: list[int]) -> None:
    record = await play(at_reset=True)
    assert "far longer than rollout.max_len = 200 tokens" in str(record.error)
    assert all(length < 1000 for length in encoded)


async def test_later_it_ends_the_episode_as_any_observation_that_does_not_fit(encoded: list[int]) -> None:
    record = await play(at_reset=False)
    assert (record.error, record.finish_reason, record.truncated, record.total_reward) == (None, "length", True, 0.5)
    assert encoded and all(length < 1000 for length in encoded)


@pytest.fixture(scope="module")
def families(renderer_of: Callable[..., Renderer]) -> list[Renderer]:
    return [renderer_of(family) for family in ("chatml", "vision", "numbered")]


@given(text=st.text() | st.integers(0, 3000).map("a".__mul__), tokens=st.integers(0, 12))
def test_what_exceeds_does_not_fit(families: list[Renderer], text: str, tokens: int) -> None:
    for renderer in families:
        if renderer.exceeds([{"role": "user", "content": text}], tokens):
            assert len(renderer.start([{"role": "user", "content": text}])) > tokens
