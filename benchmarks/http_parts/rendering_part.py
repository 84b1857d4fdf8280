"""What a turn costs the renderer: the delta of `extend` beside rendering and tokenising the whole conversation again."""

from __future__ import annotations

import time
from typing import Any

from agentrl import Generation, Renderer, Span
from agentrl.assemble import make_renderer
from agentrl.config import Config

TURNS = 128
SHOWN = (1, 16, 32, 64, 128)
AROUND = 8
REPLY = "I add the two numbers and get forty two."
QUESTION = {"role": "user", "content": "what is 17 + 25? think first, then answer with one number."}


def measure(model: str) -> dict[str, Any]:
    """Milliseconds at each of SHOWN, the least of the AROUND turns before it."""
    renderer = make_renderer(Config(), model)
    rows = _costs(renderer)
    shown = []
    for turn in SHOWN:
        near = rows[max(0, turn - AROUND) : turn]
        delta, whole = (1e3 * min(row[i] for row in near) for i in (0, 1))
        shown.append(
            {"turn": turn, "tokens": rows[turn - 1][2], "delta_ms": round(delta, 3), "whole_ms": round(whole, 3)}
        )
        print(f"turn {turn:>4}, {rows[turn - 1][2]:>6} tokens: delta {delta:.2f} ms, whole {whole:.2f} ms")
    return {"turns": shown, "delta_growth": round(shown[-1]["delta_ms"] / shown[0]["delta_ms"], 2)}


def _costs(renderer: Renderer) -> list[tuple[float, float, int]]:
    """(seconds of the delta, seconds of the whole, tokens) for every turn."""
    ids = tuple(renderer.tokenizer(f"{REPLY}<|im_end|>", add_special_tokens=False).input_ids)
    sampled = Generation(ids, (0.0,) * len(ids), (Span(0, 0, len(ids)),), "stop")
    said: dict[str, Any] = {"role": "assistant", "content": REPLY}
    messages: list[dict[str, Any]] = [QUESTION]
    prompt = renderer.start(messages)
    rows = []
    for _ in range(TURNS):
        began = time.perf_counter()
        prompt = renderer.extend(prompt, sampled, [said, QUESTION])
        delta = time.perf_counter() - began
        messages += [said, QUESTION]
        began = time.perf_counter()
        text = renderer.template.render(messages, ())
        renderer.tokenizer(text, add_special_tokens=False)
        rows.append((delta, time.perf_counter() - began, len(prompt)))
    return rows
