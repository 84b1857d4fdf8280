"""The policy server on a real engine beside vLLM's own OpenAI server with the same model. Both run in processes of their own
and are asked by unmodified SDK clients' HTTP.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

POLICY_ROUNDS = 7
AT_ONCE = 32
REPLY_TOKENS = 64
ASKED = [{"role": "user", "content": "what is 17 + 25? think first, then answer with one number."}]
START_S = 300.0
OURS = "import sys; from agentrl.cli.main import run; sys.exit(run(sys.argv[1:]))"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""As ours; with two, which its engine takes by itself here, vLLM's server is slower as often as not."""
EVERYWHERE = """
from agentrl.torchvision_ops import ensure_torchvision_imports
ensure_torchvision_imports()
"""
"""Run by every process of vLLM's server, as a torchvision that was built for CUDA does not import beside a CPU torch."""


@asynccontextmanager
async def process(command: list[str], port: int) -> AsyncIterator[str]:
    """A server, once it answers; its URL. What it says goes to a file, which is shown when it does not start."""
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **ONE_THREAD}
    with tempfile.TemporaryDirectory() as site, tempfile.TemporaryFile() as log:
        (Path(site) / "sitecustomize.py").write_text(EVERYWHERE if "vllm" in command[1] else "")
        environment["PYTHONPATH"] = site
        running = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            async with aiohttp.ClientSession() as http:
                deadline = time.monotonic() + START_S
                while not await _answers(http, url):
                    if running.returncode is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise SystemExit(f"{command[0]} did not start:\n{log.read().decode()[-3000:]}")
                    await asyncio.sleep(0.5)
            yield url
        finally:
            await _end(running)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/v1/models") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _end(running: asyncio.subprocess.Process) -> None:
    """The server and the processes that it started."""
    if running.returncode is not None:
        return
    children = psutil.Process(running.pid).children(recursive=True)
    running.terminate()
    try:
        await asyncio.wait_for(running.wait(), 60)
    finally:
        for child in children:
            if child.is_running():
                child.kill()


async def tokens_per_s(
    http: aiohttp.ClientSession, url: str, model: str, clients: int, seconds: float
) -> dict[str, float]:
    """What `clients` sample that ask again as soon as they are answered."""
    body = {"model": model, "messages": ASKED, "max_tokens": REPLY_TOKENS, "temperature": 1.0}
    requests = tokens = 0
    began = time.perf_counter()

    async def client() -> None:
        nonlocal requests, tokens
        while time.perf_counter() - began < seconds:
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                reply = await response.json()
                assert response.status == 200, reply
            requests += 1
            tokens += reply["usage"]["completion_tokens"]

    await asyncio.gather(*(client() for _ in range(clients)))
    passed = time.perf_counter() - began
    return {"requests_per_s": requests / passed, "tokens_per_s": tokens / passed}


async def measure(seconds: float, model: str) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        return {"beside_vllm": await _beside(http, seconds, model)}


async def _beside(http: aiohttp.ClientSession, seconds: float, model: str) -> dict[str, Any]:
    """Both servers are up at once and asked in turns; each has an engine of its own."""
    length = "1024"
    ours = ["-c", OURS, "serve", "policy", "--model", model, "--max-len", length, "--port", "18231"]
    theirs = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--max-model-len",
        length,
        "--port",
        "18232",
        "--enforce-eager",
    ]
    theirs += ["--dtype", "float32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", length]
    async with process(ours, 18231) as one, process(theirs, 18232) as other:
        names = Path(model).name, model
        rounds = []
        for _ in range(POLICY_ROUNDS + 1):
            pair = [
                await tokens_per_s(http, url, name, AT_ONCE, seconds)
                for url, name in zip((one, other), names, strict=True)
            ]
            rounds.append(pair)
    rounds = rounds[1:]
    rates = [[pair[side]["tokens_per_s"] for pair in rounds] for side in (0, 1)]
    ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
    result = {
        "clients": AT_ONCE,
        "tokens_per_s": round(statistics.median(rates[0])),
        "vllm_tokens_per_s": round(statistics.median(rates[1])),
        "ratio": round(ratio, 3),
    }
    print(
        f"policy   {AT_ONCE:>5} clients: {result['tokens_per_s']} tokens/s, vLLM's {result['vllm_tokens_per_s']}, "
        f"ratio {ratio:.2f}"
    )
    return result
