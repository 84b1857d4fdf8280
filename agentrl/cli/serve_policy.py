"""`agentrl serve policy`: a model behind the APIs of OpenAI and Anthropic, on the engine that it was trained with."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..assemble import make_renderer
from ..config import Config, EngineSection, ModelSection, RolloutSection
from ..config.checks import check_engine
from ..config.load import parse_command
from ..config.section import Section
from ..engine import Engine, Limits, Sampling
from ..engines.vllm_names import check_vllm_names
from ..env import Task
from ..errors import EngineError
from ..executor import RolloutContext
from ..model_folder import max_positions, model_config
from ..policy_session import PolicySession
from ..preflight import EnvFacts, Ready
from ..renderer import Renderer
from ..tokens import read_token
from ..trajectory import Trajectory
from .console import out
from .exits import DONE
from .playing import Hidden, engine_here, in_process, run_until_signal
from .policy import choose_model, tiny_kind, untrained_tiny
from .signals import cancelled_at_once

if TYPE_CHECKING:
    from fastapi import FastAPI

DESCRIPTION = "Serve a model as OpenAI and Anthropic do: chat completions, responses, messages."
MOST_SAMPLES = 128
HEALTH_S = 2.0
"""Between two looks at the engine."""


class ServedEngine(EngineSection):
    """The inference engine."""

    count: Annotated[int, Hidden] = 1
    colocated: Annotated[bool, Hidden] = False
    model: Annotated[str | None, Hidden] = None
    token_file: Annotated[str | None, Hidden] = None
    transport: Annotated[Literal["auto", "shm", "nccl", "ipc"], Hidden] = "auto"
    update_timeout_s: Annotated[float, Hidden] = 300.0
    max_restarts: Annotated[int, Hidden] = 8


class ServePolicyCommand(Section):
    model: ModelSection = ModelSection()
    engine: ServedEngine = ServedEngine()
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a token."""
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free one."""
    token_file: str | None = None
    """File with the token that clients send as their API key."""
    max_body_mb: float = Field(64.0, gt=0)
    """Largest request, in MiB."""
    max_len: int | None = Field(None, ge=2)
    """Longest conversation with its reply, in tokens; absent: what the model was made for, at most 32768."""
    name: str | None = None
    """What the model is called; absent: the name of its folder."""
    debug: bool = False
    """Show stack traces."""


LONGEST = 32768


def main(argv: list[str]) -> int:
    """The exit code of `agentrl serve policy ARGV`. SIGINT and SIGTERM come out as KeyboardInterrupt."""
    from agentrl.agent_server.listen import bind, check_bind, url_of

    command = parse_command(ServePolicyCommand, argv, prog="agentrl serve policy", description=DESCRIPTION)
    logging.basicConfig(level=logging.DEBUG if command.debug else logging.ERROR)
    config = Config(
        model=command.model, engine=command.engine, parallel=Config().parallel.model_copy(update={"gpus": 0.0})
    )
    check_engine(config, ("vllm", "scripted", "random"))
    check_vllm_names(config)
    token = read_token(command.token_file, "--token-file")
    check_bind(command.host, token)
    with ExitStack() as session:
        listener = session.enter_context(bind(command.host, command.port))
        gpus = 0 if in_process(config) else _gpus()
        ready = _ready(command, config, gpus)
        run_until_signal(_serve(command, ready, gpus, token, listener, url_of(listener)))
    return DONE


def _gpus() -> int:
    """Of this machine, as far as this process may use them."""
    import torch

    return torch.cuda.device_count()


def _ready(command: ServePolicyCommand, config: Config, gpus: int) -> Ready:
    """The model and its limits, before anything loads."""
    if in_process(config) and config.model.path is None:
        path = untrained_tiny(tiny_kind(False))
    else:
        path = choose_model(config, False, gpus, weights=not in_process(config))
    longest = min(max_positions(model_config(path)) or LONGEST, LONGEST)
    length = longest if command.max_len is None else command.max_len
    limits = Limits(
        max_turns=MOST_SAMPLES, max_new_tokens=length, max_len=length, max_total_tokens=length * MOST_SAMPLES
    )
    rollout = RolloutSection(max_len=length)
    renderer = make_renderer(config, path)
    stop_ids = tuple(sorted({*renderer.stop_ids, *renderer.placeholder_ids}))
    whole = config.model_copy(update={"rollout": rollout})
    return Ready(whole, path, {}, (), EnvFacts(None, max_turns=None), limits, stop_ids)


async def _serve(
    command: ServePolicyCommand, ready: Ready, gpus: int, token: str | None, listener: Any, url: str
) -> None:
    """Until the engine fails. Raises EngineError."""
    from agentrl.agent_server.listen import listening

    renderer = make_renderer(ready.config, ready.model_path)
    async with _engine(ready, gpus, renderer) as engine:
        app = policy_for_use(command, ready, engine, renderer, token)
        async with listening(app, listener, "off"):
            out.print(f"{ready.model_path}: base_url {url}/v1", markup=False, highlight=False, soft_wrap=True)
            out.print(f"listening on {url}", markup=False)
            failure = await _failure(engine)
    raise EngineError(f"the engine cannot go on: {failure}")


async def _failure(engine: Engine) -> str:
    """What the engine dies of, once it does."""
    while True:
        health = await engine.health()
        if not health.ok:
            return health.detail
        await asyncio.sleep(HEALTH_S)


@asynccontextmanager
async def _engine(ready: Ready, gpus: int, renderer: Renderer) -> AsyncIterator[Engine]:
    if in_process(ready.config):
        yield engine_here(ready.config, renderer)
        return
    from ..engines.starting import start_in_process

    with cancelled_at_once():
        engine = await start_in_process(ready, gpus)
    try:
        yield engine
    finally:
        await engine.shutdown()


def policy_for_use(
    command: ServePolicyCommand, ready: Ready, engine: Engine, renderer: Renderer, token: str | None
) -> FastAPI:
    """The app: every request is a session of its own, sampled as it asks."""
    from agentrl.agent_server.http import Bounds
    from agentrl.agent_server.policy_app import policy_app
    from agentrl.agent_server.policy_desk import OpenDesk

    sampling = Sampling(max_new_tokens=ready.limits.max_new_tokens)

    def fresh() -> PolicySession:
        ctx = RolloutContext(engine, renderer, sampling, ready.limits, secrets.randbits(62), training=False)
        return PolicySession(ctx, Trajectory(Task("request")), sampling="free")

    name = command.name or Path(ready.model_path).name
    desk = OpenDesk(name, ready.limits.max_len, renderer, fresh, token)
    return policy_app(desk, Bounds(body=int(command.max_body_mb * 2**20)))
