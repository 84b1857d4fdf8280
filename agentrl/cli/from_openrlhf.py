"""`agentrl from-openrlhf -- FLAGS`: the configuration of a run, or the command, that was OpenRLHF's."""

from __future__ import annotations

import sys

from ..openrlhf.convert import convert
from .exits import DONE, USAGE

HELP = """usage: agentrl from-openrlhf -- FLAGS

Prints what a command line of OpenRLHF's is here: for train_ppo_ray, train_sft, train_rm and train_dpo the TOML configuration
for `agentrl train`, `sft`, `rm` or `dpo` --config (the first line says which), for serve_rm and lora_combiner the command.
The whole command may stand after the --, python, deepspeed and all; that is how it is known which program is meant. Of
options alone it is the program that has the most of them, train_ppo_ray where that is one of several. What has no
counterpart is printed as a comment. docs/from-openrlhf.md has every option.

    agentrl from-openrlhf -- --actor.model_name_or_path MODEL --data.prompt_dataset prompts.jsonl \\
        --reward.remote_url reward.py > run.toml
    agentrl from-openrlhf -- deepspeed --num_gpus 2 --module openrlhf.cli.train_sft --model.model_name_or_path MODEL \\
        --data.dataset chats.jsonl --data.input_key messages --data.apply_chat_template > sft.toml"""


def main(argv: list[str]) -> int:
    """The exit code of `agentrl from-openrlhf ARGV`."""
    words = [word for word in argv if word != "--debug"]
    words = words[words[:1] == ["--"] :]
    if not words or words[0] in ("-h", "--help"):
        print(HELP, file=sys.stdout if words else sys.stderr)
        return DONE if words else USAGE
    print(convert(words).shown(), end="")
    return DONE
