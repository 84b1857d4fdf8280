"""Convention 19: which tokens at the end of a turn are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl import Env, Renderer, Reply, ScriptedEngine, Task, run_episode


class TwoTurns(Env):
    """Says "more" once, then ends."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.turns = 0
        return "go", {}

    def step(self, action: Any) -> Any:
        self.turns += 1
        return "more", 1.0, self.turns == 2, False, {}


async def trained_tokens(renderer: Renderer, *replies: Reply) -> tuple[list[int], list[int]]:
    """(trained ids, all ids) of the one row of an episode."""
    record = await run_episode(TwoTurns(), ScriptedEngine(replies), renderer, Task("t"))
    (row,) = record.rows()
    return row.token_ids[row.loss_mask].tolist(), row.token_ids.tolist()


async def test_convention_19_a_sampled_stop_token_is_trained(renderer_of: Callable[..., Renderer]) -> None:
    chat = renderer_of("chatml")
    (stop,) = chat.tokenizer("<|im_end|>").input_ids
    trained, every = await trained_tokens(chat, Reply([65, stop]), Reply([66, stop]))
    assert trained == [65, stop, 66, stop]
    place = every.index(65) + 1
    assert every[place] == stop != every[place + 1], "the template's own is not put beside it"


async def test_convention_19_an_appended_stop_token_is_not_and_a_cut_answer_keeps_its_ids(
    renderer_of: Callable[..., Renderer],
) -> None:
    chat = renderer_of("chatml")
    (stop,) = chat.tokenizer("<|im_end|>").input_ids
    trained, every = await trained_tokens(
        chat, Reply([65, 67], finish_reason="length"), Reply([66, 68], finish_reason="length")
    )
    assert trained == [65, 67, 66, 68]
    place = every.index(67)
    assert every[place + 1] == stop, "the template closes the turn that was cut, before the next one"
    assert every[-2:] == [66, 68], "nothing follows the last answer"
