"""`agentrl serve reward`: a reward function or model for `--reward http://…`, and for OpenRLHF's `--remote_rm_url`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..openrlhf.load import is_file, load_file
from ..registry import load_object
from .console import out
from .serve import listen, server_parser, token_and_bounds

DEVICES = ("auto", "cpu", "cuda")


def main(argv: list[str]) -> int:
    """The exit code of `agentrl serve reward ARGV`."""
    from agentrl.agent_server.reward_app import reward_app

    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="%(levelname)s %(message)s")
    if options.max_batch < 1 or not options.timeout > 0:
        raise ConfigError("--max-batch must be at least 1 and --timeout above 0.")
    shared = token_and_bounds(options)
    app = reward_app(_reward(options), timeout_s=options.timeout, max_batch=options.max_batch, **shared)
    return listen(app, options)


def _parser() -> argparse.ArgumentParser:
    parser = server_parser("reward", 9000, body_mb=16.0)
    judge = parser.add_mutually_exclusive_group(required=True)
    judge.add_argument(
        "--fn",
        metavar="FILE.py:FUNCTION",
        help="as for --reward, or one that names prompts, completions, labels and is given lists; FILE.py alone is a reward file "
        "of OpenRLHF's format",
    )
    judge.add_argument(
        "--model",
        metavar="PATH",
        help="a reward model: a Hugging Face sequence classifier with one label, folder or hub id",
    )
    parser.add_argument(
        "--model.chat-template",
        dest="chat_template",
        metavar="CHOICE",
        help="auto (the tokenizer's own), none (prompt and completion joined as they are), or the path of a jinja file",
    )
    parser.add_argument(
        "--no-normalize",
        action="store_true",
        help="serve a model's scores as they are, and not less the mean and divided by the deviation in its config.json",
    )
    parser.add_argument("--device", choices=DEVICES, help="where the model runs; auto takes a GPU if there is one")
    parser.add_argument("--timeout", type=float, default=60.0, help="longest call of the function or model, in seconds")
    parser.add_argument("--max-batch", type=int, default=64, help="completions judged at once")
    return parser


def _reward(options: argparse.Namespace) -> Callable[..., Any]:
    if options.fn is not None:
        unused = {
            "--model.chat-template": options.chat_template,
            "--device": options.device,
            "--no-normalize": options.no_normalize,
        }
        for flag, value in unused.items():
            if value:
                raise ConfigError(f"{flag} is not used with --fn.")
        spec = f"{options.fn}:reward_func" if is_file(options.fn) else options.fn
        function: Callable[..., Any] = load_object(spec, load_file)
        return function
    from ..reward_model import RewardModel

    out.print(f"loading {options.model}", markup=False)
    return RewardModel(
        options.model,
        chat_template=options.chat_template or "auto",
        device=options.device or "auto",
        normalized=not options.no_normalize,
    )
