"""What each server says of itself, and what it does with bodies made from that: answers below 500, in time."""

from __future__ import annotations

import json
import runpy
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from agentrl.agent_server import agent_app
from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.policy_app import policy_app
from agentrl.agent_server.policy_desk import RolloutDesk
from agentrl.agent_server.reward_app import reward_app
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from agentrl import Task
from agentrl.policy_session import PolicySession

from ..background import background
from .test_fuzz import Still, rollout_desk

ROOT = Path(__file__).resolve().parents[2]
EACH = 12
ENOUGH_S = 20


class OneRollout(RolloutDesk):
    """Whatever the key, it is that of one rollout, which goes on."""

    def __init__(self, desk: RolloutDesk, key: str) -> None:
        super().__init__(desk.model, desk.max_len, desk.renderer)
        self._rollout = desk, {b"x-api-key": key.encode()}

    def admits(self, headers: Any) -> bool:
        return True

    def find(self, headers: Any) -> PolicySession:
        desk, key = self._rollout
        session = desk.find(key)
        session.ended = session.over = False
        return session


def policy() -> Any:
    return policy_app(OneRollout(*rollout_desk()))


async def agent(task: Task, client: Any) -> float:
    return 1.0


SERVERS = {
    "env": lambda: env_app({"still": Still}),
    "policy": policy,
    "reward": lambda: reward_app(lambda completions: [0.0] * len(completions)),
    "agent": lambda: agent_app(agent),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_bodies_made_from_the_description_are_answered(name: str) -> None:
    """Names in paths are random, and then those of what is there."""
    with background(SERVERS[name]()) as url, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        known = _known(name, url)
        seen: set[tuple[str, int]] = set()
        for found in schema.get_all_operations():
            operation = found.ok()
            there = {part: value for part, value in known.items() if f"{{{part}}}" in operation.path}
            for mode in GenerationMode:
                _try(operation.as_strategy(generation_mode=mode), operation.path, seen)
            if there:
                _try(operation.as_strategy(path_parameters=there), operation.path, seen)
        assert requests.get(f"{url}/health", timeout=ENOUGH_S).text == "ok"
    assert 200 in {status for _, status in seen} and any(400 <= status < 500 for _, status in seen)
    assert name != "policy" or ("/v1/rollouts/self/reward", 200) in seen


def _known(name: str, url: str) -> dict[str, str]:
    """The names of what is there; the rollout has then had a reply, which rewards are for."""
    if name == "policy":
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert requests.post(f"{url}/v1/chat/completions", json=body, timeout=ENOUGH_S).status_code == 200
    if name != "env":
        return {}
    opened = requests.post(f"{url}/v1/sessions", json={"env": "still"}, timeout=ENOUGH_S).json()
    return {"name": "still", "session_id": opened["session_id"]}


def _try(cases: Any, path: str, seen: set[tuple[str, int]]) -> None:
    few = settings(
        max_examples=EACH,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )

    @few
    @given(case=cases)
    def answered(case: Any) -> None:
        response = case.call(timeout=ENOUGH_S)
        seen.add((path, response.status_code))
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400:
            assert json.loads(response.text)["error"], response.text

    with suppress(Unsatisfiable):  # an operation that takes nothing can be asked nothing wrong
        answered()


def test_the_pages_of_the_documentation_are_what_the_servers_say() -> None:
    pages = dict(runpy.run_path(str(ROOT / "scripts" / "openapi_pages.py"))["pages"]())
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "openapi").iterdir()}
    assert written == pages, "run scripts/openapi_pages.py"
    assert "`POST /v1/sessions/{session_id}/step`" in pages["env.md"] and "- `index`: integer" in pages["env.md"]
    assert "- 202: [EpisodeReply](#episodereply), still running" in pages["agent.md"]
