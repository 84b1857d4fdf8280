"""`agentrl serve policy` on real vLLM, as a process: what it answers, and that it ends whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
AGENTRL = str(Path(sys.executable).with_name("agentrl"))
HI: Any = [{"role": "user", "content": "hi"}]


@dataclass
class Server:
    """A running command; stdout and stderr go to one file."""

    process: subprocess.Popen[bytes]
    log: Path

    def until(self, found: Any) -> Any:
        """What `found` returns, once it is something."""
        while not (value := found()):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return value

    def url(self) -> str:
        line = self.until(lambda: [line for line in self.log.read_text().splitlines() if "listening on" in line])[0]
        return line.split()[-1]

    def core(self) -> psutil.Process:
        """vLLM's process."""
        return self.until(lambda: [p for p in self.family() if "EngineCore" in p.name()])[0]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    from agentrl.trainers.tiny import make_tiny

    model = make_tiny("tiny-text", tmp_path / "tiny", max_steps=0)
    log = tmp_path / "log"
    command = [AGENTRL, "serve", "policy", "--port", "0", "--model", str(model), "--max-len", "512"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    yield Server(process, log)
    if process.poll() is None:
        process.kill()
        process.wait()


def test_it_answers_and_ends_when_its_engine_dies(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    replies = [
        client.chat.completions.create(model="m", messages=HI, max_tokens=5, seed=3, logprobs=True) for _ in range(2)
    ]
    said = [(reply.choices[0].message.content, reply.usage.completion_tokens) for reply in replies]  # type: ignore[union-attr]
    assert said[0] == said[1] and 0 < said[0][1] <= 5
    content = replies[0].choices[0].logprobs.content  # type: ignore[union-attr]
    assert content and len(content) == said[0][1] and all(entry.logprob <= 0 for entry in content)
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    formed = client.chat.completions.create(model="m", messages=HI, max_tokens=400, response_format=form, temperature=0)
    assert formed.choices[0].finish_reason == "stop"
    assert json.loads(formed.choices[0].message.content or "") == {"a": 7}
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        form["json_schema"]["schema"] = {"type": "nonsense"}
        client.chat.completions.create(model="m", messages=HI, max_tokens=9, response_format=form)
    server.core().kill()
    assert server.process.wait(60) == 1
    assert "agentrl: the engine cannot go on: the engine process is gone" in server.log.read_text()


def test_an_interrupt_while_the_model_loads_ends_it(server: Server) -> None:
    """Ctrl-C goes to all processes of a terminal."""
    core = server.core()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(60) == 130
    assert server.log.read_text().startswith("agentrl: Interrupted.\n") and "Traceback" not in server.log.read_text()
    _, alive = psutil.wait_procs([core], timeout=30)
    assert not alive


def test_an_interrupt_ends_it_without_noise(server: Server) -> None:
    server.url()
    family = server.family()
    assert len(family) > 1
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(60) == 130
    assert server.log.read_text().splitlines()[2:] == ["agentrl: Interrupted."]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_a_kill_leaves_nothing(server: Server) -> None:
    server.url()
    family = server.family()
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
