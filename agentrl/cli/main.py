"""`agentrl COMMAND …`: finds the command and turns what it raises into an exit code and one clear paragraph."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..errors import AgentRLError, ConfigError, DataError
from ..registry import suggest
from .exits import DONE, FAILED, INTERRUPTED, USAGE

COMMANDS = {
    "train": "train a policy on an environment",
    "sft": "supervised fine-tuning: imitate conversations, answers or trajectories",
    "rm": "train a reward model on pairs of answers",
    "dpo": "train a policy on pairs of answers: DPO, IPO, cDPO",
    "rollout": "play an environment without training",
    "eval": "measure a model on held-out tasks: rewards and pass@k",
    "serve": "serve a policy, environments or a reward function over HTTP",
    "envs": "list, show, check and start environments",
    "init": "make agentrl's own tiny policies: tiny-vlm, tiny-text",
    "ckpt": "make a checkpoint ready for another number of trainer ranks",
    "export": "write the policy of a checkpoint as a Hugging Face folder",
    "from-openrlhf": "print the configuration for a command line of OpenRLHF",
    "status": "show what a run is doing and what it waits for",
    "doctor": "say what this machine can run",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `agentrl` program. Exit codes: 0 done, 1 failed, 2 usage or data, 130 interrupted."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """The exit code of a command line."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return DONE if argv else USAGE
    if argv[0] == "--version":
        from .. import __version__

        print(f"agentrl {__version__}")
        return DONE
    if argv[0] not in COMMANDS:
        return complain(f"There is no command {argv[0]!r}.{suggest(argv[0], COMMANDS)} See agentrl --help.", USAGE)
    return guarded(argv[0], argv[1:])


def guarded(command: str, argv: list[str]) -> int:
    """Run one command. The fault boundary of the program: `--debug` lets errors through with their stack trace."""
    try:
        return importlib.import_module(f".{command.replace('-', '_')}", __package__).main(argv)
    except (ConfigError, DataError) as error:
        if "--debug" in argv:
            raise
        return complain(str(error), USAGE)
    except AgentRLError as error:
        if "--debug" in argv:
            raise
        return complain(str(error), FAILED)
    except KeyboardInterrupt:
        return complain("Interrupted.", INTERRUPTED)


def complain(message: str, code: int) -> int:
    """One paragraph on stderr."""
    print(f"agentrl: {message}", file=sys.stderr)
    return code


def usage() -> str:
    """What `agentrl --help` prints."""
    lines = [f"  {name:<14} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: agentrl COMMAND [OPTIONS]",
            "",
            "Train language and vision-language models as agents.",
            "",
            *lines,
            "",
            "agentrl COMMAND --help shows a command's options.",
        ]
    )
