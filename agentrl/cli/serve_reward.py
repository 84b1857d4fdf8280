"""`agentrl serve reward`: a reward function for `--reward http://…`, and for OpenRLHF's `--remote_rm_url`."""

from __future__ import annotations

import logging

from ..errors import ConfigError
from ..openrlhf.load import is_file, load_file
from ..registry import load_object
from .serve import listen, server_parser, token_and_bounds


def main(argv: list[str]) -> int:
    """The exit code of `agentrl serve reward ARGV`."""
    from agentrl.agent_server.reward_app import reward_app

    parser = server_parser("reward", 9000)
    parser.add_argument(
        "--fn",
        required=True,
        metavar="FILE.py:FUNCTION",
        help="as for --reward, or one that names prompts, completions, labels and is given lists; FILE.py alone is a reward file "
        "of OpenRLHF's format",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="longest call of the function, in seconds")
    parser.add_argument("--max-batch", type=int, default=64, help="completions judged at once")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="%(levelname)s %(message)s")
    if options.max_batch < 1 or not options.timeout > 0:
        raise ConfigError("--max-batch must be at least 1 and --timeout above 0.")
    function = load_object(f"{options.fn}:reward_func" if is_file(options.fn) else options.fn, load_file)
    app = reward_app(function, timeout_s=options.timeout, max_batch=options.max_batch, **token_and_bounds(options))
    return listen(app, options)
