"""Seeds depend on what is drawn, and on nothing else."""

from __future__ import annotations

from agentrl.seeds import call_id, derive, env_seed, sampling_seed


def test_seeds_are_fixed_numbers_of_63_bits() -> None:
    assert derive(1, "a") == derive("1", "a") == 6104050150092007499
    assert all(0 <= derive(i) < 2**63 for i in range(200))


def test_members_draws_runs_and_turns_differ() -> None:
    seen = {sampling_seed(run, draw, member) for run in range(4) for draw in range(8) for member in range(8)}
    seen |= {derive(seed, turn) for seed in list(seen) for turn in range(4)}
    assert len(seen) == 256 * 5
    assert env_seed(0, 3) == env_seed(0, 3) != env_seed(0, 4)
    assert env_seed(0, 3) != sampling_seed(0, 3, 0)


def test_call_ids_are_nine_letters_and_digits() -> None:
    ids = {call_id(7, i) for i in range(2000)}
    assert len(ids) == 2000
    assert all(len(one) == 9 and one.isalnum() for one in ids)
