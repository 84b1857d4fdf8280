"""From configuration to working parts: the renderer, the executor and the tasks of a run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from .config import Config, ModelSection, TrainerConfig
from .config.pairs import parse_options
from .data import load_tasks
from .engine import Limits
from .env import Env, Task
from .env_tasks import checked_tasks, fault, seed_tasks
from .errors import ConfigError
from .executor import AgentExecutorBase, RolloutContext
from .judge import judge_reward
from .model_folder import does_not_load, generation_stop_ids, model_config, takes_images
from .multi_turn import MultiTurnExecutor
from .openrlhf.executor import OpenRLHFExecutor
from .openrlhf.load import agent_executor, is_file, load_file, reward_function
from .registry import accepted_options, is_url, load_object, resolve_env, suggest
from .renderer import Renderer
from .reward_actor import is_reward_model, model_reward
from .reward_client import check_reward_servers, served_reward
from .single_turn import SingleTurnExecutor
from .tokens import read_token
from .trajectory import Trajectory

LISTENS_S = 5.0
"""How long an agent server may take to accept a connection before the run starts."""


class EnvSource:
    """An environment of a run, by default its first: its class or factory, and the options it was given.

    `target` stands in for what the name would be resolved to; `patient` is for `resolve_env`.
    """

    def __init__(self, config: Config, target: Any = None, name: str | None = None, *, patient: bool = False) -> None:
        self.name = config.env.name[0] if name is None else name
        self.target = resolve_env(self.name, config.env.token_file, patient=patient) if target is None else target
        self.options = parse_options(config.env.opt_of(self.name), "--env.opt")
        self._check_options()

    def _check_options(self) -> None:
        if not isinstance(self.target, type):
            return
        if not (hasattr(self.target, "reset") and hasattr(self.target, "step")):
            raise ConfigError(f"--env {self.name} is no environment: the class has no reset and step.")
        taken = {*self._for_constructor(), *self._for_tasks()}
        unknown = [key for key in self.options if key not in taken]
        if unknown:
            known = option_names(self.target)
            raise ConfigError(
                f"{self.name} has no option {unknown[0]!r}.{suggest(unknown[0], known)} It takes {', '.join(known) or 'none'}."
            )

    def _for_constructor(self) -> dict[str, Any]:
        target: Any = self.target
        return {} if target.__init__ is object.__init__ else accepted_options(target.__init__, self.options)

    def _for_tasks(self) -> dict[str, Any]:
        return accepted_options(self.target.tasks, self.options) if hasattr(self.target, "tasks") else {}

    def make(self) -> Any:
        """A fresh env."""
        return self.target(**(self._for_constructor() if isinstance(self.target, type) else self.options))

    def check_complete(self) -> None:
        """Raises ConfigError: the constructor needs an option that was not given."""
        missing = required_options(self.target) - self.options.keys() if isinstance(self.target, type) else set()
        if missing:
            name = min(missing)
            raise ConfigError(f"{self.name} needs the option {name!r}: --env.opt {name}=VALUE.")

    def tasks(self, split: str) -> Iterable[Task]:
        """The tasks the env brings for a split. Raises ConfigError, also when they are read."""
        if not self.brings_tasks:
            return ()
        what = f"{self.name}: tasks({split!r})"
        with fault(what):
            tasks = self.target.tasks(split, **self._for_tasks())
        return checked_tasks(tasks, what)

    @property
    def brings_tasks(self) -> bool:
        """Whether it has a `tasks` of its own."""
        own = getattr(self.target, "tasks", None)
        return own is not None and getattr(own, "__func__", None) is not vars(Env)["tasks"].__func__


def option_names(env: Any) -> list[str]:
    """Names of the options that an env class declares, in its constructor and in `tasks`."""
    functions = [env.__init__] if env.__init__ is not object.__init__ else []
    functions += [env.tasks] if hasattr(env, "tasks") else []
    named = [p for function in functions for p in inspect.signature(function).parameters.values()]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return list(dict.fromkeys(p.name for p in named if p.kind in kinds and p.name not in ("self", "split")))


def required_options(env: Any) -> set[str]:
    """Names of the options that an env's constructor cannot do without."""
    if env.__init__ is object.__init__:
        return set()
    parameters = list(inspect.signature(env.__init__).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in parameters if p.default is p.empty and p.kind not in kinds}


def make_executor(config: Config, worker: int = 0, *, patient: bool = False) -> AgentExecutorBase:
    """The executor of a run, in rollout worker `worker`: the user's own, an agent that talks HTTP, an env's turn loop, or a
    single turn with reward functions. `patient`: in the middle of a run, an env server that is away is waited for.
    """
    if config.agent.name:
        return _agent_executor(config, worker)
    if config.env.name:
        return _env_executor(config, patient)
    if config.reward.name:
        return _single_turn(config)
    raise ConfigError("Say what to train on: --env NAME, or --data.path FILE with --reward path.py:function.")


def _env_executor(config: Config, patient: bool) -> AgentExecutorBase:
    played: dict[str, AgentExecutorBase] = {}
    for spec, label in config.env.labels.items():
        source = EnvSource(config, name=spec, patient=patient)
        source.check_complete()
        played[label] = MultiTurnExecutor(source.make, label)
    return MixedExecutor(played) if len(played) > 1 else next(iter(played.values()))


class MixedExecutor(AgentExecutorBase):
    """Each task in the environment it is of."""

    def __init__(self, played: Mapping[str, AgentExecutorBase]) -> None:
        self.played = dict(played)

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        return await self.played[task.env].execute(task, ctx)


def _single_turn(config: Config) -> SingleTurnExecutor:
    reward = config.reward
    rewards = [make_reward(spec, config.env.token_file, normalize=reward.normalize) for spec in reward.name]
    if not reward.normalize and not any(is_reward_model(spec) for spec in reward.name):
        raise ConfigError("--reward.no-normalize is not used without a --reward that is the folder of a reward model.")
    return SingleTurnExecutor(rewards, reward.weights, reward.name)


def make_reward(spec: str, token_file: str | None, *, normalize: bool = True) -> Callable[..., Any]:
    """The reward function of `path/to/file.py:function`, of a judge.toml, of a reward model's folder (its scores normalised or
    raw), or one that asks a reward server.
    """
    if is_url(spec):
        return served_reward(spec, read_token(token_file, "--env.token-file"))
    if spec.endswith(".toml"):
        return judge_reward(spec)
    if is_reward_model(spec):
        return model_reward(spec, normalize)
    if is_file(spec):
        return reward_function(spec)
    if ":" not in spec:
        raise ConfigError(
            f"--reward {spec}: there is no such folder of a reward model. For a function name the file and what it defines, "
            "as in path/to/file.py:name."
        )
    function: Callable[..., Any] = load_object(spec, load_file)
    if not callable(function):
        raise ConfigError(f"--reward {spec} is {type(function).__name__}, no function.")
    return function


async def check_servers(config: Config) -> None:
    """Whether the reward servers answer, and one of the agent servers listens. Raises ConfigError."""
    for spec in filter(is_url, config.reward.name):
        await check_reward_servers(spec, read_token(config.env.token_file, "--env.token-file"))
    agents = list(filter(is_url, config.agent.name))
    if agents and not any([await _listens(url) for url in agents]):
        raise ConfigError(f"--agent {' '.join(agents)}: no agent server listens there.")


async def _listens(url: str) -> bool:
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, port), LISTENS_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _agent_executor(config: Config, worker: int) -> AgentExecutorBase:
    from . import FunctionExecutor, RemoteAgentExecutor

    judge = _single_turn(config) if config.reward.name else None
    if is_url(config.agent.name[0]):
        return RemoteAgentExecutor.configured(config, worker, judge)
    (spec,) = config.agent.name
    if is_file(spec):
        theirs = agent_executor(spec)
        ours = isinstance(theirs, AgentExecutorBase)
        return _own_executor(spec, theirs if ours else OpenRLHFExecutor(theirs, spec), config)
    target = load_object(spec, load_file)
    if inspect.iscoroutinefunction(target):
        return FunctionExecutor.configured(target, config, worker, judge)
    return _own_executor(spec, target, config)


def _own_executor(spec: str, target: Any, config: Config) -> AgentExecutorBase:
    executor = target() if isinstance(target, type) else target
    if not isinstance(executor, AgentExecutorBase):
        raise ConfigError(
            f"--agent {spec} is a {type(executor).__name__}: it must be an `async def run(task, client)` or an AgentExecutorBase."
        )
    if config.reward.name:
        raise ConfigError(f"--agent {spec} brings its own rewards: leave out --reward.")
    unread = [name for name in config.agent.changed() if name != "name"]
    if unread:
        raise ConfigError(f"--agent.{unread[0].replace('_', '-')} is not used with an executor of your own: {spec}.")
    return executor


def make_tasks(config: Config, split: str, env: str | None = None) -> Iterable[Task]:
    """Training tasks (split "train") or held-out ones: from the dataset if one is given, whose own split is `data.split`
    for both, else from the environment (the first, when none is named); one that brings none is played on seeds.
    """
    evaluation = split != "train"
    if config.data.path:
        if evaluation and not config.data.test_path:
            return ()
        return load_tasks(config.data, evaluation=evaluation, seed=config.run.seed)
    if not config.env.name:
        return ()
    source = EnvSource(config, name=env)
    return source.tasks(split) if source.brings_tasks else seed_tasks(split)


def episode_limits(config: Config, env_turns: int | None) -> Limits:
    """The bounds of an episode; the env's own turn limit counts where it is smaller."""
    rollout = config.rollout
    return Limits(
        max_turns=min(rollout.max_turns, env_turns or rollout.max_turns),
        max_new_tokens=rollout.max_new_tokens,
        max_len=rollout.max_len,
        max_total_tokens=rollout.max_total_tokens,
        call_timeout_s=min(rollout.call_timeout_s, config.watchdog.fail_after),
        episode_timeout_s=rollout.episode_timeout_s,
    )


def load_processor(model_path: str, trust_remote_code: bool) -> Any:
    """The model's processor if it takes images, else its tokenizer. Loads transformers. Raises ConfigError."""
    from .torchvision_ops import ensure_torchvision_imports

    ensure_torchvision_imports()
    from transformers import AutoProcessor, AutoTokenizer

    loader = AutoProcessor if takes_images(model_config(model_path)) else AutoTokenizer
    try:
        return loader.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise does_not_load(model_path, "The model", trust_remote_code, error) from error


def make_renderer(config: TrainerConfig, model_path: str) -> Renderer:
    """The renderer of a model, with the stop ids its generation config names."""
    processor = load_processor(model_path, config.model.trust_remote_code)
    return Renderer(
        processor,
        history=config.model.history if isinstance(config.model, ModelSection) else "append",
        chat_template=config.model.chat_template,
        stop_ids=generation_stop_ids(model_path),
    )
