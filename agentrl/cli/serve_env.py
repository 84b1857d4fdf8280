"""`agentrl serve env`: environments for `--env http://…` elsewhere."""

from __future__ import annotations

import asyncio
import logging

from ..assemble import EnvSource
from ..config import Config
from ..errors import ConfigError, EnvError
from .console import out
from .serve import listen, server_parser, token_and_bounds


def main(argv: list[str]) -> int:
    """The exit code of `agentrl serve env ARGV`."""
    from agentrl.agent_server.env_app import env_app
    from agentrl.agent_server.env_service import EnvLimits

    parser = server_parser("env", 8000)
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="a registered name, path/to/file.py:Class or gymnasium:ID"
    )
    parser.add_argument("--env.opt", dest="opt", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--max-sessions", type=int, default=EnvLimits.sessions, help="sessions at once; above, 429")
    parser.add_argument("--lease", type=float, default=EnvLimits.lease_s, help="seconds a session lives without a call")
    parser.add_argument(
        "--call-timeout", type=float, default=EnvLimits.call_timeout_s, help="longest call of an env, in seconds"
    )
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="%(levelname)s %(message)s")
    for flag, value in (
        ("max-sessions", options.max_sessions),
        ("lease", options.lease),
        ("call-timeout", options.call_timeout),
    ):
        if not value > 0:
            raise ConfigError(f"--{flag} must be above 0.")
    limits = EnvLimits(options.max_sessions, options.lease, options.call_timeout)
    sources = _sources(options.names, options.opt)
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ConfigError(f"two environments would have one name: {', '.join(names)}.")
    app = env_app(sources, limits=limits, **token_and_bounds(options))
    try:
        asyncio.run(app.state.look())
    except EnvError as error:
        raise ConfigError(str(error)) from error
    out.print(f"serving {', '.join(names)}", markup=False)
    return listen(app, options)


def _sources(specs: list[str], opt: list[str]) -> list[EnvSource]:
    """Each env under the name it has in URLs: without its file or scheme."""
    config = Config.model_validate({"env": {"name": specs, "opt": opt}})
    if strays := config.env.strays():
        raise ConfigError(f"--env.opt {strays[0]}: no environment of that name is served here.")
    sources = [EnvSource(config, name=spec) for spec in specs]
    for source in sources:
        source.name = source.name.rpartition(":")[2].replace("/", "-")
    return sources
