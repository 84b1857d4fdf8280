"""An advantage of one's own: the group's mean as baseline, and a discount for each token still to come.

    agentrl train --env screenshot_math --algo examples/custom_advantage.py:discounted_baseline --algo.gamma 0.99

Any axis goes with it, as in `--algo.advantage examples/custom_advantage.py:discounted_baseline --algo dapo`. An installed
package names the function in the entry point group `agentrl.algorithms` instead; then `--algo discounted_baseline` is enough.
"""

from __future__ import annotations

from agentrl.trainers import Decisions, register_advantage, to_go
from torch import Tensor


@register_advantage("discounted_baseline", whiten=True, grouped=True)
def discounted_baseline(d: Decisions) -> Tensor:
    """[R, L]: the return to go of each decision, less what the other episodes of the task earned on average."""
    above = d.token_rewards - d.at_end(d.groups.mean(d.rewards))
    return to_go(above - d.penalty, d.gamma)
