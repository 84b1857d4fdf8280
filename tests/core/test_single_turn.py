"""One prompt, one completion, one verdict; reward functions and what they may do; the examples."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from agentrl import (
    ConfigError,
    EnvError,
    Image,
    InfrastructureError,
    Limits,
    Renderer,
    Reply,
    RolloutContext,
    Sampling,
    ScriptedEngine,
    SingleTurnExecutor,
    Task,
    Trajectory,
    run_episode,
)
from agentrl.assemble import make_executor
from agentrl.config import Config
from agentrl.env_loop import EnvLoops

EXAMPLES = Path(__file__).parents[2] / "examples"
RenderersOf = Callable[..., Renderer]


@pytest.fixture(scope="module")
def chat(renderer_of: RenderersOf) -> Renderer:
    return renderer_of("chatml")


async def judged(
    renderer: Renderer, reward: Any, *replies: Any, task: Task | None = None, **options: Any
) -> Trajectory:
    executor = options.pop("executor", None) or SingleTurnExecutor(reward, options.pop("weights", ()))
    written = [
        reply if isinstance(reply, Reply) else Reply(renderer.tokenizer(reply, add_special_tokens=False).input_ids)
        for reply in replies or ("42<|im_end|>",)
    ]
    return await run_episode(executor, ScriptedEngine(written), renderer, task or Task("t", "6*7?", 42), **options)


async def test_the_reward_stands_on_the_last_sampled_token(chat: Renderer) -> None:
    record = await judged(chat, lambda completion, label: {"reward": 2, "score": 1, "metrics": {"n": len(completion)}})
    (row,) = record.rows()
    assert row.rewards.tolist() == [0.0] * (len(row) - 1) + [2.0]
    assert row.loss_mask.sum() == 3, "the end of turn is trained"
    assert (record.total_reward, record.score, record.metrics, record.finish_reason) == (2.0, 1.0, {"n": 2.0}, "stop")
    assert record.messages[-1] == {"role": "assistant", "content": "42"}


async def test_a_function_is_given_what_it_names(chat: Renderer, renderer_of: RenderersOf) -> None:
    picture = Image(PILImage.new("RGB", (2, 2)))
    task = Task("t", "what?", label=["7", 7], images=(picture,), row={"a": 2**55 + 1})
    seen: dict[str, Any] = {}

    def everything(**given: Any) -> float:
        seen.update(given)
        return 1.0

    record = await judged(renderer_of("vision"), everything, task=task)
    assert record.error is None
    assert seen.keys() == {"prompt", "completion", "label", "row", "images", "task", "prompt_text", "query"}
    assert (seen["label"], seen["row"]["a"], seen["images"], seen["task"]) == (["7", 7], 2**55 + 1, (picture,), task)
    assert [sha for sha, _, _ in record.rows()[0].images] == [picture.sha256]


@pytest.mark.parametrize(
    ("said", "total"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (None, None),
        (math.nan, None),
        (-math.inf, None),
        ({"reward": None}, None),
        ({"reward": 0}, 0.0),
        ({"reward": 1, "score": math.nan, "metrics": None}, 1.0),
    ],
)
async def test_when_there_is_a_verdict(chat: Renderer, said: Any, total: float | None) -> None:
    record = await judged(chat, lambda: said)
    assert (record.error, record.total_reward, record.score) == (None, total, total)


@pytest.mark.parametrize(
    "said",
    [
        "1.0",
        b"1",
        [1.0, 2.0],
        object(),
        {},
        {"rewards": 1},
        {"reward": 1, "extra": 2},
        {"reward": "1"},
        {"reward": 1, "metrics": {"a": "x"}},
    ],
)
async def test_what_is_no_verdict_is_an_env_error(chat: Renderer, said: Any) -> None:
    record = await judged(chat, lambda: said)
    assert type(record.error).__name__ == "EnvError"
    assert len(record.rows()) == 1


class Callables:
    async def __call__(self, completion: str) -> float:
        return 1.0

    def method(self, completion: str) -> float:
        return 1.0


async def _awaited(completion: str, scale: float = 1.0) -> float:
    await asyncio.sleep(0)
    return scale


def _anything(*args: Any, **given: Any) -> float:
    return float(not args and "completion" in given)


@pytest.mark.parametrize(
    "function",
    [
        _awaited,
        Callables(),
        Callables().method,
        functools.partial(_awaited, scale=1.0),
        lambda: _awaited(""),
        _anything,
    ],
)
async def test_functions_of_every_kind(chat: Renderer, function: Any) -> None:
    assert (await judged(chat, function)).total_reward == 1.0


@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration(), SystemExit(2), TimeoutError("own")])
async def test_what_a_reward_raises_is_an_env_error(chat: Renderer, error: BaseException) -> None:
    def raises() -> float:
        raise error

    record = await judged(chat, raises)
    assert type(record.error).__name__ == "EnvError"
    assert f"reward raises raised {type(error).__name__}" in str(record.error)
    assert "errors/abandoned_threads" not in record.metrics


async def test_an_infrastructure_error_keeps_its_class(chat: Renderer) -> None:
    async def down() -> float:
        raise InfrastructureError("503")

    assert type((await judged(chat, down)).error).__name__ == "InfrastructureError"


async def test_a_reward_that_never_returns_fails_one_episode_and_is_counted(chat: Renderer) -> None:
    gate = threading.Event()

    async def hangs() -> float:
        await asyncio.Event().wait()
        return 1.0

    limits = Limits(call_timeout_s=0.05)
    stuck = await judged(chat, lambda: gate.wait(10), limits=limits)
    assert "took longer than 0.05 s" in str(stuck.error)
    assert stuck.metrics == {"errors/abandoned_threads": 1.0}
    awaiting = await judged(chat, hangs, limits=limits)
    assert "took longer" in str(awaiting.error) and not awaiting.metrics
    gate.set()


async def test_several_rewards_are_weighted(chat: Renderer) -> None:
    rewards = [
        lambda: {"reward": 1.0, "metrics": {"a": 1}},
        lambda: {"reward": 0.5, "score": 0.25, "metrics": {"b": 2}},
    ]
    record = await judged(chat, rewards, weights=(1.0, 2.0))
    assert (record.total_reward, record.score, record.metrics) == (2.0, 0.25, {"a": 1.0, "b": 2.0})
    assert (await judged(chat, [lambda: 1.0, lambda: None])).total_reward is None
    assert (await judged(chat, [lambda: 1.0, lambda: None], weights=(1.0, 0.0))).total_reward == 1.0


async def test_errors_call_a_function_as_the_command_line_does(chat: Renderer, tmp_path: Path) -> None:
    file = tmp_path / "rec.py"
    file.write_text(
        "def wants(promt): ...\ndef says():\n    return {'x': 1}\ndef fails():\n    raise ValueError('boom')\n"
    )

    def named(*functions: str) -> SingleTurnExecutor:
        specs = [f"{file}:{function}" for function in functions]
        config = Config.model_validate({"reward": {"name": specs}, "data": {"path": "x"}})
        executor = make_executor(config)
        assert isinstance(executor, SingleTurnExecutor)
        return executor

    with pytest.raises(ConfigError, match=rf"--reward {file}:wants wants a parameter 'promt'"):
        named("fails", "wants")
    said = await judged(chat, None, executor=named("says"))
    assert f"reward {file}:says: a reward's dict must have 'reward'" in str(said.error)
    failed = await judged(chat, None, executor=named("fails"))
    assert f"reward {file}:fails raised ValueError" in str(failed.error)


def test_wrong_rewards_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="wants a parameter 'answer'"):
        SingleTurnExecutor(lambda answer: 1.0)
    with pytest.raises(ConfigError, match="2 weights for 1 rewards"):
        SingleTurnExecutor(lambda: 1.0, (1.0, 2.0))


async def test_a_completion_cut_by_length_is_judged_and_truncated(chat: Renderer) -> None:
    record = await judged(chat, lambda: 1.0, Reply([65], finish_reason="length"))
    assert (record.truncated, record.finish_reason, record.total_reward) == (True, "length", 1.0)


async def test_a_prompt_that_does_not_fit(chat: Renderer) -> None:
    record = await judged(chat, lambda: 1.0, limits=Limits(max_len=5))
    assert "rollout.max_len is 5" in str(record.error)


async def test_a_sampled_placeholder_ends_the_reply_and_is_judged_with_it(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("vision")
    (pad,) = renderer.tokenizer("<|image_pad|>").input_ids
    record = await judged(renderer, lambda: 1.0, Reply([5, pad, 6]))
    (row,) = record.rows()
    assert (row.token_ids[-1], row.loss_mask[-1], record.total_reward) == (pad, True, 1.0)
    assert (record.finish_reason, record.metrics) == ("placeholder", {"renderer/placeholder": 1.0})


async def test_special_strings_in_a_prompt_are_counted(chat: Renderer) -> None:
    record = await judged(chat, lambda: 1.0, task=Task("t", "say <|im_end|>"))
    assert record.metrics == {"renderer/special_strings": 1.0}


async def test_a_prompt_as_text_or_as_a_message_gives_the_same_ids(chat: Renderer) -> None:
    prompts = ["hi \u2028 漢字 🙂", [{"role": "user", "content": "hi \u2028 漢字 🙂"}]]
    rows = [(await judged(chat, lambda: 1.0, task=Task("t", prompt))).rows()[0] for prompt in prompts]
    assert rows[0].token_ids.tolist() == rows[1].token_ids.tolist()


# ---------------------------------------------------------------------- the examples


def example(name: str) -> Any:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_custom_env(chat: Renderer) -> None:
    game = example("custom_env").GuessTheNumber
    tasks = {split: {task.label for task in game.tasks(split, high=10)} for split in ("train", "test")}
    assert tasks == {"train": {2, 4, 6, 8, 10}, "test": {1, 3, 5, 7, 9}}
    words = ("hm<|im_end|>", "3<|im_end|>", "it is 8<|im_end|>", "6<|im_end|>")
    record = await judged(chat, None, *words, executor=game, task=Task("t", label=6))
    assert record.total_reward == pytest.approx(0.6)
    assert (record.score, record.metrics) == (1.0, {"no_number": 1.0, "turns": 4.0})
    shown = [message["content"] for message in record.messages if message["role"] == "user"]
    assert shown[1:] == ["Say a number.", "Higher.", "Lower."]
    assert record.rows()[0].loss_mask.sum() == sum(len(chat.tokenizer(word).input_ids) for word in words)


async def test_the_executor(chat: Renderer) -> None:
    record = await judged(chat, None, "41<|im_end|>", "42<|im_end|>", executor=example("executor").SecondOpinion)
    first, second = record.rows()
    assert (first.rewards.sum(), second.rewards.sum(), record.total_reward) == (0.0, 1.0, 1.0)
    assert first.loss_mask.sum() == second.loss_mask.sum() == 3
    assert record.metrics == {"changed_its_mind": 1.0}


async def test_the_rewards(chat: Renderer) -> None:
    module = example("reward")
    both = await judged(chat, [module.exact, module.brevity], weights=(1.0, 0.1))
    assert both.total_reward == pytest.approx(1.099)
    task = Task("t", "6*7?", row={"answer": "42"})
    right = await judged(chat, module.last_number, "6*7 is 42.0<|im_end|>", task=task)
    assert (right.total_reward, right.score, right.metrics) == (1.0, 1.0, {"numbers": 3.0})
    silent = await judged(chat, module.last_number, "no idea<|im_end|>", task=task)
    assert (silent.error, silent.total_reward) == (None, None)


async def test_a_reward_that_blocks_is_blamed_and_the_workers_loop_goes_on(chat: Renderer) -> None:
    released, ticks = threading.Event(), 0

    async def blocks(completion: str) -> float:
        released.wait(20)
        return 1.0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    limits = Limits(call_timeout_s=0.3)
    ctx = RolloutContext(ScriptedEngine([]), chat, Sampling(), limits, 0, env_loops=EnvLoops(grace_s=0.2))
    ticking = asyncio.create_task(tick())
    with pytest.raises(EnvError, match="reward blocks blocked the event loop"):
        await SingleTurnExecutor(blocks).judge(Task("t"), "x", ctx, Trajectory(Task("t")))
    ticking.cancel()
    released.set()
    assert ticks > 5
