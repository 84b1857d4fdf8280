"""`agentrl from-openrlhf -- FLAGS`: the configuration of a run that was OpenRLHF's."""

from __future__ import annotations

import sys

from ..config.dump import as_toml
from ..openrlhf.convert import convert
from .exits import DONE, USAGE

HELP = """usage: agentrl from-openrlhf -- FLAGS

Prints the TOML configuration for a command line of OpenRLHF's train_ppo_ray, for `agentrl train --config`. The whole command
may stand after the --, python and all. What has no counterpart is printed as a comment. docs/from-openrlhf.md has
every option.

    agentrl from-openrlhf -- --actor.model_name_or_path MODEL --data.prompt_dataset prompts.jsonl \\
        --reward.remote_url reward.py > run.toml"""


def main(argv: list[str]) -> int:
    """The exit code of `agentrl from-openrlhf ARGV`."""
    words = [word for word in argv if word != "--debug"]
    words = words[words[:1] == ["--"] :]
    if not words or words[0] in ("-h", "--help"):
        print(HELP, file=sys.stdout if words else sys.stderr)
        return DONE if words else USAGE
    found = convert(words)
    settings = as_toml(found.nested())
    for note in found.notes:
        print(f"# {note}")
    print(settings, end="")
    return DONE
