"""Agent and reward files of OpenRLHF's format, as they are, against scripted replies."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from PIL import Image as PILImage

from agentrl import ConfigError, Image, Limits, Reply, ScriptedEngine, Task, run_episode
from agentrl.assemble import episode_limits, load_processor, make_executor, make_reward
from agentrl.config import Config
from agentrl.env_loop import EnvLoops
from agentrl.executor import RolloutContext, Sampling
from agentrl.executor import play as play_episode
from agentrl.openrlhf.convert import convert
from agentrl.openrlhf.load import reward_function
from agentrl.renderer import Renderer
from agentrl.trajectory import Trajectory

FILES = Path(__file__).parent / "files"


@pytest.fixture(scope="module")
def vlm(models: Callable[[str], str]) -> Renderer:
    return Renderer(load_processor(models("tiny-vlm"), False))


def executor(name: str) -> Any:
    return make_executor(Config.model_validate({"agent": {"name": [str(FILES / f"{name}.py")]}, "data": {"path": "x"}}))


async def play(name: str, renderer: Renderer, texts: list[str], **task: Any) -> Trajectory:
    """One episode on replies of these texts, each ended by the stop token."""
    stop = renderer.tokenizer.eos_token_id
    replies = [Reply([*renderer.tokenizer(text, add_special_tokens=False).input_ids, stop]) for text in texts]
    limits = Limits(max_turns=4, max_new_tokens=32, max_len=400)
    return await run_episode(
        executor(name), ScriptedEngine(replies), renderer, Task("0", "1+2=?", **task), limits=limits
    )


async def test_a_text_agent_of_several_turns(vlm: Renderer) -> None:
    ended = await play("counting_agent", vlm, ["1", "3"], label="3")
    assert ended.error is None, ended.error
    (row,) = ended.rows()
    trained = row.token_ids[row.loss_mask].tolist()
    assert trained == [i for reply in ("1", "3") for i in (*vlm.tokenizer(reply).input_ids, vlm.tokenizer.eos_token_id)]
    assert ended.total_reward == 1.0 == ended.score and ended.metrics["turns_taken"] == 2.0
    whole = vlm.text(row.token_ids, special=True)
    assert whole.startswith(vlm.template.render([{"role": "user", "content": "1+2=?"}], ())), (
        "the template made the prompt"
    )
    assert "<|im_start|>user\nTry again.<|im_end|>" in whole
    assert [node.reward for node in ended.sampled] == [0.0, 1.0] and not ended.truncated


@pytest.mark.parametrize("shown", [0, 2])
async def test_an_image_agent_whose_feedback_shows_pictures(shown: int, vlm: Renderer) -> None:
    """After a prompt that shows none, or two."""
    pictures = [Image(PILImage.new("RGB", (28 * (i + 1), 28), (0, 0, 99))) for i in range(shown)]
    ended = await play("picture_agent", vlm, ["1", "12"], images=tuple(pictures))
    assert ended.error is None, ended.error
    (row,) = ended.rows()
    assert [sha for sha, _, _ in row.images[:-1]] == [picture.sha256 for picture in pictures]
    for _, start, count in row.images:
        assert set(row.token_ids[start : start + count].tolist()) <= vlm.placeholder_ids
    places = sum(int(i) in vlm.placeholder_ids for i in row.token_ids)
    assert places == sum(count for _, _, count in row.images) > 0
    assert ended.total_reward == pytest.approx((len("1<|im_end|>") + len("12<|im_end|>")) / 100)


async def test_an_executor_of_its_own(vlm: Renderer) -> None:
    ended = await play("own_executor", vlm, ["1", "3"], label=3)
    assert ended.error is None, ended.error
    (row,) = ended.rows()
    assert row.loss_mask.sum() == 4 and ended.score == 1.0 and ended.metrics["letters"] > 1
    assert ended.total_reward == pytest.approx(ended.metrics["letters"] / 100)


async def test_an_executor_that_keeps_its_first_engine_in_a_server(vlm: Renderer) -> None:
    """Its episodes, at once and one after the other, are trained each on what was sampled in its own context."""
    served, stop, number = executor("served_executor"), vlm.tokenizer.eos_token_id, itertools.count(11)
    engine = ScriptedEngine(lambda request: Reply([next(number), stop]))

    async def one(i: int) -> Trajectory:
        limits = Limits(max_turns=2, max_new_tokens=8, max_len=200)
        return await run_episode(served, engine, vlm, Task(str(i), "1+2=?", label=i), limits=limits, seed=i)

    ended = [*await asyncio.gather(*(one(i) for i in range(4))), await one(4), *await asyncio.gather(one(5), one(6))]
    served.theirs.server.should_exit = True
    assert [episode.error for episode in ended] == [None] * 7 and len(engine.requests) == 14
    sampled: list[int] = []
    for i, episode in enumerate(ended):
        (row,) = episode.rows()
        prompt = vlm.tokenizer(f"{vlm.template.render([{'role': 'user', 'content': '1+2=?'}], ())} {i}").input_ids
        assert row.token_ids[: len(prompt)].tolist() == prompt and episode.total_reward == len(prompt) + 4
        sampled += [t for t in row.token_ids[row.loss_mask].tolist() if t != stop]
    assert sorted(sampled) == list(range(11, 25)), "every sampled token is trained once"
    assert not served._episodes.left and not served._episodes.open


async def test_what_episodes_have_sampled_is_forgotten_when_they_are_trained(vlm: Renderer) -> None:
    """However long another one is open."""
    agent: Any = executor("counting_agent")
    stop = vlm.tokenizer.eos_token_id
    with agent._episodes.playing(SimpleNamespace(calls=[], trained=[], asked=0)):
        for i in range(3):
            replies = [Reply([*vlm.tokenizer(text).input_ids, stop]) for text in ("1", "3")]
            ended = await run_episode(agent, ScriptedEngine(replies), vlm, Task(str(i), "1+2=?", label="3"))
            assert ended.error is None and len(ended.sampled) == 2
        assert not agent._episodes.left


async def test_a_call_that_comes_back_when_its_episode_is_over_is_not_lost(vlm: Renderer) -> None:
    """Nobody can tell by who asks which of two episodes a call is of: the second's goes through the first, which ends."""
    agent: Any = executor("counting_agent")
    asked, over = asyncio.Event(), asyncio.Event()

    class Late(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            if request.token_ids[0] == 6:
                asked.set()
                await over.wait()
            return await super().generate(request)

    async def execute(label: int, sampling_params: Any, llm_engine: Any) -> dict[str, Any]:
        await asyncio.sleep(0) if label == 6 else await asked.wait()
        call = asyncio.create_task(llm_engine.generate([label], sampling_params), context=Context())
        sampled = list((await call).outputs[0].token_ids)
        return {"observation_tokens": [label, *sampled], "action_ranges": [(1, 1 + len(sampled))], "reward": 1.0}

    agent.theirs, agent._takes = SimpleNamespace(execute=execute), {"label", "sampling_params", "llm_engine"}
    engine = Late(lambda request: Reply([7, vlm.tokenizer.eos_token_id]))
    first, second = (asyncio.create_task(run_episode(agent, engine, vlm, Task("", "a", label=i))) for i in (5, 6))
    ended = [await first]
    over.set()
    ended.append(await second)
    for episode in ended:
        assert episode.error is None and episode.rows()[0].loss_mask.sum() == 2, episode.error
    assert not agent._episodes.left and not agent._episodes.open


MANY_TURNS = """
import torch
from openrlhf.utils.agent import AgentInstanceBase
class AgentInstance(AgentInstanceBase):
    def __init__(self): self.turn = 0
    async def step(self, states, **kwargs):
        self.turn += 1
        return {"rewards": torch.tensor(REWARDS[self.turn - 1]), "environment_feedback": "x", "done": self.turn == len(REWARDS)}
"""


@pytest.mark.parametrize(
    ("rewards", "total"),
    [("[float('nan')]", None), ("[1.0, float('nan')]", None), ("[float('nan'), 1.0]", 1.0), ("[0.1] * 20", 2.0)],
)
async def test_an_agent_of_a_command_line_without_bounds_of_its_own(
    rewards: str, total: float | None, tmp_path: Path, vlm: Renderer
) -> None:
    """The converted limits leave room for the prompt and for every turn; NaN in the last step is no verdict."""
    (tmp_path / "agent.py").write_text(f"REWARDS = {rewards}\n{MANY_TURNS}")
    line = f"--actor.model_name_or_path m --data.prompt_dataset d --train.agent_func_path {tmp_path}/agent.py --data.max_len 128"
    config = Config.model_validate(convert(line.split()).nested())
    engine = ScriptedEngine(lambda request: Reply([7]))
    ended = await run_episode(make_executor(config), engine, vlm, Task("0", "1"), limits=episode_limits(config, None))
    assert ended.error is None, ended.error
    assert ended.total_reward == (total if total is None else pytest.approx(total)) and not ended.truncated
    assert ended.metrics == {}, "no prompt was cut"


async def test_single_turns_with_a_reward_file(vlm: Renderer) -> None:
    config = {"reward": {"name": [str(FILES / "reward.py")]}, "data": {"path": "x"}}
    stop = vlm.tokenizer.eos_token_id
    engine = ScriptedEngine([Reply([*vlm.tokenizer("13").input_ids, stop])])
    ended = await run_episode(make_executor(Config.model_validate(config)), engine, vlm, Task("0", "10+3=?", label=13))
    assert ended.error is None, ended.error
    assert ended.score == 1.0 and ended.metrics["stops"] == 1.0
    assert ended.total_reward == pytest.approx(len("13<|im_end|>") / 100)


ASKS = """
from openrlhf.utils.agent import SingleTurnAgentExecutor
class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__(["URL/broken", "URL/get_reward"])
"""


async def test_single_turns_with_a_reward_server_of_their_protocol(
    tmp_path: Path, vlm: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its two servers fails, and is asked again no sooner than the other."""
    monkeypatch.setattr("agentrl.openrlhf.agent.HTTP_WAIT_S", 0.0)
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json()))
        if request.path == "/broken":
            return web.Response(status=503)
        return web.json_response({"rewards": [0.5], "scores": [1.0], "extra_logs": {"judged": [2]}})

    app = web.Application()
    app.router.add_post("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    (tmp_path / "agent.py").write_text(ASKS.replace("URL", url))
    config = Config.model_validate({"agent": {"name": [str(tmp_path / "agent.py")]}, "data": {"path": "x"}})
    engine = ScriptedEngine([Reply([*vlm.tokenizer("13").input_ids, vlm.tokenizer.eos_token_id])])
    ended = await run_episode(make_executor(config), engine, vlm, Task("0", "10+3=?", label=13))
    await runner.cleanup()
    assert ended.error is None, ended.error
    assert (ended.total_reward, ended.score, ended.metrics["judged"]) == (0.5, 1.0, 2.0)
    assert [path for path, _ in asked] == ["/broken", "/get_reward"]
    prompt = vlm.template.render([{"role": "user", "content": "10+3=?"}], ())
    assert asked[1][1] == {"query": [f"{prompt}13<|im_end|>"], "prompts": [prompt], "labels": [13]}


MATH = """
from openrlhf.utils import extract_boxed_answer, grade_answer
from openrlhf.utils.math_utils import grade_answer as same
def reward_func(queries, prompts, labels, **kwargs):
    answers = [extract_boxed_answer(query[len(prompt):]) for query, prompt in zip(queries, prompts)]
    assert grade_answer is same
    return {"rewards": [float(grade_answer(answer, label)) for answer, label in zip(answers, labels)]}
"""


@pytest.mark.parametrize(
    ("said", "label", "reward"),
    [
        ("\\boxed{3} or \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("\\boxed{1,234}", 1234, 1.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{\\text{Blue} }", "blue", 1.0),
        ("\\boxed{9^{9^{9^9}}}", "9^{9^{9^8}}", 0.0),
        ("\\boxed{12}", "13", 0.0),
        ("12, and \\boxed{12", "12", 0.0),
    ],
)
async def test_a_reward_file_that_grades_mathematical_answers(
    said: str, label: Any, reward: float, tmp_path: Path
) -> None:
    (tmp_path / "math.py").write_text(MATH)
    assert await asyncio.to_thread(reward_function(str(tmp_path / "math.py")), f"Q {said}", "Q ", label) == {
        "reward": reward,
        "metrics": {},
    }


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("params.temperature = 0.1", "pass", "sampling_params.temperature changes the distribution"),
        ("params.top_p = 0.5", "pass", "sampling_params.top_p changes the distribution"),
        ("params.frequency_penalty = 0.5", "pass", "sampling_params.frequency_penalty changes the distribution"),
        ("params.bad_words = ['x']", "pass", "sampling_params.bad_words changes the distribution"),
        ("params.n = 2", "pass", "a call gives one sample"),
        ("pass", "ids[0] = 5", "other tokens than the engine sampled"),
        ("pass", "raise KeyError('state')", "raised KeyError"),
        ("time.sleep(3)", "pass", "took longer than"),
    ],
)
async def test_what_goes_wrong_is_said(before: str, after: str, message: str, tmp_path: Path, vlm: Renderer) -> None:
    (tmp_path / "agent.py").write_text(
        "import time\n"
        "from openrlhf.utils.agent import AgentExecutorBase\n"
        "class AgentExecutor(AgentExecutorBase):\n"
        "    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):\n"
        "        params, tokens = sampling_params, [1, 2]\n"
        f"        {before}\n"
        "        ids = list((await llm_engine.generate(tokens, params)).outputs[0].token_ids)\n"
        f"        {after}\n"
        "        return {'observation_tokens': tokens + ids, 'action_ranges': [(2, 2 + len(ids))], 'reward': 1.0}\n"
    )
    config = Config.model_validate({"agent": {"name": [str(tmp_path / "agent.py")]}, "data": {"path": "x"}})
    engine, limits = ScriptedEngine([Reply([7, 8])]), Limits(episode_timeout_s=1.0)
    ctx = RolloutContext(engine, vlm, Sampling(), limits, 0, env_loops=EnvLoops(0.2))
    ended = await play_episode(make_executor(config), Task("0", "a"), ctx)
    assert ended.error is not None and message in str(ended.error) and ended.total_reward is None


@pytest.mark.slow
async def test_an_agent_with_an_openai_server_of_its_own(vlm: Renderer) -> None:
    """Two turns over HTTP with vLLM's SamplingParams, whose text has no special tokens; several episodes at once. The server
    applies the chat template, so that the prompt comes without.
    """
    plain = Renderer(vlm.tokenizer, chat_template="none")
    served, stop = executor("openai_server"), vlm.tokenizer.eos_token_id
    engine = ScriptedEngine(lambda request: Reply([vlm.tokenizer("3").input_ids[0], stop]))
    limits = Limits(max_turns=2, max_new_tokens=8, max_len=400)
    played = [run_episode(served, engine, plain, Task(str(i), f"{i}+2=?", label=3), limits=limits) for i in range(3)]
    for i, episode in enumerate(await asyncio.gather(*played)):
        assert episode.error is None, episode.error
        (row,) = episode.rows()
        opening = vlm.template.render([{"role": "user", "content": f"{i}+2=?"}], ())
        assert vlm.text(row.token_ids, special=True).startswith(f"{opening}3<|im_end|>")
        assert row.token_ids[row.loss_mask].tolist() == [vlm.tokenizer("3").input_ids[0], stop] * 2
        assert episode.score == 1.0 and episode.metrics["letters"] == 1 and not episode.truncated
        turn = vlm.text(row.token_ids, special=True).partition("assistant\n3<|im_end|>\n")[2]
        assert turn.startswith("<|im_start|>user\nAgain.<|im_end|>")
    served.theirs.server.should_exit = True


TEXTS = """
from types import SimpleNamespace
from openrlhf.utils.agent import AgentExecutorBase
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        params = SimpleNamespace(max_tokens=8, temperature=1.0, **label)
        output = (await llm_engine.generate([1, 2], params)).outputs[0]
        self.text, ids = output.text, list(output.token_ids)
        return {"observation_tokens": [1, 2, *ids], "action_ranges": [(2, 2 + len(ids))], "reward": 1.0}
"""


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "<|im_start|>12ab<|im_end|>"),
        ({"skip_special_tokens": True}, "12ab"),
        ({"include_stop_str_in_output": False}, "<|im_start|>12ab"),
        ({"stop": ["2"]}, "<|im_start|>12"),
        ({"stop": "2", "include_stop_str_in_output": False, "skip_special_tokens": True}, "1"),
    ],
)
async def test_the_text_of_a_sample_is_what_the_sampling_parameters_say(
    params: dict[str, Any], text: str, tmp_path: Path, vlm: Renderer
) -> None:
    (tmp_path / "agent.py").write_text(TEXTS)
    config = Config.model_validate({"agent": {"name": [str(tmp_path / "agent.py")]}, "data": {"path": "x"}})
    agent: Any = make_executor(config)
    ids = vlm.tokenizer("<|im_start|>12ab<|im_end|>", add_special_tokens=False).input_ids
    ended = await run_episode(agent, ScriptedEngine([Reply(ids)]), vlm, Task("0", "a", label=params))
    assert ended.error is None, ended.error
    assert agent.theirs.text == text and ended.rows()[0].token_ids[2:].tolist() == ids, "what is trained is whole"


LATE = """
import importlib, threading
from elsewhere_in_a_test import helped
def reward_func(queries, prompts, labels):
    from openrlhf.utils import extract_boxed_answer
    found = []
    thread = threading.Thread(target=lambda: found.append(importlib.import_module("openrlhf.utils.math_utils")))
    thread.start()
    thread.join()
    assert found[0].extract_boxed_answer is extract_boxed_answer and helped("\\\\boxed{4}") == "4"
    return {"rewards": [float(extract_boxed_answer(queries[0]) == labels[0])]}
class AgentExecutor:
    def __init__(self):
        from openrlhf.utils.agent import SingleTurnAgentExecutor
        self.inner = SingleTurnAgentExecutor(__file__)
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        from openrlhf.utils.logging_utils import init_logger
        init_logger("late").debug("asked")
        return await self.inner.execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
"""
ELSEWHERE = """
def helped(text):
    from openrlhf.utils.math_utils import extract_boxed_answer
    return extract_boxed_answer(text)
"""


def is_there() -> bool:
    """Whether code that is of no such file finds openrlhf."""
    if importlib.util.find_spec("openrlhf") is not None:
        return True
    try:
        importlib.import_module("openrlhf.utils.agent")
    except ImportError:
        return False
    return True


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]


@pytest.fixture
def nobody_imported_it() -> Iterator[None]:
    """Before and after, sys.modules has no openrlhf of another test."""
    _forget()
    yield
    _forget()


@pytest.mark.usefixtures("nobody_imported_it")
async def test_functions_import_what_the_file_could(
    tmp_path: Path, vlm: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports inside functions, of threads and of modules that they call; to others openrlhf is not there."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere_in_a_test.py").write_text(ELSEWHERE)
    (tmp_path / "late.py").write_text(LATE)
    reward = reward_function(str(tmp_path / "late.py"))
    assert not is_there()
    assert reward("Q \\boxed{3}", "Q ", "3")["reward"] == 1.0
    config = Config.model_validate({"agent": {"name": [str(tmp_path / "late.py")]}, "data": {"path": "x"}})
    engine = ScriptedEngine([Reply([*vlm.tokenizer("\\boxed{3}").input_ids, vlm.tokenizer.eos_token_id])])
    ended = await run_episode(make_executor(config), engine, vlm, Task("0", "a", label="3"))
    assert ended.error is None and ended.total_reward == 1.0, ended.error


@pytest.mark.usefixtures("nobody_imported_it")
async def test_an_installed_openrlhf_is_the_one_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor("counting_agent")
    (tmp_path / "openrlhf" / "utils").mkdir(parents=True)
    (tmp_path / "openrlhf" / "__init__.py").write_text("")
    (tmp_path / "openrlhf" / "utils" / "__init__.py").write_text("def extract_boxed_answer(text): return 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = "    from openrlhf.utils import extract_boxed_answer as e\n    return float(e('x') == 'theirs')\n"
    (tmp_path / "real.py").write_text(f"def reward_func(queries, prompts, labels):\n{said}")
    assert reward_function(str(tmp_path / "real.py"))("Q", "Q", "")["reward"] == 1.0
    (tmp_path / "more.py").write_text("from openrlhf.utils.math_utils import grade_answer\n")
    with pytest.raises(ConfigError, match=r"No module named 'openrlhf.utils.math_utils'"):
        reward_function(str(tmp_path / "more.py"))
    _forget()
    (tmp_path / "openrlhf").rename(tmp_path / "moved")
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "more.py").write_text(
        "from openrlhf.utils.math_utils import grade_answer\nreward_func = grade_answer\n"
    )
    assert reward_function(str(tmp_path / "more.py")), "a folder that happens to have the name is no package"


@pytest.mark.usefixtures("nobody_imported_it")
def test_the_stand_in_is_not_left_in_sys_modules(tmp_path: Path) -> None:
    executor("counting_agent")
    assert not any(name.partition(".")[0] == "openrlhf" for name in sys.modules)
    (tmp_path / "other.py").write_text("def f(completion):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"defines no reward_func: name its function, as in .*other.py:NAME"):
        make_reward(str(tmp_path / "other.py"), None)
    config = Config.model_validate({"agent": {"name": [str(tmp_path / "other.py")]}, "data": {"path": "x"}})
    with pytest.raises(ConfigError, match="defines neither AgentExecutor nor AgentInstance"):
        make_executor(config)
    (tmp_path / "ours.py").write_text(
        "from agentrl import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase):\n"
        "    async def execute(self, task, ctx): return None\n"
    )
    config = Config.model_validate({"agent": {"name": [str(tmp_path / "ours.py")]}, "data": {"path": "x"}})
    assert type(make_executor(config)).__name__ == "AgentExecutor", "one of our own is taken as it is"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_file_is_trained_on_a_real_engine(tmp_path: Path) -> None:
    """One run, one engine: a text agent, an image agent, an executor of its own, one with an OpenAI server, a reward file."""
    import subprocess

    names = ("counting_agent", "picture_agent", "own_executor", "openai_server", "reward")
    rows = [{"input": "3+4", "label": {"file": name, "answer": 7}} for name in names]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from agentrl.trainers.tiny import make_tiny

    model = str(make_tiny("tiny-vlm", tmp_path / "model", max_steps=0))
    command = [str(Path(sys.executable).with_name("agentrl")), "train", "--agent", str(FILES / "all_of_them.py")]
    data = ["--data.path", str(tmp_path / "rows.jsonl"), "--data.label-key", "label", "--model", model]
    sizes = [
        "--train.batch-groups",
        "5",
        "--rollout.n-samples",
        "4",
        "--train.steps",
        "2",
        "--train.max-staleness",
        "0",
    ]
    limits = ["--rollout.max-new-tokens", "12", "--rollout.max-len", "256", "--rollout.max-turns", "3"]
    where = ["--run.dir", str(tmp_path), "--run.name", "run"]
    done = subprocess.run([*command, *data, *sizes, *limits, *where], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["mismatch/max_abs"] < 1e-4 and record["policy/grad_norm"] > 0 for record in records)
    lines = [json.loads(line) for file in (tmp_path / "run" / "rollouts").iterdir() for line in file.open()]
    assert len(lines) == 40 and all(line["outcome"] == "trained" and line["error"] is None for line in lines), lines[0]
    for name in names:
        mine = [line for line in lines if line["metrics"].get(name)]
        assert len(mine) == 8 and all(line["total_reward"] is not None for line in mine)
    assert any(row["images"] for line in lines for row in line["rows"])
