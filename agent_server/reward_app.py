"""The reward server's routes: `POST /v1/reward`, and OpenRLHF's `POST /get_reward`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import Counter
from starlette.responses import Response

from agentrl.errors import AgentRLError, DataError
from agentrl.reward import Verdict
from agentrl.schemas import GetRewardRequest, RewardReply, RewardRequest
from agentrl.wire import read_plain

from .http import ERRORS, ApiError, Bounds, as_api_error, bearer, described_body, json_response, make_app, read_body
from .reward_judge import Item, Judge

TEXTS = Bounds(body=16 * 2**20)
"""No pictures travel here."""


def reward_app(
    function: Callable[..., Any],
    *,
    token: str | None = None,
    timeout_s: float = 60.0,
    max_batch: int = 64,
    bounds: Bounds = TEXTS,
) -> FastAPI:
    """An app that serves a reward function, as `--reward` takes it or one that takes lists. Raises ConfigError."""
    name = getattr(function, "__name__", type(function).__name__)
    app = make_app("agentrl reward server", authorize=bearer(token), bounds=bounds)
    judge = Judge(function, name, timeout_s, max_batch)
    registry = app.state.registry
    judged = Counter("agentrl_rewards", "Completions judged", registry=registry)
    batches = Counter("agentrl_reward_batches", "Calls of the reward function", registry=registry)
    counted = 0

    async def verdicts(items: list[Item]) -> list[Verdict]:
        nonlocal counted
        try:
            found = await judge.judge(items)
        except AgentRLError as error:
            raise as_api_error(error) from error
        judged.inc(len(items))
        batches.inc(judge.calls - counted)
        counted = judge.calls
        return found

    own, other = described_body(app, RewardRequest), described_body(app, GetRewardRequest)

    @app.post("/v1/reward", responses={200: {"model": RewardReply}, **ERRORS}, openapi_extra=own)
    async def reward(request: Request) -> Response:
        asked = await read_body(request, RewardRequest)
        found = await verdicts(_items(asked.prompts, asked.completions, _labels(asked.labels)))
        return json_response(
            {
                "rewards": [verdict.reward for verdict in found],
                "scores": [verdict.score for verdict in found],
                "metrics": [dict(verdict.metrics) for verdict in found],
            }
        )

    @app.post("/get_reward", responses=ERRORS, openapi_extra=other)
    async def get_reward(request: Request) -> Response:
        """OpenRLHF's form: a query is a prompt with its completion."""
        asked = await read_body(request, GetRewardRequest)
        prompts = asked.prompts or [""] * len(asked.query)
        whole = _items(prompts, asked.query, asked.labels)
        found = await verdicts(
            [
                replace(item, completion=_completion(item.completion, item.prompt), query=item.completion)
                for item in whole
            ]
        )
        return json_response({"rewards": [v.reward for v in found], "scores": [_score(v) for v in found]})

    return app


def _items(prompts: list[Any], completions: list[str], labels: list[Any] | None) -> list[Item]:
    labels = labels if labels is not None else [None] * len(completions)
    if not len(prompts) == len(completions) == len(labels):
        sizes = f"{len(prompts)} prompts, {len(completions)} completions, {len(labels)} labels"
        raise ApiError(422, f"the lists must have one length: {sizes}", kind="Invalid")
    return [Item(*given) for given in zip(prompts, completions, labels, strict=True)]


def _labels(forms: list[Any] | None) -> list[Any] | None:
    try:
        return None if forms is None else [read_plain(form) for form in forms]
    except DataError as error:
        raise as_api_error(error) from error


def _score(verdict: Verdict) -> float | None:
    return verdict.reward if verdict.score is None else verdict.score


def _completion(query: str, prompt: Any) -> str:
    return query[len(prompt) :] if isinstance(prompt, str) and query.startswith(prompt) else query
