"""Executors for agents that talk HTTP: a function in this process, or a program anywhere. Both are trained unmodified."""

from __future__ import annotations

import asyncio
import logging
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agentrl.config import Config
from agentrl.env import Task
from agentrl.errors import AgentError, AgentRLError, ConfigError, EnvError
from agentrl.executor import AgentExecutorBase, RolloutContext
from agentrl.policy_session import PolicySession, SamplingMode
from agentrl.reward import Verdict, read_verdict
from agentrl.single_turn import SingleTurnExecutor
from agentrl.tokens import read_token
from agentrl.trajectory import Trajectory

from .agent_servers import AgentServers
from .agent_wire import PolicyAccess
from .listen import is_loopback
from .policy_host import MODEL, Listening, PolicyHost
from .sdk_clients import Clients, wanted_client

log = logging.getLogger(__name__)
Run = Callable[[Task, Any], Awaitable[Any]]


@dataclass(frozen=True)
class AgentOptions:
    """How agents are served: where the policy listens, what becomes of their sampling options, and who judges them (`judge`;
    without one they judge themselves).
    """

    listening: Listening = field(default_factory=Listening)
    sampling: SamplingMode = "force"
    judge: SingleTurnExecutor | None = None


def agent_options(config: Config, worker: int, judge: SingleTurnExecutor | None) -> AgentOptions:
    """The options of a run's agent section, in rollout worker `worker`. Raises ConfigError."""
    agent = config.agent
    token = read_token(agent.token_file, "--agent.token-file")
    where = Listening.of_worker(worker, agent.bind, agent.advertise_url, token)
    return AgentOptions(where, agent.sampling, judge)


class HttpAgentExecutor(AgentExecutorBase):
    """Opens a session on this process's policy server for every episode and lets the agent run against it."""

    def __init__(self, options: AgentOptions | None = None) -> None:
        self.options = options or AgentOptions()
        self._host: PolicyHost | None = None
        self._warned: set[str] = set()

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        record = ctx.trajectory or ctx.begin(task)
        session = PolicySession(ctx, record, sampling=self.options.sampling, warn=self._warn)
        async with self._host_here(ctx).opened(session) as (root, key):
            ctx.policy_url, ctx.api_key = f"{root}/v1", key
            outcome = await self._outcome(task, ctx, session)
        await self._judge(task, ctx, session, outcome)
        return record

    @abstractmethod
    async def run_agent(self, task: Task, ctx: RolloutContext) -> Any:
        """Run the agent against ctx.policy_url with ctx.api_key; what it returned."""

    def _host_here(self, ctx: RolloutContext) -> PolicyHost:
        """The server on the running event loop; it is started once, and ends with the loop, or some time after this."""
        if self._host is None or self._host.loop is not asyncio.get_running_loop():
            self._host = PolicyHost(self.options.listening, ctx.renderer, ctx.limits.max_len)
            weakref.finalize(self, self._host.retire)
        return self._host

    async def close(self) -> None:
        """End the policy server."""
        if self._host is not None and self._host.loop is asyncio.get_running_loop():
            await self._host.close()
        self._host = None

    async def _outcome(self, task: Task, ctx: RolloutContext, session: PolicySession) -> Any:
        """What the agent returned. The fault boundary of agent code: an error after the engine failed is the engine's, one
        after the budget was refused is the end of the episode, anything else is the agent's.
        """
        try:
            return await self.run_agent(task, ctx)
        except ConfigError:
            raise
        except Exception as error:
            if session.failure is not None:
                raise session.failure from error
            if session.exhausted:
                return None
            if isinstance(error, AgentRLError):
                raise
            raise AgentError(f"the agent raised {type(error).__name__}: {error}") from error

    async def _judge(self, task: Task, ctx: RolloutContext, session: PolicySession, outcome: Any) -> None:
        """The reward function's verdict if there is one, else the agent's own, else what was posted."""
        try:
            own = outcome_fields(outcome)
            if "reward" in own:
                session.judge(Verdict(own["reward"], own.get("score"), own.get("metrics") or {}))
            else:
                session.note(own)
        except EnvError as error:
            raise AgentError(f"what the agent returned cannot be read: {error}") from error
        if self.options.judge is not None:
            session.judge(await self.options.judge.judge(task, session.last_text, ctx, session.record))

    def _warn(self, message: str) -> None:
        """Once a run."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)


def outcome_fields(outcome: Any) -> dict[str, Any]:
    """{"reward"?, "score"?, "metrics"?} of what an agent returned: such a mapping, a number, or None. Numbers of any kind are
    floats, what is none is None. Raises EnvError.
    """
    if outcome is None:
        return {}
    if not isinstance(outcome, Mapping):
        return {"reward": read_verdict(outcome).reward}
    unknown = outcome.keys() - {"reward", "score", "metrics"}
    if unknown:
        raise EnvError(f"an agent returns reward, score and metrics, not {sorted(map(str, unknown))}")
    said = {"reward": None, **outcome}
    if isinstance(said["reward"], str):
        said["reward"] = None
    verdict = read_verdict(said)
    fields = {"reward": verdict.reward, "score": verdict.score, "metrics": dict(verdict.metrics)}
    return {name: fields[name] for name in outcome}


class FunctionExecutor(HttpAgentExecutor):
    """Runs `async def run(task, client)` with a ready AsyncOpenAI client, or AsyncAnthropic where `client` is annotated so.

    `run` returns a reward, {"reward", "score", "metrics"}, or None when it posted its rewards. It shares an event loop with
    other episodes, so it must not block.
    """

    def __init__(self, run: Run, options: AgentOptions | None = None) -> None:
        super().__init__(options)
        self.run = run
        self._clients = Clients(wanted_client(run))

    @classmethod
    def configured(cls, run: Run, config: Config, worker: int, judge: SingleTurnExecutor | None) -> FunctionExecutor:
        """As a run's configuration says."""
        return cls(run, agent_options(config, worker, judge))

    async def run_agent(self, task: Task, ctx: RolloutContext) -> Any:
        assert ctx.policy_url is not None and ctx.api_key is not None
        client = self._clients.make(ctx.policy_url, ctx.api_key)
        return await self.run(task, client)


class RemoteAgentExecutor(HttpAgentExecutor):
    """Orders episodes of agent servers elsewhere (`POST {url}/v1/episodes`); several URLs share the load.

    `token` is sent to them as a bearer token. A server that is lost while an episode runs is an InfrastructureError.
    """

    def __init__(
        self, url: str | Sequence[str], options: AgentOptions | None = None, *, token: str | None = None
    ) -> None:
        super().__init__(options)
        self._agents = AgentServers([url] if isinstance(url, str) else url, token)

    @classmethod
    def configured(cls, config: Config, worker: int, judge: SingleTurnExecutor | None) -> RemoteAgentExecutor:
        """As a run's configuration says. Raises ConfigError for agents that could not reach the policy server."""
        options = agent_options(config, worker, judge)
        elsewhere = [url for url in config.agent.name if not is_loopback(urlsplit(url).hostname or "")]
        if elsewhere and config.agent.bind is None and config.agent.advertise_url is None:
            raise ConfigError(
                f"the agent at {elsewhere[0]} cannot reach a policy server on 127.0.0.1: say where it listens and what the "
                "agent is told with --agent.bind and --agent.advertise-url."
            )
        return cls(config.agent.name, options, token=options.listening.token)

    async def run_agent(self, task: Task, ctx: RolloutContext) -> Any:
        assert ctx.policy_url is not None and ctx.api_key is not None
        root = ctx.policy_url.removesuffix("/v1")
        access = PolicyAccess(base_url=ctx.policy_url, anthropic_base_url=root, api_key=ctx.api_key, model=MODEL)
        assert ctx.trajectory is not None
        return await self._agents.play(ctx.rollout_id, task, access, ctx.limits, ctx.trajectory.metrics)
