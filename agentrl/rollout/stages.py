"""Where every episode in flight is and since when: what the watchdog names and `agentrl status` shows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .group import Group
from .orders import draw_id

PLAYED = "played by a worker"


class Stages:
    """Stage and begin of each episode, by rollout id. Of those that are played, the workers know more (`seen`)."""

    def __init__(self) -> None:
        self._stages: dict[str, tuple[str, float]] = {}
        self._seen: dict[str, str] = {}

    def enter(self, rollout_id: str, stage: str) -> None:
        self._stages[rollout_id] = (stage, time.monotonic())

    def leave(self, rollout_id: str) -> None:
        """The episode has come out."""
        self._stages.pop(rollout_id, None)

    def seen(self, found: Mapping[str, str]) -> None:
        """What the workers said of their episodes just now."""
        self._seen = dict(found)

    def of(self, rollout_id: str) -> dict[str, Any]:
        """rollout_id, stage and seconds in it."""
        stage, since = self._stages.get(rollout_id, ("not started", time.monotonic()))
        if stage == PLAYED and rollout_id in self._seen:
            stage = self._seen[rollout_id]
        return {"rollout_id": rollout_id, "stage": stage, "seconds": round(time.monotonic() - since, 1)}

    def of_group(self, group: Group, state: str) -> dict[str, Any]:
        """A group, how many of its members are back, and the stages of the others."""
        back = {result.sample for result in group.results}
        missing = [f"{draw_id(group.draw)}-{sample}" for sample in range(group.n) if sample not in back]
        return {
            "group_id": draw_id(group.draw),
            "task_id": group.task.id,
            "state": state,
            "back": len(back),
            "n": group.n,
            "version": group.version,
            "seconds": round(time.monotonic() - group.began, 1),
            "episodes": [self.of(rollout_id) for rollout_id in missing],
        }


def in_words(group: Mapping[str, Any]) -> str:
    """One group of `of_group` in a line."""
    head = f"group {group['group_id']} ({group['back']}/{group['n']} episodes) for {group['seconds']:.0f} s"
    if not group["episodes"]:
        return f"{head}: {group['state']}"
    listed = "; ".join(f"{e['rollout_id']} {e['stage']} for {e['seconds']:.0f} s" for e in group["episodes"])
    return f"{head}: {listed}"
