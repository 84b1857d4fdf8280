"""`agentrl envs`: which environments there are, what one shows, whether one keeps the contract, and a new one to fill in."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from ..assemble import EnvSource
from ..config import Config
from ..errors import ConfigError
from ..messages import Image, message_images
from ..registry import names, suggest
from .console import err, out

ACTIONS = ("list", "show", "check", "new")
MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def main(argv: list[str]) -> int:
    """The exit code of `agentrl envs ARGV`."""
    if argv and not argv[0].startswith("-") and argv[0] not in ACTIONS:
        raise ConfigError(f"There is no `agentrl envs {argv[0]}`.{suggest(argv[0], ACTIONS)} See agentrl envs --help.")
    options = _parser().parse_args(argv)
    actions = {"list": list_envs, "show": show, "check": check_env, "new": new}
    return actions[options.action](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("agentrl envs", description="List, show, check and start environments.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | show | check | new")
    add = {name: actions.add_parser(name, help=what, description=what, allow_abbrev=False) for name, what in _HELP}
    for name in ("show", "check"):
        add[name].add_argument("name", metavar="NAME", help=_NAMED)
        add[name].add_argument("--env.opt", dest="opt", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
        add[name].add_argument("--env.token-file", dest="token_file", metavar="FILE", help="token of an env server")
    add["show"].add_argument("--timeout", type=float, default=60.0, help="longest call of the env, in seconds")
    add["show"].add_argument("--out", metavar="DIR", help="write the first observation's pictures there as PNG")
    add["check"].add_argument("--timeout", type=float, default=120.0, help="longest check, in seconds")
    add["new"].add_argument("name", metavar="NAME", help="name of the environment, snake_case")
    add["new"].add_argument("--out", metavar="FILE", help="where to write it (default: NAME.py)")
    for sub in add.values():
        sub.add_argument("--debug", action="store_true", help="show stack traces")
    return parser


_NAMED = "a registered name, path/to/file.py:Class, gymnasium:ID or http://host:port/name"
_HELP = (
    ("list", "the registered environments"),
    ("show", "what an environment is about and what it shows first"),
    ("check", "play an environment with scripted and bad replies, and report what is wrong"),
    ("new", "write a small environment to start from"),
)


def list_envs(options: argparse.Namespace) -> int:
    """Every registered env with its first line and split sizes."""
    from .env_facts import listed

    rows = [(name, *listed(name)) for name in names("env")]
    wide = [max(len(row[column]) for row in rows) for column in (0, 2)] if rows else [0, 0]
    for name, about, sizes in rows:
        out.print(f"{name:<{wide[0]}}  {sizes:<{wide[1]}}  {about}", markup=False)
    return 0


def _source(options: argparse.Namespace) -> EnvSource:
    section = {"name": options.name, "opt": options.opt, "token_file": options.token_file}
    return EnvSource(Config.model_validate({"env": section}))


def show(options: argparse.Namespace) -> int:
    """Docstring, options, limits, tools, tasks, and the first observation."""
    from . import env_facts
    from .transcript import transcript

    source = _source(options)
    opening = asyncio.run(env_facts.open_env(source, options.timeout))
    target = source.target if isinstance(source.target, type) else type(opening.env)
    lines = [options.name, "", env_facts.docstring(target) or "(no docstring)", ""]
    lines += [f"--env.opt {option}" for option in env_facts.options(target, opening.env)]
    lines += [f"turns: at most {opening.max_turns or 'as many as rollout.max_turns'}"]
    lines += [f"tool: {tool['function']['name']} - {tool['function'].get('description', '')}" for tool in opening.tools]
    lines += [f"tasks of {split}: {env_facts.size(source, split)}" for split in env_facts.SPLITS]
    lines += ["", f"first observation, task {opening.task.id if opening.task else '(none)'}:"]
    for line in [*lines, *transcript(opening.messages)]:
        out.print(line, markup=False)
    if options.out is not None:
        _write_images(Path(options.out), message_images(opening.messages))
    return 0


def _write_images(folder: Path, images: Sequence[Image]) -> None:
    if not images:
        err.print("The first observation has no pictures, so --out wrote nothing.")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        path = folder / f"observation_{i}.png"
        path.write_bytes(image.png)
        out.print(f"written to {path}", markup=False)


def check_env(options: argparse.Namespace) -> int:
    """Findings, worst at the end; 1 when one is an error."""
    from .bounded_check import check_within

    findings = check_within(_source(options), options.timeout)
    order = ("ok", "warning", "error")
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        out.print(MARKS[finding.level], end=" ")
        out.print(finding.message, markup=False)
    return int(any(finding.level == "error" for finding in findings))


def new(options: argparse.Namespace) -> int:
    """A copy of the skeleton under a name of its own. Raises ConfigError rather than replace a file."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", options.name):
        raise ConfigError(f"{options.name!r} is no name for an environment: letters, digits and _, as in my_game.")
    path = Path(options.out or f"{options.name}.py")
    if path.exists():
        raise ConfigError(f"{path} is there already: choose another name or --out.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no folder {path.parent}.")
    class_name = "".join(part[:1].upper() + part[1:] for part in options.name.split("_"))
    text = Path(__file__).with_name("env_skeleton.py").read_text()
    path.write_text(text.replace("env_skeleton.py", str(path)).replace("MyEnv", class_name))
    out.print(f"{path} written. Next: agentrl envs check {path}:{class_name}", markup=False)
    return 0
