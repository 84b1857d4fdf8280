"""Names to things: environments, algorithms, executors, engines.

Third parties add theirs through entry points (`agentrl.envs`, `agentrl.engines`, …) or by calling `register`. Looking a
name up loads only the module that defines it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError

GROUPS = {
    "env": "agentrl.envs",
    "env scheme": "agentrl.env_schemes",
    "engine": "agentrl.engines",
    "algorithm": "agentrl.algorithms",
}
_registered: dict[tuple[str, str], Any] = {}


def register(name: str, env: type | Callable[..., Any]) -> None:
    """Give an Env class (or factory) a name for `--env NAME` and `gymnasium.make("agentrl/NAME-v0")`.

    A second registration of the same name replaces the first.
    """
    _registered["env", name] = env
    _register_gymnasium(name, env, is_async=is_async_env(env))


def is_async_env(env: Any) -> bool:
    """True when `reset` or `step` is `async def`: the env is for agentrl, or behind `agentrl.sync`.

    A factory without these methods counts as sync.
    """
    methods = [getattr(env, name) for name in ("reset", "step") if hasattr(env, name)]
    return any(inspect.iscoroutinefunction(inspect.unwrap(method)) for method in methods)


def _register_gymnasium(name: str, entry: Any, *, is_async: bool) -> None:
    import gymnasium

    gym_id = f"agentrl/{name}-v0"
    if gym_id in gymnasium.registry:
        del gymnasium.registry[gym_id]
    gymnasium.register(id=gym_id, entry_point=entry, disable_env_checker=is_async, order_enforce=not is_async)


def register_gymnasium() -> None:
    """Make the installed envs known to `gymnasium.make`, without importing them; gymnasium looks for no entry points."""
    for point in importlib.metadata.entry_points(group=GROUPS["env"]):
        _register_gymnasium(point.name, point.value, is_async=False)


def names(kind: str) -> list[str]:
    """Every known name of a kind (env | engine | algorithm), sorted."""
    own = {name for group, name in _registered if group == kind}
    return sorted(own | {point.name for point in importlib.metadata.entry_points(group=GROUPS[kind])})


def lookup(kind: str, name: str) -> Any:
    """The object registered under a name. Raises ConfigError with the nearest names when there is none."""
    if (kind, name) in _registered:
        return _registered[kind, name]
    for point in importlib.metadata.entry_points(group=GROUPS[kind]):
        if point.name == name:
            return _loaded(kind, point)
    known = names(kind)
    raise ConfigError(f"There is no {kind} named {name!r}.{suggest(name, known)} Known: {', '.join(known)}.")


def _loaded(kind: str, point: importlib.metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind} {point.name}, {point.value}, does not import: {type(error).__name__}: {error}"
        ) from error


def suggest(name: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest names, or ''."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def load_file(path: str) -> ModuleType:
    """Import a Python file under a name of its own, once. Raises ConfigError that shows the file's own error."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"There is no file {path}.")
    # The same in every process: what the file defines is pickled by this name.
    name = f"agentrl_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.")
    stamp = (file.stat().st_mtime_ns, file.stat().st_size)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__stamp__", None) == stamp:
        return loaded
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    module.__dict__["__stamp__"] = stamp
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path} does not import: {type(error).__name__}: {error}") from error
    return module


def load_object(spec: str, load: Callable[[str], ModuleType] = load_file) -> Any:
    """The object of `path/to/file.py:Name`, from the module that `load` makes of the file. Raises ConfigError."""
    path, colon, attribute = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        raise ConfigError(f"{spec}: name the file and what it defines, as in path/to/file.py:name.")
    module = load(path)
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"{path} defines no {attribute!r}.{suggest(attribute, public)}")
    return getattr(module, attribute)


def is_url(spec: str) -> bool:
    """Whether a name is the address of a server."""
    return spec.startswith(("http://", "https://"))


def has_login(url: str) -> bool:
    """Whether an address says who asks: `http://name:password@host`."""
    return "@" in url.partition("://")[2].partition("/")[0]


def resolve_env(spec: str, token_file: str | None = None, *, patient: bool = False) -> Any:
    """The Env class or factory of `NAME`, `path/to/file.py:Class`, `gymnasium:ID` or `http://host:port/name`.

    A server is asked what the env is like, with the token in `token_file`; `patient`: one that is away is waited for as
    episodes wait for it, and then raises InfrastructureError.
    """
    if is_url(spec):
        return lookup("env scheme", spec.partition(":")[0])(spec, token_file, patient)
    if spec.startswith("gymnasium:"):
        return GymnasiumId(spec.removeprefix("gymnasium:"))
    if ".py:" in spec:
        return load_object(spec)
    if spec.endswith(".py"):
        raise ConfigError(f"--env {spec}: name the class too, as in {spec}:MyEnv.")
    return lookup("env", spec)


class GymnasiumId:
    """The factory behind `gymnasium:ID`. It has `tasks` where the class of that id has."""

    def __init__(self, gym_id: str) -> None:
        from gymnasium import spec
        from gymnasium.envs.registration import load_env_creator
        from gymnasium.error import Error

        self.id = gym_id
        try:
            entry = spec(gym_id).entry_point
            target: Any = load_env_creator(entry) if isinstance(entry, str) else entry
        except (Error, ImportError) as error:
            raise ConfigError(f"--env gymnasium:{gym_id}: {error}") from error
        if hasattr(target, "tasks"):
            self.tasks = target.tasks

    def __call__(self, **options: Any) -> Any:
        import gymnasium

        try:
            return gymnasium.make(self.id, **options)
        except gymnasium.error.Error as error:
            raise ConfigError(f"--env gymnasium:{self.id}: {error}") from error


def accepted_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options a callable takes by name; all of them when it has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(options)
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: value for key, value in options.items() if key in taken}
