"""A language model as a judge: cache, budget, retries, and no verdict where it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrl.agent_server.http import Bounds, bearer, make_app
from fastapi import Request
from fastapi.responses import JSONResponse

from agentrl import ConfigError
from agentrl.assemble import make_reward
from agentrl.judge import Answers, read_judge

from ..background import background

JUDGE = """
model = "judge-1"
prompt = "Q: {prompt} Right: {label} A: {completion}. Say Score: N"
pattern = 'Score: (\\S+)'
"""


class Served:
    """A chat API that gives `answers` in turn, the last one for ever; an int is the status of an error."""

    def __init__(self) -> None:
        self.answers: list[str | int] = ["Score: 3 no, Score: 5"]
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.app = make_app("judge", authorize=bearer(None), bounds=Bounds())

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> JSONResponse:
            self.asked.append({**await request.json(), "key": request.headers.get("authorization")})
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            await asyncio.sleep(0.05)
            if isinstance(answer, int):
                return JSONResponse({"error": {"message": "busy"}}, answer, headers=self.headers)
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": answer}}]})


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    with background(served.app) as address:
        yield f"{address}/v1"


@pytest.fixture
def judge(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """judge("max_calls = 3"): the reward function of a file with these lines more."""
    monkeypatch.setattr("agentrl.judge.BACKOFF_S", 0.01)

    def make(*lines: str) -> Any:
        path = tmp_path / "judge.toml"
        path.write_text("\n".join([f'url = "{url}"', JUDGE, *lines]))
        return make_reward(str(path), None)

    return make


async def test_equal_questions_are_one_call_now_and_later(
    judge: Callable[..., Any], served: Served, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    ask = judge(f'token_file = "{tmp_path / "key"}"', 'system = "Be fair."')
    chat = [{"role": "user", "content": "1+1"}]
    verdicts = await asyncio.gather(*(ask(prompt=chat, completion="{label}", label=2) for _ in range(4)))
    assert [verdict["reward"] for verdict in verdicts] == [0.5] * 4 and len(served.asked) == 1
    assert served.asked[0]["messages"][1]["content"] == "Q: user: 1+1 Right: 2 A: {label}. Say Score: N"
    assert served.asked[0]["key"] == "Bearer secret" and served.asked[0]["model"] == "judge-1"
    again = judge('system = "Be fair."')
    assert (await again(prompt=chat, completion="{label}", label=2))["metrics"] == {
        "judge/cached": 1.0,
        "judge/failed": 0.0,
    }
    await again(prompt=chat, completion="other", label=2)
    assert len(served.asked) == 2


async def test_what_may_pass_is_asked_again_and_what_fails_is_no_verdict(
    judge: Callable[..., Any], served: Served, tmp_path: Path
) -> None:
    ask = judge("retries = 2")
    served.answers = [503, 429, "Score: 10"]
    assert (await ask(prompt="a", completion="a", label=None))["reward"] == 1.0
    served.answers = [500]
    found = await ask(prompt="b", completion="b", label=None)
    assert found["reward"] is None and found["metrics"]["judge/failed"] == 1.0 and len(served.asked) == 6
    served.answers = [400]
    assert (await ask(prompt="b", completion="b", label=None))["reward"] is None and len(served.asked) == 7
    for answer in ("I cannot tell.", "Score: eleven", "Score: 11", "Score: nan"):
        served.answers = [answer]
        assert (await ask(prompt=answer, completion="c", label=None))["reward"] is None
    served.answers = ["Score: 0"]
    assert (await ask(prompt="b", completion="b", label=None))["reward"] == 0.0, "a failure is not kept"


async def test_a_busy_server_is_given_the_time_that_it_asks_for(
    judge: Callable[..., Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.0)

    ask = judge("retries = 4")
    served.answers, served.headers = [429, 529, "Score: 10"], {"Retry-After": "7"}
    monkeypatch.setattr("agentrl.judge.asyncio.sleep", noted)
    assert (await ask(prompt="a", completion="a", label=None))["reward"] == 1.0
    assert [seconds for seconds in pauses if seconds > 1] == [7.0, 7.0]


async def test_an_answer_that_cannot_be_read_counts_each_time(judge: Callable[..., Any], served: Served) -> None:
    """The same question at temperature 0 would be answered the same; above it is asked again."""
    served.answers = ["I cannot tell."]
    for temperature, asked in ((0.0, 1), (0.7, 3)):
        ask, before = judge(f"temperature = {temperature}"), len(served.asked)
        for i in range(3):
            found = await ask(prompt="a", completion="a", label=None)
            assert found["reward"] is None
            cached = float(i > 0 and not temperature)
            assert found["metrics"] == {"judge/cached": cached, "judge/failed": 1.0}
        assert len(served.asked) == before + asked
    served.answers = ["Score: 10"]
    assert (await ask(prompt="a", completion="a", label=None))["reward"] == 1.0


async def test_over_budget_there_is_no_verdict_and_no_call(judge: Callable[..., Any], served: Served) -> None:
    ask = judge("max_calls = 2")
    rewards = [(await ask(prompt=str(i), completion="x", label=None))["reward"] for i in range(4)]
    assert rewards == [0.5, 0.5, None, None] and len(served.asked) == 2
    assert (await ask(prompt="0", completion="x", label=None))["reward"] == 0.5, "what was paid for stays"


def test_workers_share_one_count(tmp_path: Path) -> None:
    many = [Answers(tmp_path / "a.sqlite", 5) for _ in range(3)]
    assert sum(answers.pay() for _ in range(4) for answers in many) == 5
    many[0].put("k", "v")
    assert many[1].get("k") == "v" and many[1].get("other") is None


def test_an_address_with_a_password_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "judge.toml"
    path.write_text(f'url = "http://bob:hunter2@h/v1"\n{JUDGE}')
    with pytest.raises(ConfigError, match="no name or password in url") as raised:
        read_judge(str(path))
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('pattern = "x"', "it has none"),
        ("low = 10.0", "low 10 must be below high 10"),
        ('modle = "x"', "no option modle. Did you mean model"),
        ('pattern = "("', "no regular expression"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "judge.toml"
    kept = "\n".join(line for line in JUDGE.splitlines() if line.split(" = ")[0] not in lines)
    path.write_text(f'url = "http://h/v1"\n{kept}\n{lines}')
    with pytest.raises(ConfigError, match=said):
        read_judge(str(path))
    with pytest.raises(ConfigError, match=r"--reward no\.toml: there is no such file"):
        read_judge("no.toml")
