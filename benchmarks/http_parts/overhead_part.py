"""What a request to the policy server takes beyond the engine's own call: the same engine asked directly and over HTTP, in turns.

The clients over HTTP are a process of their own; their share of a request is in the overhead.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import aiohttp
from agentrl.agent_server.listen import bind, listening
from agentrl.agent_server.policy_app import policy_app
from agentrl.agent_server.policy_desk import OpenDesk

from agentrl import (
    GenerationRequest,
    Limits,
    Renderer,
    Reply,
    RolloutContext,
    Sampling,
    ScriptedEngine,
    Task,
    Trajectory,
)
from agentrl.assemble import make_renderer
from agentrl.config import Config
from agentrl.engine import Engine
from agentrl.policy_session import PolicySession

from .loads import ROUNDS
from .policy_part import ASKED, REPLY_TOKENS, tokens_per_s

CLIENTS = (1, 32)
LENGTH = 1024
SAMPLING = Sampling(max_new_tokens=REPLY_TOKENS)


async def measure(seconds: float, model: str) -> dict[str, Any]:
    renderer = make_renderer(Config(), model)
    ids = tuple(renderer.tokenizer("17 + 25 is 42.<|im_end|>", add_special_tokens=False).input_ids)
    found = {"scripted": await _beside(ScriptedEngine(lambda request: Reply(ids), record=False), renderer, seconds)}
    import ray

    from agentrl.engines.vllm_actor import start_engine
    from agentrl.engines.vllm_options import VLLMOptions

    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    options = VLLMOptions(model=model, max_model_len=LENGTH, max_num_seqs=32, kv_cache_gb=0.25, start_timeout_s=300.0)
    engine = await start_engine(replace(options, stop_token_ids=renderer.stop_ids))
    try:
        found["vllm"] = await _beside(engine, renderer, seconds)
    finally:
        await engine.close()
        ray.shutdown()
    return found


async def _beside(engine: Engine, renderer: Renderer, seconds: float) -> list[dict[str, Any]]:
    """The median of ROUNDS rounds at each number of clients."""
    limits = Limits(max_turns=128, max_new_tokens=LENGTH, max_len=LENGTH)

    def fresh() -> PolicySession:
        ctx = RolloutContext(engine, renderer, SAMPLING, limits, seed=0, training=False)
        return PolicySession(ctx, Trajectory(Task("request")), sampling="free")

    app = policy_app(OpenDesk("policy", LENGTH, renderer, fresh))
    loop, found = asyncio.get_running_loop(), []
    context = multiprocessing.get_context("spawn")
    async with listening(app, bind("127.0.0.1", 0), "off") as url:
        with ProcessPoolExecutor(1, mp_context=context) as elsewhere:
            for clients in CLIENTS:
                await loop.run_in_executor(elsewhere, over_http, url, clients, seconds / 4)
                rounds = []
                for _ in range(ROUNDS):
                    direct = await _direct(engine, renderer, clients, seconds)
                    rounds.append((direct, await loop.run_in_executor(elsewhere, over_http, url, clients, seconds)))
                found.append(_summary(type(engine).__name__, clients, rounds))
    return found


def _summary(engine: str, clients: int, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    """Rates in requests/s; the overhead is what a request takes longer, in ms of the server's and its clients' time."""
    direct, http = (statistics.median(side) for side in zip(*rounds, strict=True))
    overhead = statistics.median(1e3 * (1 / over - 1 / bare) for bare, over in rounds)
    print(
        f"{engine} {clients:>3} clients: direct {direct:.0f}/s, over HTTP {http:.0f}/s, overhead {overhead:.2f} ms a request"
    )
    return {
        "clients": clients,
        "direct_requests_per_s": round(direct, 1),
        "http_requests_per_s": round(http, 1),
        "overhead_ms": round(overhead, 3),
    }


async def _direct(engine: Engine, renderer: Renderer, clients: int, seconds: float) -> float:
    """Requests per second of callers in this process, the same tokens under seeds of their own."""
    prompt = renderer.start(ASKED).token_ids
    names, done, end = itertools.count(), 0, time.perf_counter() + seconds
    began = time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            number = next(names)
            request = GenerationRequest(prompt, replace(SAMPLING, seed=number), request_id=f"direct-{number}")
            await engine.generate(request)
            done += 1

    await asyncio.gather(*(caller() for _ in range(clients)))
    return done / (time.perf_counter() - began)


def over_http(url: str, clients: int, seconds: float) -> float:
    """Requests per second of clients in a process of their own."""

    async def load() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            return (await tokens_per_s(http, url, "policy", clients, seconds))["requests_per_s"]

    return asyncio.run(load())
