"""What a careless demonstrator does in the environments, as token sequences with the last reply as target.

Every sequence comes from an episode played through the env protocol and rendered as a rollout renders it. The
demonstrator knows the answer and slips with a chosen probability: imitating it gives a policy whose features are sound
and whose success rate is known, which is what reinforcement learning can improve on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.engine import Generation
from agentrl.env import Env, Task
from agentrl.messages import Action, Image, ToolCall, normalize
from agentrl.registry import lookup
from agentrl.renderer import Prompt, Renderer

HASTE = 0.7
"""Share of the slips in screenshot_math that stop half-way."""


@dataclass(frozen=True)
class Demonstration:
    """One sequence; the tokens from `target` on are the last reply with its end token. Image placeholders are expanded."""

    token_ids: tuple[int, ...]
    target: int
    images: tuple[Image, ...] = ()


class Demonstrator(Protocol):
    """`turn_weights[k]` is how often a demonstration has k + 1 turns."""

    turn_weights: tuple[float, ...]

    def draw(self, rng: random.Random, turns: int, slip: float) -> Demonstration:
        """A demonstration on a train task whose last reply is wrong with probability `slip`."""
        ...

    def held_out(self, count: int) -> list[Demonstration]:
        """First turns of `count` test tasks, replied to rightly."""
        ...


class ScreenshotDemonstrator:
    """screenshot_math at level tiny: replies `3+4+2=7+2=9`, one sum at a time; earlier turns are wrong answers.

    A slip stops after the first sum (`3+4+2=7`) `HASTE` of the time, else gives another task's answer.
    """

    turn_weights: tuple[float, ...] = (0.7, 0.2, 0.1)

    def __init__(self, processor: Any) -> None:
        env = lookup("env", "screenshot_math")
        self._player = _Player(env(), processor)
        self._train, self._test = env.tasks("train"), env.tasks("test")
        self._answers = sorted({task.label for task in self._train[:500]})
        self._firsts: dict[str, Prompt] = {}

    def draw(self, rng: random.Random, turns: int, slip: float) -> Demonstration:
        task = self._train[rng.randrange(len(self._train))]
        replies = [_slip(task, rng, self._answers) for _ in range(turns - 1)]
        last = _slip(task, rng, self._answers) if rng.random() < slip else _worked(task)
        return self._player.demonstration(self._prompt(task, replies), last)

    def held_out(self, count: int) -> list[Demonstration]:
        tasks = {self._test[index].row["expression"]: self._test[index] for index in range(8 * count)}
        return [
            self._player.demonstration(self._prompt(task, []), _worked(task))
            for _, task in sorted(tasks.items())[:count]
        ]

    def _prompt(self, task: Task, replies: Sequence[Action]) -> Prompt:
        if replies:
            return self._player.play(task, replies)
        expression = task.row["expression"]
        if expression not in self._firsts:
            self._firsts[expression] = self._player.play(task, ())
        return self._firsts[expression]


def _worked(task: Task) -> Action:
    """The sum, worked out from left to right: 3+4+2=7+2=9."""
    terms = [int(term) for term in task.row["expression"].split("+")]
    steps = []
    while len(terms) > 1:
        steps.append("+".join(map(str, terms)))
        terms = [terms[0] + terms[1], *terms[2:]]
    return Action("=".join([*steps, str(terms[0])]))


def _slip(task: Task, rng: random.Random, answers: Sequence[int]) -> Action:
    steps = str(_worked(task)).split("=")
    hasty = steps[1].split("+")[0]
    if rng.random() < HASTE and int(hasty) != task.label:
        return Action(f"{steps[0]}={hasty}")
    wrong = rng.choice([answer for answer in answers if answer != task.label])
    return Action("=".join([*steps[:-1], str(wrong)]))


class CalculatorDemonstrator:
    """calculator_math: calls the calculator with the expression, then answers with its result."""

    turn_weights: tuple[float, ...] = (0.5, 0.5)

    def __init__(self, tokenizer: Any) -> None:
        env = lookup("env", "calculator_math")
        self._player = _Player(env(), tokenizer)
        self._train, self._test = env.tasks("train"), env.tasks("test")

    def draw(self, rng: random.Random, turns: int, slip: float) -> Demonstration:
        return self._show(self._train[rng.randrange(len(self._train))], turns, rng, slip)

    def held_out(self, count: int) -> list[Demonstration]:
        rng = random.Random(0)
        return [self._show(self._test[index // 2], 1 + index % 2, rng, 0.0) for index in range(count)]

    def _show(self, task: Task, turns: int, rng: random.Random, slip: float) -> Demonstration:
        expression, answer = task.row["expression"], str(task.label)
        if rng.random() < slip:
            expression, answer = (
                (expression, _misread(answer, rng)) if turns == 2 else (_misread(expression, rng), answer)
            )
        replies = (_call(expression), Action(answer))
        return self._player.demonstration(self._player.play(task, replies[: turns - 1]), replies[turns - 1])


def _misread(text: str, rng: random.Random) -> str:
    """The text with one of its digits replaced by another."""
    places = [index for index, character in enumerate(text) if character.isdigit()]
    place = rng.choice(places)
    digit = rng.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


def _call(expression: str) -> Action:
    arguments = f'{{"expression": "{expression}"}}'
    call = ToolCall("call_0", "calculator", {"expression": expression}, arguments)
    text = f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'
    return Action(text, tool_calls=(call,))


class _Player:
    """Plays given replies in an env and renders the conversation, sampled replies token by token as in a rollout."""

    def __init__(self, env: Env, processor: Any) -> None:
        self.env = env
        self.renderer = Renderer(processor)
        self.tokenizer = self.renderer.tokenizer

    def play(self, task: Task, replies: Sequence[Action]) -> Prompt:
        """The prompt for the turn after the replies. The episode must not be over by then."""
        observation, _ = self.env.reset(options={"task": task})
        prompt = self.renderer.start(normalize(observation), self.env.tools)
        for reply in replies:
            observation, *_ = self.env.step(reply)
            ids = self._reply_ids(reply)
            generation = Generation(ids, (0.0,) * len(ids), (), "stop")
            prompt = self.renderer.extend(prompt, generation, normalize(observation))
        return prompt

    def demonstration(self, prompt: Prompt, reply: Action) -> Demonstration:
        return Demonstration(prompt.token_ids + self._reply_ids(reply), len(prompt), prompt.images)

    def _reply_ids(self, reply: Action) -> tuple[int, ...]:
        return (*self.tokenizer.encode(str(reply), add_special_tokens=False), self.tokenizer.eos_token_id)
