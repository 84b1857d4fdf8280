"""How many episodes an engine gets: the controller on plain values, the seats, and one look at a fleet."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Reply, ScriptedEngine
from agentrl.engine import Health
from agentrl.engines.fleet import EngineFleet
from agentrl.engines.load_watch import LoadWatch
from agentrl.rollout.load import DECREASE, INCREASE, KV_FULL, Load, adjusted
from agentrl.rollout.seats import Seats


@settings(deadline=None)
@given(capacity=st.integers(4, 400), wanted=st.integers(1, 800), looks=st.integers(40, 120))
def test_the_limit_settles_below_what_the_cache_holds(capacity: int, wanted: int, looks: int) -> None:
    """Of an engine whose cache holds `capacity` episodes; everyone who may play does at once."""
    load, evicted = Load(), 0
    for _ in range(looks + wanted // INCREASE):
        playing = int(min(wanted, load.limit))
        evicted += max(0, playing - capacity)
        load = adjusted(load, playing, Health(True, 0, kv_usage=min(1.0, playing / capacity), preemptions=evicted))
    if wanted / capacity < KV_FULL:
        assert load.limit == math.inf
    else:
        assert min(DECREASE * 0.75 * capacity, 0.75 * wanted) - 1 <= load.limit <= capacity + INCREASE


def test_pressure_lowers_the_limit_once_until_that_many_have_ended() -> None:
    full = Health(True, 0, kv_usage=0.99)
    load = adjusted(Load(), 100, full)
    assert load.limit == 75
    assert adjusted(load, 90, full).limit == 75
    assert adjusted(load, 75, full).limit == 56


def test_an_engine_that_does_not_answer_says_nothing_and_a_new_one_counts_anew() -> None:
    load = Load(20, preemptions=50)
    assert adjusted(load, 20, Health(False, 0, kv_usage=1.0, preemptions=60)) == load
    assert adjusted(load, 20, Health(True, 0, preemptions=0)) == Load(20 + INCREASE, 0)


async def test_seats_hold_both_bounds_and_the_oldest_draw_goes_first() -> None:
    seats, went, most = Seats(2, most=3), [], [0, 0]
    seats.adjust(0, Load(limit=1))

    async def play(engine: int, draw: int) -> None:
        async with seats.one(engine, (draw, 0)):
            went.append((engine, draw))
            most[:] = map(max, most, seats.playing)
            assert sum(seats.playing) <= 3
            await asyncio.sleep(0.001)

    await asyncio.gather(*(play(draw % 2, draw) for draw in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)))
    assert most == [1, 2]
    later = [draw for engine, draw in went if engine == 0][1:]
    assert later == sorted(later) and len(went) == 10
    assert seats.playing == [0, 0] and seats.waiting == 0


async def test_who_gives_up_leaves_the_seat_to_the_others() -> None:
    seats = Seats(1, most=1)

    async def play(draw: int) -> int:
        async with seats.one(0, (draw, 0)):
            await asyncio.sleep(0.001)
            return draw

    plays = [asyncio.create_task(play(draw)) for draw in range(4)]
    await asyncio.sleep(0)
    assert seats.waiting == 3
    plays[1].cancel()
    plays[0].cancel()
    await asyncio.gather(*plays, return_exceptions=True)
    assert seats.playing == [0] and seats.waiting == 0 and [p.cancelled() for p in plays] == [True, True, False, False]


def test_a_group_goes_to_the_engine_with_the_fewest_episodes() -> None:
    seats = Seats(3)
    assert [seats.least_loaded(8), seats.least_loaded(2), seats.least_loaded(4), seats.least_loaded(4)] == [0, 1, 2, 1]
    for _ in range(8):
        seats.over(0)
    assert seats.least_loaded(1) == 0


async def test_a_look_lowers_the_seats_of_the_engine_that_is_short_of_cache() -> None:
    engines = [ScriptedEngine([Reply([1])]) for _ in range(3)]
    seats = Seats(3)
    seats.playing[:] = [40, 40, 40]

    async def short() -> Health:
        return Health(True, 0, kv_usage=0.97)

    engines[1].health = engines[2].health = short  # type: ignore[method-assign]
    fleet = EngineFleet(engines)
    fleet.out.add(2)
    watch = LoadWatch(fleet, seats, lambda index, why: None, 300.0)
    await asyncio.gather(*map(watch.look, range(3)))
    assert [load.limit for load in seats.loads] == [math.inf, 30, math.inf]


async def test_an_engine_is_lost_that_says_it_is_ill_or_says_nothing_for_too_long() -> None:
    """While the others answer, and before any episode's time is over."""
    now, found = 0.0, [Health(True, 0), Health(True, 0)]
    engines = [ScriptedEngine([]) for _ in found]
    for index, engine in enumerate(engines):
        engine.health = lambda index=index: asyncio.sleep(0, found[index])  # type: ignore[method-assign]
    fleet, lost = EngineFleet(engines), []
    watch = LoadWatch(fleet, Seats(2), lambda index, why: lost.append((index, why)), 300.0, lambda: now)

    async def looked_at(after: float, *health: Health) -> list[tuple[int, str]]:
        nonlocal now
        now, found[:] = now + after, health
        lost.clear()
        await asyncio.gather(*map(watch.look, range(2)))
        return lost

    well, deaf, ill = Health(True, 0), Health(False, 0, answered=False, detail="deaf"), Health(False, 0, detail="ill")
    assert await looked_at(0, well, ill) == [(1, "ill")]
    assert await looked_at(0, well, deaf) == await looked_at(299, well, deaf) == []
    assert await looked_at(0, well, well) == await looked_at(1, well, deaf) == await looked_at(299, well, deaf) == []
    assert await looked_at(1, well, deaf) == [(1, "deaf")]
    fleet.out.add(1)
    assert await looked_at(300, well, deaf) == []
    fleet.out.clear()
    assert await looked_at(300, well, deaf) == [], "another has taken its place"
