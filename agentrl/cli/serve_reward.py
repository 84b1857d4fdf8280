"""`agentrl serve reward`: a reward function for `--reward http://…`, and for OpenRLHF's `--remote_rm_url`."""

from __future__ import annotations

import logging

from ..errors import ConfigError
from ..registry import load_object
from ..reward_model import scored_lists
from .serve import listen, server_parser, token_and_bounds


def main(argv: list[str]) -> int:
    """The exit code of `agentrl serve reward ARGV`."""
    from agentrl.agent_server.reward_app import reward_app

    parser = server_parser("reward", 9000)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="FOLDER", help="a reward model, as agentrl rm writes it")
    what.add_argument(
        "--fn",
        metavar="FILE.py:FUNCTION",
        help="as for --reward, or one that names prompts, completions, labels and is given lists",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="longest call of the function, in seconds")
    parser.add_argument("--max-batch", type=int, default=64, help="completions judged at once")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="%(levelname)s %(message)s")
    if options.max_batch < 1 or not options.timeout > 0:
        raise ConfigError("--max-batch must be at least 1 and --timeout above 0.")
    function = load_object(options.fn) if options.model is None else scored_lists(options.model)
    app = reward_app(function, timeout_s=options.timeout, max_batch=options.max_batch, **token_and_bounds(options))
    return listen(app, options)
