"""`agentrl serve`: what listens on HTTP, one module a server."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from ..errors import ConfigError
from ..registry import suggest
from .console import out
from .exits import DONE, USAGE
from .signals import terminable

SERVERS = {
    "policy": "a model, as OpenAI and Anthropic serve theirs",
    "env": "environments for agentrl elsewhere",
    "reward": "a reward function or model",
}


def main(argv: list[str]) -> int:
    """The exit code of `agentrl serve ARGV`."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: agentrl serve SERVER [OPTIONS]\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in SERVERS.items()))
        print("\nagentrl serve SERVER --help shows its options.")
        return DONE if argv else USAGE
    if argv[0] not in SERVERS:
        raise ConfigError(f"There is no server {argv[0]!r}.{suggest(argv[0], SERVERS)} Known: {', '.join(SERVERS)}.")
    code: int = importlib.import_module(f".serve_{argv[0]}", __package__).main(argv[1:])
    return code


def server_parser(name: str, port: int, body_mb: float = 64.0) -> argparse.ArgumentParser:
    """A parser with the options that every server has; `body_mb` is the default of --max-body-mb."""
    parser = argparse.ArgumentParser(f"agentrl serve {name}", description=SERVERS[name], allow_abbrev=False)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; one that other machines reach needs a token"
    )
    parser.add_argument("--port", type=int, default=port, help=f"default {port}; 0 takes a free one")
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token that clients must send")
    parser.add_argument(
        "--max-body-mb", type=float, default=body_mb, help=f"largest request, in MiB; default {body_mb:g}"
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show stack traces")
    return parser


def listen(app: Any, options: argparse.Namespace) -> int:
    """Bind, say where, serve until SIGINT or SIGTERM, which come out as KeyboardInterrupt once the envs are closed."""
    from agentrl.agent_server.listen import bind, serve_forever, url_of

    listener = bind(options.host, options.port)
    out.print(f"listening on {url_of(listener)}", markup=False)
    with terminable():
        serve_forever(app, listener)
    return DONE


def token_and_bounds(options: argparse.Namespace) -> dict[str, Any]:
    """`token` and `bounds` of an app. Raises ConfigError, also for an address that needs a token."""
    from agentrl.agent_server.http import Bounds
    from agentrl.agent_server.listen import check_bind

    from ..tokens import read_token

    token = read_token(options.token_file, "--token-file")
    check_bind(options.host, token)
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port} is no port.")
    if options.max_body_mb <= 0:
        raise ConfigError("--max-body-mb must be above 0.")
    return {"token": token, "bounds": Bounds(body=int(options.max_body_mb * 2**20))}
