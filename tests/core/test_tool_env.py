"""Tools: schemas, what a model may get wrong, concurrency, and when the reward is asked for."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import gymnasium
import pytest
from PIL import Image as PILImage
from pydantic import BaseModel

from agentrl import Action, EnvError, Image, InfrastructureError, Task, Text, ToolCall, ToolEnv, tool
from agentrl.engines.hermes import malformed_call, parse_hermes, tool_call
from agentrl.env_check import check
from agentrl.env_session import EnvSession
from agentrl.registry import is_async_env, load_object
from agentrl.tool_env import as_content

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_env.py"


class Adder(ToolEnv):
    """Adds; counts what ran and how often the reward was asked for."""

    max_turns = 10

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[int, int]] = []
        self.answers: list[Action] = []

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first one.
        """
        self.ran.append((a, b))
        return a + b

    @tool
    def fail(self) -> None:
        """Always fails."""
        raise KeyError("no such row")

    def reward(self, answer: Action) -> Any:
        self.answers.append(answer)
        return float("5" in answer)


def started(env: ToolEnv, **options: Any) -> Any:
    env.reset(seed=0, options={"task": Task("t", prompt="2+3?"), **options})
    return env


def call(name: str, **arguments: Any) -> ToolCall:
    return tool_call(name, arguments)


def said(*calls: ToolCall, text: str = "", finish_reason: str = "stop") -> Action:
    return Action(text, tool_calls=calls, finish_reason=finish_reason)


def written(text: str) -> Action:
    """The action an engine without vLLM makes of a reply."""
    content, calls = parse_hermes(text)
    return Action(content, tool_calls=calls)


# --- schemas


def test_schema_of_signature_and_docstring() -> None:
    add, fail = Adder.tools
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one."},
                    "b": {"type": "integer", "default": 1},
                },
                "required": ["a"],
            },
        },
    }
    assert fail["function"]["parameters"] == {"type": "object", "properties": {}}


class Point(BaseModel):
    x: int
    title: str = "here"


class Colour(Enum):
    RED = "red"


class Typed(ToolEnv):
    @tool
    def draw(self, json: Point, _shade: Colour, model_config: Literal["a", "b"] = "a", *, anything=None):  # type: ignore[no-untyped-def]
        """Draw. Long text follows.

        It has two paragraphs.
        """
        return [json.x, _shade.name, model_config, anything]

    def reward(self, answer: Action) -> None:
        return None


def test_schema_of_models_enums_and_awkward_names() -> None:
    function = Typed.tools[0]["function"]
    assert function["description"] == "Draw. Long text follows.\n\nIt has two paragraphs."
    assert list(function["parameters"]["properties"]) == ["json", "_shade", "model_config", "anything"]
    assert function["parameters"]["$defs"]["Point"]["properties"]["title"] == {"type": "string", "default": "here"}
    json.dumps(Typed.tools)
    env = started(Typed())
    observation, *_ = env.step(said(call("draw", json={"x": "4"}, _shade="red", anything={"k": 1})))
    assert observation[0]["content"] == '[4,"RED","a",{"k":1}]'


def test_wrong_arguments_are_explained() -> None:
    env = started(Typed())
    observation, *_ = env.step(said(call("draw", json={"x": "four"}, anythin=1)))
    text = observation[0]["content"]
    assert text.startswith("Error: wrong arguments for draw: ")
    for piece in (
        "json.x: Input should be a valid integer",
        "_shade is missing",
        "there is no anythin. Did you mean anything",
    ):
        assert piece in text


def test_tools_are_inherited_replaced_and_removed() -> None:
    class More(Adder):
        fail = None  # type: ignore[assignment]

        @tool
        def add(self, a: int, b: int = 2) -> int:
            """Add more."""
            return a + b

        @tool
        def twice(self, a: int) -> int:
            return 2 * a

    assert [entry["function"]["name"] for entry in More.tools] == ["add", "twice"]
    assert More.tools[0]["function"]["description"] == "Add more."
    assert [entry["function"]["name"] for entry in Adder.tools] == ["add", "fail"]


def test_what_cannot_be_a_tool_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="mark it @tool"):

        class Unmarked(Adder):
            def add(self, a: int, b: int = 2) -> int:
                return 0

    with pytest.raises(TypeError, match="cannot be given by name"):

        class Variadic(ToolEnv):
            @tool
            def many(self, *numbers: int) -> int:
                return 0

    with pytest.raises(TypeError, match="a name of its own"):

        class Closing(ToolEnv):
            @tool
            def close(self) -> None:
                return None

    with pytest.raises(TypeError, match="described as JSON"):

        class Opaque(ToolEnv):
            @tool
            def lock(self, it: threading.Event) -> int:
                return 0


def test_an_instance_may_narrow_its_tools() -> None:
    env = Adder()
    env.tools = env.tools[:1]
    started(env)
    observation, *_, info = env.step(said(call("fail")))
    assert "there is no tool 'fail'" in observation[0]["content"]
    assert info["metrics"]["tool_errors/unknown"] == 1


# --- what models do


def test_env07_malformed_calls_and_empty_replies() -> None:
    block = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
    good = block.format("add", '{"a": 1, "b": 2}')
    script = [
        ('<tool_call>{"name":"add","arguments":{"a":1,', 0),
        (block.format("add", "null"), 0),
        (block.format("add", '"[1]"'), 0),
        (block.format("ad", '{"a": 1}'), 0),
        ("", 0),
        (good + '<tool_call>{"name": "add", "arguments": {"a"</tool_call>' + good, 2),
    ]
    env = started(Adder())
    for text, executed in script:
        action = written(text)
        before = len(env.ran)
        observation, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (None, False, False)
        assert len(env.ran) - before == executed
        if not action.tool_calls:
            assert observation == [{"role": "user", "content": "Error: your reply was empty."}]
            continue
        assert [message["tool_call_id"] for message in observation] == [call.id for call in action.tool_calls]
        errors = [message["content"].startswith("Error: ") for message in observation]
        assert errors == ([True] if executed == 0 else [False, True, False])
    observation, reward, terminated, truncated, info = env.step(Action("5"))
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["metrics"] == {
        "tool_calls": 7,
        "tool_errors/malformed": 4,
        "tool_errors/unknown": 1,
        "tool_errors/empty": 1,
        "tool_errors/arguments": 0,
        "tool_errors/raised": 0,
    }


def test_unknown_tool_names_the_nearest() -> None:
    observation, *_ = started(Adder()).step(said(call("ad", a=1)))
    assert observation[0]["content"] == "Error: there is no tool 'ad'. Did you mean add? Tools: add, fail."


def test_a_raising_tool_is_told_to_the_model() -> None:
    observation, _, terminated, _, info = started(Adder()).step(said(call("fail"), call("add", a=1)))
    assert [message["content"] for message in observation] == ["Error: KeyError: 'no such row'", "2"]
    assert not terminated and info["metrics"]["tool_errors/raised"] == 1


@pytest.mark.parametrize("kind", [EnvError, InfrastructureError])
def test_a_tool_may_fail_the_episode_on_purpose(kind: type[Exception]) -> None:
    class Broken(ToolEnv):
        @tool
        def query(self) -> str:
            raise kind("the database is gone")

    with pytest.raises(kind, match="database"):
        started(Broken()).step(said(call("query")))


def test_half_a_surrogate_pair_stays_out_of_the_conversation() -> None:
    class Echo(ToolEnv):
        @tool
        def echo(self, text: str) -> str:
            return text

    env = started(Echo())
    actions = [written('<tool_call>{"name": "echo", "arguments": {"text": "\\ud800x"}}</tool_call>')]
    actions.append(written('<tool_call>{"name": "\\ud800x", "arguments": {}}</tool_call>'))
    for action in actions:
        observation, *_ = env.step(action)
        observation[0]["content"].encode()


def test_results_and_their_form() -> None:
    picture = PILImage.new("RGB", (4, 3), "red")
    assert as_content("as is\n") == "as is\n"
    assert as_content(None) == "null"
    assert as_content({"a": [1.5, True, "é"]}) == '{"a":[1.5,true,"é"]}'
    assert as_content(["a", "b"]) == '["a","b"]'
    assert as_content([Point(x=1), Colour.RED]) == '[{"x":1,"title":"here"},"red"]'
    assert isinstance(as_content(object()), str)
    assert as_content(picture) == [Image(picture)]
    assert as_content(["see", Image(picture)]) == [Text("see"), Image(picture)]


# --- the course of an episode


def test_messages_hold_the_conversation() -> None:
    env = started(Adder())
    first = call("add", a=2, b=3)
    env.step(said(first, text="Let me add."))
    env.step(Action("It is 5."))
    assert env.messages == [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "Let me add.",
            "tool_calls": [
                {"id": first.id, "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            ],
        },
        {"role": "tool", "tool_call_id": first.id, "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    started(env)
    assert len(env.messages) == 1 and env.metrics["tool_calls"] == 0


def test_messages_begin_with_what_an_overridden_reset_returns() -> None:
    class Greeting(Adder):
        system = "Be brief."

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            observation, info = super().reset(seed=seed, options=options)
            assert [message["role"] for message in observation] == ["system", "user"]
            return [*observation, {"role": "user", "content": "Now!"}], info

    env = started(Greeting())
    assert [message["content"] for message in env.messages] == ["Be brief.", "2+3?", "Now!"]


def test_images_of_the_task_come_before_its_prompt() -> None:
    picture = Image(PILImage.new("RGB", (2, 2)))
    env = Adder()
    observation, _ = env.reset(options={"task": Task("t", prompt="What?", images=(picture,))})
    assert observation == [picture, Text("What?")]


@pytest.mark.parametrize(("option", "turns"), [(None, 10), (2, 2), (50, 10)])
def test_the_last_turn_asks_for_the_reward_once(option: int | None, turns: int) -> None:
    env = started(Adder(), max_turns=option)
    for turn in range(1, turns + 1):
        observation, reward, terminated, truncated, _ = env.step(said(call("add", a=4)))
        assert truncated == (turn == turns) and not terminated
    assert reward == 0.0 and observation[0]["content"] == "5", "a tool's output is not the answer"
    assert len(env.answers) == 1 and len(env.ran) == turns
    with pytest.raises(EnvError, match="after the episode ended"):
        env.step(Action("5"))


def test_an_answer_in_the_last_turn_is_no_truncation() -> None:
    env = started(Adder(), max_turns=1)
    assert env.step(Action("5"))[1:4] == (1.0, True, False)


@pytest.mark.parametrize("text", ["", "it is 5", "   "])
def test_a_turn_cut_by_length_is_the_last(text: str) -> None:
    env = started(Adder())
    _, reward, terminated, truncated, _ = env.step(said(text=text, finish_reason="length"))
    assert (reward, terminated, truncated) == (float("5" in text), False, True)
    assert env.answers[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("value", "reward", "score", "metrics"),
    [
        (None, None, None, {}),
        (1, 1.0, None, {}),
        (True, 1.0, None, {}),
        ({"reward": None, "score": 0.5}, None, 0.5, {}),
        ({"reward": 2, "metrics": {"close": True}}, 2.0, None, {"close": 1.0}),
    ],
)
def test_forms_of_the_verdict(value: Any, reward: float | None, score: float | None, metrics: dict[str, float]) -> None:
    class Fixed(Adder):
        def reward(self, answer: Action) -> Any:
            return value

    _, given, *_, info = started(Fixed()).step(Action("x"))
    assert given == reward and info.get("score") == score
    assert {key: value for key, value in info["metrics"].items() if not key.startswith("tool_")} == metrics


@pytest.mark.parametrize("value", ["1.0", {"rewrad": 1}, {"reward": 1, "metric": {}}, [1, 2], {"score": 1}])
def test_a_verdict_that_is_none_of_these_is_the_envs_fault(value: Any) -> None:
    class Fixed(Adder):
        def reward(self, answer: Action) -> Any:
            return value

    with pytest.raises(EnvError):
        started(Fixed()).step(Action("x"))


# --- sync and async


def test_a_sync_tool_env_is_a_plain_gymnasium_env() -> None:
    assert not is_async_env(Adder)
    wrapped = gymnasium.wrappers.TimeLimit(Adder(), 3)
    wrapped.reset(options={"task": Task("t", prompt="?")})
    assert wrapped.step("5")[1] == 1.0


def test_sync_calls_of_a_turn_run_in_order_on_the_callers_thread() -> None:
    seen = []

    class Slow(ToolEnv):
        @tool
        def note(self, i: int) -> int:
            seen.append((i, threading.get_ident()))
            return i

    started(Slow()).step(said(*[call("note", i=i) for i in range(5)]))
    assert seen == [(i, threading.get_ident()) for i in range(5)]


class AsyncTools(ToolEnv):
    """`meet` returns only when as many calls as asked for are inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.all_inside = asyncio.Event()
        self.threads: list[int] = []
        self.order: list[int] = []

    @tool
    async def meet(self, n: int, i: int) -> int:
        self.inside += 1
        if self.inside == n:
            self.all_inside.set()
        await self.all_inside.wait()
        await asyncio.sleep(0.01 * (n - i))
        self.order.append(i)
        return i

    @tool
    def block(self, i: int) -> int:
        self.threads.append(threading.get_ident())
        time.sleep(0.02)
        self.order.append(i)
        return i

    @tool
    async def fail(self, error: bool) -> None:
        raise InfrastructureError("gone") if error else ValueError("bad")

    async def reward(self, answer: Action) -> float:
        await asyncio.sleep(0)
        return 1.0


async def test_async_calls_run_concurrently_and_are_answered_in_order() -> None:
    env = started(AsyncTools())
    assert is_async_env(env) and inspect.iscoroutinefunction(env.step)
    action = said(*[call("meet", n=4, i=i) for i in range(4)])
    observation, *_ = await env.step(action)
    assert [message["content"] for message in observation] == ["0", "1", "2", "3"]
    assert [message["tool_call_id"] for message in observation] == [call.id for call in action.tool_calls]
    assert env.order == [3, 2, 1, 0]
    assert (await env.step(Action("done")))[1:3] == (1.0, True)


async def test_sync_tools_of_an_async_env_leave_the_loop_free_and_keep_their_order() -> None:
    env = started(AsyncTools())
    ticks = 0

    async def heart() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    beating = asyncio.create_task(heart())
    await env.step(said(*[call("block", i=i) for i in range(3)]))
    beating.cancel()
    assert env.order == [0, 1, 2] and threading.get_ident() not in env.threads
    assert ticks > 5


async def test_errors_in_async_tools() -> None:
    env = started(AsyncTools())
    observation, *_ = await env.step(said(call("fail", error=False)))
    assert observation[0]["content"] == "Error: ValueError: bad"
    with pytest.raises(InfrastructureError):
        await env.step(said(call("meet", n=2, i=0), call("fail", error=True)))
    assert len(asyncio.all_tasks()) == 1, "no tool outlives its turn"


async def test_cancelling_a_step_cancels_its_tools() -> None:
    env = started(AsyncTools())
    step = asyncio.create_task(env.step(said(call("meet", n=2, i=0))))
    await asyncio.sleep(0.01)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("name", ["reward", "reset", "close"])
def test_one_async_method_makes_step_async(name: str) -> None:
    async def method(self: ToolEnv, *args: Any, **kwargs: Any) -> Any:
        return 1.0

    assert is_async_env(type("Mixed", (Adder,), {name: method}))


async def test_an_async_reset_is_recorded() -> None:
    class Later(Adder):
        async def reset(self, **options: Any) -> Any:  # type: ignore[override]
            await asyncio.sleep(0)
            observation, info = super().reset(**options)
            return f"Please: {observation}", info

    env = Later()
    await env.reset(options={"task": Task("t", prompt="2+3?")})
    assert env.messages == [{"role": "user", "content": "Please: 2+3?"}]
    assert (await env.step(Action("5")))[1] == 1.0


def test_a_sync_tool_that_returns_an_awaitable_is_the_envs_fault() -> None:
    class Hidden(ToolEnv):
        @tool
        def later(self) -> Any:
            return asyncio.sleep(0)

    with pytest.raises(EnvError, match="async def"):
        started(Hidden()).step(said(call("later")))


# --- the example


def test_the_example_plays() -> None:
    groceries = load_object(f"{EXAMPLE}:Groceries")
    task = groceries.tasks("train", items=2)[0]
    env = groceries(items=2)
    env.reset(options={"task": task})
    wanted = task.row["wanted"]
    observation, *_ = env.step(said(*[call("price", item=name) for name in wanted], call("price", item="gold")))
    prices = [int(message["content"]) for message in observation[:-1]]
    assert observation[-1]["content"].startswith("Error: LookupError: we do not sell gold; we have apple")
    total = sum(price * n for price, n in zip(prices, wanted.values(), strict=True))
    assert env.step(Action(f"Total: {total}"))[1] == 1.0
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_example_passes_the_check() -> None:
    groceries = load_object(f"{EXAMPLE}:Groceries")
    assert {finding.level for finding in check(groceries, groceries.tasks("train"), [0, 1])} == {"ok"}


def test_malformed_call_without_a_name_says_so() -> None:
    observation, *_ = started(Adder()).step(said(malformed_call("{oops")))
    assert observation[0]["content"] == "Error: the arguments are not a JSON object."


async def test_a_tool_that_never_returns_is_counted_as_a_lost_thread() -> None:
    released = threading.Event()

    class Hanging(ToolEnv):
        @tool
        def wait(self) -> str:
            """Wait for what does not come."""
            released.wait(30)
            return "late"

        async def reward(self, answer: Action) -> float:  # type: ignore[override]
            return 1.0

    async with EnvSession(Hanging, 0.3, "hanging") as session:
        await session.reset(0, {"task": Task("t", "go")})
        with pytest.raises(EnvError, match=r"took longer than 0\.3 s"):
            await session.step(Action("", tool_calls=[ToolCall("1", "wait", {}, "{}")]))
        assert session.abandoned
    released.set()
