"""How many optimizer updates a run plans: the horizon of its learning-rate schedule."""

from __future__ import annotations


def planned_updates(*, prompts: int, n: int, train_batch: int, epochs: int, rollouts: int, episodes: int) -> int:
    """Optimizer updates of a run; micro-batches, ranks and rows per rollout do not enter.

    prompts = prompts of one batch taken, n = samples of each, train_batch = rollouts in one update, epochs = passes
    over a taken batch, rollouts = batches taken in one pass over the data, episodes = such passes. A remainder of the
    batch is an update of its own. Raises ValueError unless all are at least 1.
    """
    counts = {"prompts": prompts, "n": n, "train_batch": train_batch}
    counts |= {"epochs": epochs, "rollouts": rollouts, "episodes": episodes}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    updates_per_pass = -(-prompts * n // train_batch)
    return updates_per_pass * epochs * rollouts * episodes
