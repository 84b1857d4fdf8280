"""Whole episodes on the scripted engine: tokens, limits, verdicts, failures."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image as PILImage
from tokenizers import Tokenizer, decoders, models

from agentrl import (
    Action,
    AgentExecutorBase,
    Env,
    Image,
    Limits,
    Renderer,
    Reply,
    RolloutContext,
    Sampling,
    ScriptedEngine,
    Task,
    ToolEnv,
    Trajectory,
    run_episode,
    tool,
)
from agentrl.executor import play
from agentrl.image_store import ImageStore

from .tokenizers import FakeProcessor

Step = tuple[Any, Any, Any, Any, Any]
RenderersOf = Callable[..., Renderer]


class Script(Env):
    """Says what it was told to: `opening`, then one entry of `steps` a turn (a callable is called)."""

    def __init__(self, steps: Sequence[Any], opening: Any = "go", info: Any = None, max_turns: Any = 16) -> None:
        self.steps = list(steps)
        self.opening = opening
        self.info = {} if info is None else info
        self.max_turns = max_turns
        self.actions: list[Action] = []
        self.closed = 0
        self.given: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.given = {"seed": seed, **(options or {})}
        return self.opening, self.info

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        step = self.steps[len(self.actions) - 1]
        return step() if callable(step) else step

    def close(self) -> None:
        self.closed += 1


def more(observation: Any = "more", reward: Any = 0.0, **info: Any) -> Step:
    return observation, reward, False, False, info


def done(reward: Any = 1.0, *, truncated: bool = False, **info: Any) -> Step:
    return "", reward, not truncated, truncated, info


def writes(renderer: Renderer, *texts: str) -> list[Reply]:
    return [Reply(renderer.tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


YES = "yes<|im_end|>"


@pytest.fixture(scope="module")
def chat(renderer_of: RenderersOf) -> Renderer:
    return renderer_of("chatml")


@pytest.fixture(scope="module")
def seeing(renderer_of: RenderersOf) -> Renderer:
    return renderer_of("vision")


async def episode(env: Any, renderer: Any, *texts: str, **options: Any) -> Trajectory:
    engine = ScriptedEngine(writes(renderer, *(texts or (YES,) * 20)))
    return await run_episode(env, engine, renderer, Task("t"), **options)


# ---------------------------------------------------------------------- token in, token out


def toy_tokenizer() -> Any:
    """a=1, b=2, ab=3, and a special token <s>=4 that decoding skips."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={"x": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


async def test_sampled_ids_are_never_decoded_and_encoded_again() -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer("ab").input_ids == [3]
    env = Script([more("ab"), done()], opening="ab")
    engine = ScriptedEngine([Reply([1, 2], logprobs=[-0.5, -0.25]), Reply([1, 4, 2], logprobs=[-1.0, -2.0, -3.0])])
    record = await run_episode(env, engine, Renderer(tokenizer, chat_template="none"), Task("t"))
    (row,) = record.rows()
    assert row.token_ids.tolist() == [3, 1, 2, 3, 1, 4, 2]
    assert row.loss_mask.tolist() == [False, True, True, False, True, True, True]
    assert row.logprobs.tolist() == [0, -0.5, -0.25, 0, -1, -2, -3]
    assert row.versions.tolist() == [-1, 0, 0, -1, 0, 0, 0]
    first, second = engine.requests
    assert first.token_ids == (3,)
    assert second.token_ids == (*first.token_ids, 1, 2, 3)
    assert env.actions == ["ab", "ab"], "the special token is in the record, not in the text"
    assert env.actions[1].token_ids == (1, 4, 2)


async def test_rewards_stand_on_the_last_token_of_the_turn_that_earned_them(chat: Renderer) -> None:
    env = Script([more("yes", 0.25), more("yes", None), done(1.0, score=0.5, metrics={"m": 2})])
    record = await episode(env, chat, YES, "no<|im_end|>", YES)
    (row,) = record.rows()
    ends = [t for t in range(len(row)) if row.loss_mask[t] and (t + 1 == len(row) or not row.loss_mask[t + 1])]
    assert [row.rewards[t] for t in ends] == [0.25, 0.0, 1.0]
    assert row.rewards.sum() == record.total_reward == 1.25
    assert (record.score, record.metrics, record.truncated, record.finish_reason) == (0.5, {"m": 2.0}, False, "stop")
    assert [message["role"] for message in record.messages] == ["user", "assistant"] + ["user", "assistant"] * 2
    assert env.closed == 1


async def test_an_answer_that_the_env_printed_earns_nothing(chat: Renderer) -> None:
    class Scored(Script):
        def step(self, action: Any) -> Any:
            self.actions.append(action)
            if len(self.actions) == 1:
                return more("the answer is 42", None)
            return done(float("42" in action))

    record = await episode(Scored([]), chat, "dunno<|im_end|>", "dunno<|im_end|>")
    (row,) = record.rows()
    assert record.total_reward == 0.0
    assert row.loss_mask[-1], "the verdict stands on the last action token"


# ---------------------------------------------------------------------- images


def shot(color: str) -> Image:
    return Image(PILImage.new("RGB", (3, 2), color))


async def test_three_screenshots_take_twelve_placeholders(seeing: Renderer, tmp_path: Path) -> None:
    env = Script([more([shot("green"), "next"]), more([shot("blue")]), done()], opening=[shot("red"), "go"])
    engine = ScriptedEngine(writes(seeing, YES, YES, YES))
    store = ImageStore(tmp_path)
    ctx = RolloutContext(engine, seeing, Sampling(), Limits(), 0, images=store)
    record = await play(as_multi_turn(env), Task("t"), ctx)
    (row,) = record.rows()
    (pad,) = seeing.tokenizer("<|image_pad|>").input_ids
    assert row.token_ids.tolist().count(pad) == 12
    assert [sha for sha, _, _ in row.images] == [shot(color).sha256 for color in ("red", "green", "blue")]
    for sha, start, count in row.images:
        assert row.token_ids[start : start + count].tolist() == [pad] * 4
        assert not row.loss_mask[start : start + count].any()
        assert store.get(sha).sha256 == sha
    assert [len(request.images) for request in engine.requests] == [1, 2, 3]


@pytest.mark.parametrize("room", range(4))
async def test_a_limit_inside_an_image_drops_the_image_whole(seeing: Renderer, room: int) -> None:
    opening = [shot("red"), "go"]
    prompt = seeing.start([{"role": "user", "content": opening}])
    (reply,) = writes(seeing, YES)
    following = seeing.tokenizer("\n<|im_start|>user\n<|vision_start|>", add_special_tokens=False).input_ids
    limit = len(prompt) + len(reply.token_ids) + len(following) + room
    record = await episode(Script([more([shot("blue")])], opening), seeing, YES, limits=Limits(max_len=limit))
    (row,) = record.rows()
    (pad,) = seeing.tokenizer("<|image_pad|>").input_ids
    assert [sha for sha, _, _ in row.images] == [shot("red").sha256]
    assert row.token_ids.tolist().count(pad) == 4
    assert (record.truncated, record.finish_reason, record.total_reward) == (True, "length", 0.0)


async def test_a_sampled_placeholder_ends_the_episode_there(seeing: Renderer) -> None:
    (pad,) = seeing.tokenizer("<|image_pad|>").input_ids
    env = Script([more("again", 0.5), done()], opening=[shot("red"), "go"])
    engine = ScriptedEngine([*writes(seeing, YES), Reply([5, pad, 6], logprobs=[-1, -2, -3], versions=[0, 1, 1])])
    record = await run_episode(env, engine, seeing, Task("t"))
    (row,) = record.rows()
    assert row.token_ids[-2:].tolist() == [5, pad]
    assert row.loss_mask[-2:].all(), "it is a target"
    assert (row.logprobs[-2:].tolist(), row.versions[-2:].tolist()) == ([-1, -2], [0, 1])
    assert [count for _, _, count in row.images] == [4], "it stands for no image"
    assert (record.finish_reason, record.metrics["renderer/placeholder"]) == ("placeholder", 1.0)
    assert len(env.actions) == 2 and record.total_reward == 1.5, "its verdict is what the target is trained with"
    assert (record.truncated, env.closed) == (False, 1)


# ---------------------------------------------------------------------- limits: every way to be truncated


async def test_the_smaller_turn_limit_counts_and_is_told(chat: Renderer) -> None:
    for own, theirs in ((2, 5), (5, 2)):
        env = Script([more()] * 5, max_turns=own)
        record = await episode(env, chat, limits=Limits(max_turns=theirs))
        assert (len(env.actions), env.given["max_turns"]) == (2, 2)
        assert (record.truncated, record.finish_reason, record.total_reward) == (True, "max_turns", 0.0)
        assert record.messages[-1]["role"] == "assistant", "the observation of the last step is not rendered"


async def test_the_env_may_truncate(chat: Renderer) -> None:
    record = await episode(Script([done(truncated=True)]), chat)
    assert (record.truncated, record.finish_reason, record.total_reward) == (True, "stop", 1.0)


async def test_a_turn_cut_by_length_is_given_to_the_env(chat: Renderer) -> None:
    env = Script([more(), done()])
    engine = ScriptedEngine([Reply([65], finish_reason="length"), *writes(chat, YES)])
    record = await run_episode(env, engine, chat, Task("t"))
    assert [action.finish_reason for action in env.actions] == ["length", "stop"]
    assert (record.truncated, record.finish_reason) == (False, "stop"), "only the last turn counts"
    env = Script([done()])
    record = await run_episode(env, ScriptedEngine([Reply([65], finish_reason="length")]), chat, Task("t"))
    assert (record.truncated, record.finish_reason) == (True, "length")


async def test_each_turn_gets_the_smallest_of_three_budgets(chat: Renderer) -> None:
    start = len(chat.start([{"role": "user", "content": "go"}]))
    (yes,) = writes(chat, YES)
    delta = len(chat.extend(chat.start([{"role": "user", "content": "go"}]), _generation(yes), [_user("more")])) - start
    cases = [
        (Limits(max_new_tokens=7, max_len=1000, max_total_tokens=1000), [7, 7]),
        (Limits(max_new_tokens=50, max_len=start + delta + 3), [delta + 3, 3]),
        (
            Limits(max_new_tokens=50, max_total_tokens=2 * len(yes.token_ids)),
            [2 * len(yes.token_ids), len(yes.token_ids)],
        ),
    ]
    for limits, budgets in cases:
        engine = ScriptedEngine(writes(chat, YES, YES))
        await run_episode(Script([more(), done()]), engine, chat, Task("t"), limits=limits)
        assert [request.sampling.max_new_tokens for request in engine.requests] == budgets


def _generation(reply: Reply) -> Any:
    from agentrl import Generation, Span

    n = len(reply.token_ids)
    return Generation(tuple(reply.token_ids), (0.0,) * n, (Span(0, 0, n),), "stop")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_max_len_and_max_total_tokens_end_the_episode(chat: Renderer) -> None:
    start, n = len(chat.start([_user("go")])), len(writes(chat, YES)[0].token_ids)
    for limits in (Limits(max_len=start + n + 4), Limits(max_total_tokens=n), Limits(max_len=start + n)):
        env = Script([more(reward=0.5)] * 3)
        record = await episode(env, chat, limits=limits)
        assert (len(env.actions), record.truncated, record.finish_reason) == (1, True, "length")
        assert record.total_reward == 0.5
        assert len(record.rows()[0]) <= max(limits.max_len, start + n)
    assert record.messages[-1]["role"] == "assistant", "what nobody will read is not rendered"


async def test_all_branches_count_towards_the_total(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("numbered")
    n = len(writes(renderer, YES)[0].token_ids)
    record = await episode(Script([more()] * 9), renderer, limits=Limits(max_total_tokens=3 * n))
    assert [int(row.loss_mask.sum()) for row in record.rows()] == [n, n, n]
    assert (record.finish_reason, record.metrics["renderer/branches"]) == ("length", 2.0)


async def test_a_first_prompt_that_does_not_fit_is_an_error(chat: Renderer) -> None:
    record = await episode(Script([done()]), chat, limits=Limits(max_len=10))
    assert "rollout.max_len is 10" in str(record.error)


@pytest.mark.parametrize(
    ("sampling", "limits", "asked"),
    [
        (None, None, 256),
        (Sampling(max_new_tokens=7), None, 7),
        (Sampling(max_new_tokens=400), None, 400),
        (None, Limits(max_new_tokens=7), 7),
        (Sampling(temperature=0.5), Limits(max_new_tokens=7), 7),
        (Sampling(max_new_tokens=7), Limits(), 7),
    ],
)
async def test_the_smaller_max_new_tokens_counts(
    chat: Renderer, sampling: Sampling | None, limits: Limits | None, asked: int
) -> None:
    engine = ScriptedEngine(writes(chat, YES))
    await run_episode(Script([done()]), engine, chat, Task("t"), sampling=sampling, limits=limits)
    assert engine.requests[0].sampling.max_new_tokens == asked


# ---------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("rewards", "total"),
    [
        ([0.5, 0.5], 1.0),
        ([None, 1.0], 1.0),
        ([1.0, None], None),
        ([1.0, math.nan], None),
        ([1.0, math.inf], None),
        ([math.nan, 1.0], 1.0),
        ([None, None], None),
        ([0.0, 0.0], 0.0),
        ([np.float32(0.5), np.int64(1)], 1.5),
        ([True, np.array(0.5)], 1.5),
    ],
)
async def test_when_there_is_a_verdict(chat: Renderer, rewards: list[Any], total: float | None) -> None:
    record = await episode(Script([more(reward=rewards[0]), done(rewards[1])]), chat)
    assert (record.error, record.total_reward, record.score) == (None, total, total)
    (row,) = record.rows()
    assert row.total_reward == total and np.isfinite(row.rewards).all()


async def test_info_of_every_step_is_taken(chat: Renderer) -> None:
    env = Script(
        [
            more(score=0.1, metrics={"a": 1, "b": np.float32(2)}),
            done(score=None, metrics={"b": 3, 7: True, "n": math.nan}),
        ],
        info={"metrics": {"r": 5}, "anything": object()},
    )
    record = await episode(env, chat)
    assert (record.error, record.score) == (None, 0.1)
    assert record.metrics == {"r": 5.0, "a": 1.0, "b": 3.0, "7": 1.0}


async def test_info_sampling_holds_for_the_next_turn_alone(chat: Renderer) -> None:
    env = Script(
        [more(sampling={"stop": ("a", "b")}), more(sampling={"max_new_tokens": 10_000}), done()],
        info={"sampling": {"max_new_tokens": np.int64(3), "stop": "###"}},
    )
    engine = ScriptedEngine(writes(chat, YES, YES, YES))
    sampling = Sampling(stop=("own",), max_new_tokens=50)
    record = await run_episode(env, engine, chat, Task("t"), sampling=sampling)
    assert record.error is None
    asked = [(request.sampling.max_new_tokens, request.sampling.stop) for request in engine.requests]
    assert asked == [(3, ("###",)), (50, ("a", "b")), (50, ("own",))]


async def test_sampling_that_changes_the_distribution_is_for_evaluation(chat: Renderer) -> None:
    env = Script([done()], info={"sampling": {"temperature": 0.0, "top_p": 0.5}})
    record = await episode(env, chat)
    assert "temperature, top_p would change the distribution" in str(record.error)
    engine = ScriptedEngine(writes(chat, YES))
    ctx = RolloutContext(engine, chat, Sampling(), Limits(), 0, training=False)
    assert (await play(as_multi_turn(env), Task("t"), ctx)).error is None
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.top_p) == (0.0, 0.5)


def as_multi_turn(env: Any) -> Any:
    from agentrl import MultiTurnExecutor

    return MultiTurnExecutor(lambda: env)


# ---------------------------------------------------------------------- what user code may do


@pytest.mark.parametrize(
    "step",
    [
        None,
        ("a", 1.0, True, False),
        more("a", "1.0"),
        more("a", "nan"),
        more("a", [1.0, 2.0]),
        more("a", 10**400),
        more("a", object),
        more(None),
        more(7),
        more({"role": "user", "content": "x"}),
        more([{"role": "user", "content": 7}]),
        more([Image("/no/such/file.png")]),
        more(["x", b"no picture"]),
        ("a", 1.0, np.array([True, False]), False, {}),
        more(score="high"),
        more(metrics=[1]),
        more(metrics={"a": "b"}),
        more(metrics={"a": None}),
        more(sampling=[1]),
        more(sampling={"max_new_tokens": 0}),
        more(sampling={"max_new_tokens": "5"}),
        more(sampling={"max_new_tokens": 2.5}),
        more(sampling={"stop": 7}),
        more(sampling={"stop": [""]}),
        more(sampling={"seed": 3}),
        more(sampling={"top_k": 3}),
    ],
    ids=lambda step: repr(step)[:50],
)
async def test_what_the_contract_forbids_is_an_env_error(chat: Renderer, step: Any) -> None:
    env = Script([step, done()])
    record = await episode(env, chat)
    assert type(record.error).__name__ == "EnvError", record.error
    assert (env.closed, record.total_reward) == (1, None)
    assert record.rows()[0].loss_mask.sum() > 0, "the record goes as far as the episode got"


@pytest.mark.parametrize(
    "attribute", [{"max_turns": 0}, {"max_turns": "many"}, {"opening": None}, {"info": {"metrics": 3}}]
)
async def test_a_wrong_opening_is_an_env_error(chat: Renderer, attribute: dict[str, Any]) -> None:
    record = await episode(Script([done()], **attribute), chat)
    assert type(record.error).__name__ == "EnvError", record.error


@pytest.mark.parametrize("tools", ["add", [len], {"a": 1}])
async def test_tools_must_be_schemas(chat: Renderer, tools: Any) -> None:
    class Tooled(Script):
        pass

    Tooled.tools = tools
    record = await episode(Tooled([done()]), chat)
    assert "must be a list of OpenAI function schemas" in str(record.error)


async def test_eight_episodes_with_four_faulty_ones(chat: Renderer) -> None:
    class Faulty(Script):
        def __init__(self, i: int) -> None:
            super().__init__([more(), done(None if i == 6 else 1.0)])
            self.i = i

        def reset(self, **options: Any) -> Any:
            if self.i == 1:
                raise ValueError("reset")
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            if self.i == 3 and len(self.actions) == 1:
                raise ValueError("step 2")
            return super().step(action)

        def close(self) -> None:
            super().close()
            if self.i == 5:
                raise ValueError("close")

    envs = [Faulty(i) for i in range(8)]
    records = await asyncio.gather(*(episode(env, chat) for env in envs))
    assert [env.closed for env in envs] == [1] * 8
    assert [i for i, record in enumerate(records) if record.total_reward is not None] == [0, 2, 4, 5, 7]
    assert [i for i, record in enumerate(records) if record.error is not None] == [1, 3]
    assert [i for i, record in enumerate(records) if "errors/close" in record.metrics] == [5]
    assert all(type(records[i].error).__name__ == "EnvError" for i in (1, 3))
    assert not records[1].rows() and len(records[3].rows()) == 1


async def test_sixteen_blocking_envs_are_all_inside_step_at_once(chat: Renderer) -> None:
    together = threading.Barrier(16)
    beats = 0

    class Blocking(Script):
        def __init__(self) -> None:
            super().__init__([lambda: (together.wait(20), more())[1], lambda: (together.wait(20), done())[1]])

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.ensure_future(heart())
    records = await asyncio.gather(*(episode(Blocking, chat) for _ in range(16)))
    beating.cancel()
    assert [record.total_reward for record in records] == [1.0] * 16, "else the barrier broke"
    assert beats > 16


async def test_one_env_that_never_returns_costs_one_episode(chat: Renderer) -> None:
    gate = threading.Event()

    class Stuck(Script):
        def __init__(self, stuck: bool) -> None:
            super().__init__([(lambda: gate.wait(20) and done()) if stuck else done()])

    limits = Limits(call_timeout_s=0.2)
    records = await asyncio.gather(*(episode(lambda i=i: Stuck(i == 3), chat, limits=limits) for i in range(16)))
    assert [i for i, record in enumerate(records) if record.error is not None] == [3]
    assert "step took longer than 0.2 s" in str(records[3].error)
    assert records[3].metrics == {"errors/abandoned_threads": 1.0}
    gate.set()


async def test_cancelling_an_episode_closes_its_env_and_passes(chat: Renderer) -> None:
    env = Script([done()])
    admitted = asyncio.Event()

    def script(request: Any) -> Reply:
        admitted.set()
        return Reply(hang=True)

    task = asyncio.ensure_future(run_episode(env, ScriptedEngine(script), chat, Task("t")))
    await asyncio.wait_for(admitted.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.closed == 1


async def test_an_episode_over_its_time_names_who_owes_the_answer(chat: Renderer) -> None:
    limits = Limits(episode_timeout_s=0.1)
    env = Script([done()])
    record = await run_episode(env, ScriptedEngine([Reply(hang=True)]), chat, Task("t"), limits=limits)
    assert (type(record.error).__name__, env.closed) == ("EngineError", 1)
    assert "no answer to episode-0-0" in str(record.error)
    gate = threading.Event()
    slow = Script([lambda: gate.wait(0.3) or done()])
    record = await episode(slow, chat, limits=limits)
    assert (type(record.error).__name__, slow.closed) == ("EnvError", 1)
    assert "rollout.episode_timeout_s = 0.1 s" in str(record.error)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(error="lost"),
        Reply(error=RuntimeError("died")),
        Reply(error=ConnectionError("reset")),
        Reply(error=TimeoutError()),
        Reply([1], finish_reason="abort"),
        Reply([1, 2], logprobs=[0.0]),
        Reply([1], logprobs=[math.nan]),
        Reply([1, 2], versions=[0]),
    ],
    ids=str,
)
async def test_what_the_engine_does_wrong_is_a_retryable_engine_error(chat: Renderer, reply: Reply) -> None:
    env = Script([done()])
    record = await run_episode(env, ScriptedEngine([reply]), chat, Task("t"))
    assert type(record.error).__name__ == "EngineError"
    assert record.error.retryable  # type: ignore[union-attr]
    assert (env.closed, record.rows()) == (1, [])


async def test_a_parser_that_raises_is_the_engines_fault(chat: Renderer) -> None:
    class Unparsing(ScriptedEngine):
        async def parse(self, text: str, tools: Any) -> Any:
            raise RuntimeError("no parser")

    class Tooled(Script):
        tools = [{"type": "function", "function": {"name": "f"}}]

    record = await run_episode(Tooled([done()]), Unparsing(writes(chat, YES)), chat, Task("t"))
    assert type(record.error).__name__ == "EngineError"


# ---------------------------------------------------------------------- tools


class Adder(ToolEnv):
    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool
    def nested(self, name: str) -> str:
        """Say a name."""
        return name

    def reward(self, answer: Action) -> float:
        return float("5" in answer)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


async def test_tool_results_are_one_observation_and_ids_repeat_with_the_seed(chat: Renderer) -> None:
    seen = []
    for seed in (0, 0, 1):
        record = await episode(Adder, chat, CALL + CALL + "<|im_end|>", "it is 5<|im_end|>", seed=seed)
        assert (record.error, record.total_reward) == (None, 1.0)
        ids = [message["tool_call_id"] for message in record.messages if message["role"] == "tool"]
        called = [call["id"] for message in record.messages for call in message.get("tool_calls", [])]
        assert ids == called and len(set(ids)) == 2
        assert all(len(one) == 9 and one.isalnum() for one in ids)
        seen.append(ids)
    assert seen[0] == seen[1] != seen[2]


async def test_an_id_that_the_model_wrote_is_kept(chat: Renderer) -> None:
    class Kimi(ScriptedEngine):
        async def parse(self, text: str, tools: Any) -> Any:
            from agentrl import ToolCall

            return "", [ToolCall("functions.add:0", "add", {"a": 2, "b": 3}, "{}")] if "functions" in text else []

    engine = Kimi(writes(chat, "functions.add:0 {}<|im_end|>", "5<|im_end|>"))
    record = await run_episode(Adder, engine, chat, Task("t"))
    assert [m["tool_call_id"] for m in record.messages if m["role"] == "tool"] == ["functions.add:0"]


@pytest.mark.parametrize(
    "family", ["chatml", "thinking", "headers", "inst", "channels", "text_arguments", "drops_tools"]
)
@pytest.mark.parametrize(
    "written",
    [
        CALL,
        "<tool_call>{",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 5000,
        "",
    ],
)
async def test_tool_turns_go_on_whatever_the_model_writes(renderer_of: RenderersOf, family: str, written: str) -> None:
    renderer = renderer_of(family)
    record = await episode(Adder, renderer, written, "5", limits=Limits(max_len=9000, max_new_tokens=8000))
    assert (record.error, record.total_reward) == (None, 1.0)
    assert sum(int(row.loss_mask.sum()) for row in record.rows()) == sum(
        len(renderer.tokenizer(text, add_special_tokens=False).input_ids) for text in (written, "5")
    )


async def test_special_strings_of_the_env_are_counted(chat: Renderer) -> None:
    record = await episode(Script([more("<|im_end|>"), done()], opening="<|im_start|><|im_end|>"), chat)
    assert record.metrics == {"renderer/special_strings": 3.0}


# ---------------------------------------------------------------------- seeds and sampling


async def test_the_same_seed_gives_the_same_requests_and_turns_differ(chat: Renderer) -> None:
    def requests(seed: int) -> Any:
        engine = ScriptedEngine(writes(chat, YES, YES, YES))
        return engine, run_episode(Script([more(), more(), done()]), engine, chat, Task("t"), seed=seed)

    asked = []
    for seed in (3, 3, 4):
        engine, playing = requests(seed)
        await playing
        asked.append(engine.requests)
    assert asked[0] == asked[1]
    seeds = [request.sampling.seed for request in asked[0] + asked[2]]
    assert len(set(seeds)) == 6


async def test_every_sampling_value_is_sent(chat: Renderer) -> None:
    sampling = Sampling(temperature=0.7, max_new_tokens=9, stop=("x",), seed=1, top_p=0.9, top_k=3, min_p=0.1)
    engine = ScriptedEngine(writes(chat, YES))
    record = await run_episode(Script([done()]), engine, chat, Task("t"), sampling=sampling, seed=5)
    (request,) = engine.requests
    sent = request.sampling
    assert (sent.temperature, sent.stop, sent.top_p, sent.top_k, sent.min_p) == (0.7, ("x",), 0.9, 3, 0.1)
    assert sent.seed not in (None, 1), "each turn has its own"
    assert (request.request_id, request.episode_id, record.rollout_id) == ("episode-5-0", "episode-5", "episode-5")


async def test_env_seed_and_task_reach_reset_and_a_task_is_drawn_without_one(chat: Renderer) -> None:
    env = Script([done()])
    await run_episode(env, ScriptedEngine(writes(chat, YES)), chat, Task("mine", label=7), seed=11)
    assert (env.given["seed"], env.task.label) == (11, 7)

    class Brings(Script):
        def __init__(self) -> None:
            super().__init__([done()])

        @classmethod
        def tasks(cls, split: str = "train", **options: Any) -> list[Task]:
            return [Task(f"task-{i}") for i in range(5)]

    drawn = [await run_episode(Brings, ScriptedEngine(writes(chat, YES)), chat, seed=seed) for seed in (1, 1, 2, 3, 4)]
    ids = [record.rows()[0].task_id for record in drawn]
    assert ids[0] == ids[1] and len(set(ids)) > 1 and all(one.startswith("task-") for one in ids)


# ---------------------------------------------------------------------- what can be played


class Plain(gymnasium.Env[Any, Any]):
    """A gymnasium env that knows nothing of agentrl; `task` is something else here."""

    task = "walk"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "go", {}

    def step(self, action: Any) -> Any:
        return "", 1, True, False, {}


class Talks(AgentExecutorBase):
    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        record = ctx.begin(task)
        prompt = ctx.renderer.start([_user("go")])
        generation = await ctx.generate(prompt.token_ids)
        record.add_sampled(record.add(None, "prompt", prompt.token_ids), generation).reward = 1.0
        return record


class AsyncScript(Script):
    async def reset(self, **options: Any) -> Any:  # type: ignore[override]
        return super().reset(**options)

    async def step(self, action: Any) -> Any:
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plain,
        Plain,
        lambda: lambda: gymnasium.wrappers.TimeLimit(Plain(), 5),
        lambda: lambda: gymnasium.Wrapper(Script([done()])),
        lambda: Talks,
        Talks,
        lambda: AsyncScript([done()]),
        lambda: as_multi_turn(AsyncScript([done()])),
    ],
)
async def test_classes_objects_factories_wrappers_and_executors_are_played(chat: Renderer, make: Any) -> None:
    for task in (None, Task("t")):
        record = await run_episode(make(), ScriptedEngine(writes(chat, YES)), chat, task)
        assert (record.error, record.total_reward) == (None, 1.0)
        assert record.rows()[0].task_id == ("t" if task else "0")


@pytest.mark.parametrize(
    ("does", "kind", "said"),
    [
        ("none", "AgentError", "must return a Trajectory"),
        ("raise", "AgentError", "raised KeyError"),
        ("cancel", "AgentError", "cancellation of its own"),
        ("connect", "InfrastructureError", "refused"),
        ("long", "AgentError", "leave no token"),
    ],
)
async def test_what_an_executor_does_wrong_is_named(chat: Renderer, does: str, kind: str, said: str) -> None:
    class Wrong(AgentExecutorBase):
        async def execute(self, task: Task, ctx: RolloutContext) -> Any:
            if does == "raise":
                raise KeyError("x")
            if does == "cancel":
                raise asyncio.CancelledError
            if does == "connect":
                raise ConnectionError("refused")
            if does == "long":
                await ctx.generate([1] * 5000)

    record = await run_episode(Wrong(), ScriptedEngine([]), chat, Task("t"))
    assert type(record.error).__name__ == kind
    assert said in str(record.error)


async def test_a_processor_or_tokenizer_is_enough(chat: Renderer, seeing: Renderer) -> None:
    for processor in (chat.tokenizer, FakeProcessor(seeing.tokenizer)):
        record = await run_episode(lambda: Script([done()]), ScriptedEngine([Reply([65])]), processor)
        assert record.error is None
