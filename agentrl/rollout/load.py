"""How many episodes an engine is given at once: additive increase, multiplicative decrease, as a function of plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..engine import Health

KV_FULL, KV_ROOMY = 0.95, 0.8
INCREASE, DECREASE = 4, 0.75


@dataclass(frozen=True)
class Load:
    """`limit` = episodes that may be played on the engine at once, no bound until it was under pressure; `preemptions` = its
    count when it was looked at last.
    """

    limit: float = math.inf
    preemptions: int = 0


def adjusted(load: Load, playing: int, health: Health) -> Load:
    """The load after a look at an engine on which `playing` episodes are played.

    Pressure is a KV cache that is nearly full, or requests that lost their place in it (pre-emptions) since the last look:
    the limit falls to DECREASE of what is played, and no further until so many have ended. Where the limit binds and the
    cache has room it rises by INCREASE. An engine that was replaced counts its pre-emptions anew.
    """
    seen = replace(load, preemptions=health.preemptions)
    if not health.ok:
        return load
    pressed = health.kv_usage >= KV_FULL or health.preemptions > load.preemptions
    if pressed and playing <= load.limit:
        return replace(seen, limit=max(1.0, math.floor(DECREASE * playing)))
    if not pressed and playing >= load.limit and health.kv_usage <= KV_ROOMY:
        return replace(seen, limit=load.limit + INCREASE)
    return seen
