"""What a turn costs the renderer: the delta of `extend` beside rendering and tokenising the whole conversation again."""

from __future__ import annotations

import time
from typing import Any

from agentrl import Generation, Renderer, Span
from agentrl.assemble import make_renderer
from agentrl.config import Config

TURNS = 128
SHOWN = (1, 16, 32, 64, 128)
WARM = 16
"""The turn that the last one is compared with: before it, templates and tokenizer are still warming up."""
ROUNDS = 20
REPLY = "I add the two numbers and get forty two."
SAID: dict[str, Any] = {"role": "assistant", "content": REPLY}
QUESTION: dict[str, Any] = {"role": "user", "content": "what is 17 + 25? think first, then answer with one number."}


def measure(model: str) -> dict[str, Any]:
    """Milliseconds at each of SHOWN, the least of ROUNDS; the two are measured apart, as a long rendering empties the caches."""
    renderer = make_renderer(Config(), model)
    deltas = [_deltas(renderer) for _ in range(ROUNDS)]
    shown = []
    for turn in SHOWN:
        delta = 1e3 * min(rows[turn - 1][0] for rows in deltas)
        whole = 1e3 * min(_whole(renderer, turn) for _ in range(3))
        tokens = deltas[0][turn - 1][1]
        shown.append({"turn": turn, "tokens": tokens, "delta_ms": round(delta, 3), "whole_ms": round(whole, 3)})
        print(f"turn {turn:>4}, {tokens:>6} tokens: delta {delta:.3f} ms, whole {whole:.2f} ms")
    at = {row["turn"]: row["delta_ms"] for row in shown}
    growth = round(at[TURNS] / at[WARM], 2)
    print(f"delta at turn {TURNS} / turn {WARM}: {growth}")
    return {"turns": shown, "delta_growth_16_to_128": growth}


def _deltas(renderer: Renderer) -> list[tuple[float, int]]:
    """(seconds of the delta, tokens so far) for every turn."""
    ids = tuple(renderer.tokenizer(f"{REPLY}<|im_end|>", add_special_tokens=False).input_ids)
    sampled = Generation(ids, (0.0,) * len(ids), (Span(0, 0, len(ids)),), "stop")
    prompt, rows = renderer.start([QUESTION]), []
    for _ in range(TURNS):
        began = time.perf_counter()
        prompt = renderer.extend(prompt, sampled, [SAID, QUESTION])
        rows.append((time.perf_counter() - began, len(prompt)))
    return rows


def _whole(renderer: Renderer, turn: int) -> float:
    """Seconds for the whole conversation of so many turns."""
    messages = [QUESTION, *[SAID, QUESTION] * turn]
    began = time.perf_counter()
    renderer.tokenizer(renderer.template.render(messages, ()), add_special_tokens=False)
    return time.perf_counter() - began
