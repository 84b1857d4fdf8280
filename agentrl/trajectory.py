"""What was said and sampled, token by token: a forest of nodes, and its cut into training rows.

A node is a run of tokens that came from one side: what the environment said (`add`) or what the engine sampled
(`add_sampled`). A context is the path from a root to a node. An agent that rewrites its history branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from .engine import Generation
from .env import Task

ImageSlot = tuple[str, int, int]
"""(sha256 of the picture, start of its placeholders, how many): the start counts from the node's or row's first token."""
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Advantages are float32: a reward beyond it is no verdict."""


@dataclass(eq=False)
class Node:
    """A run of tokens after `parent`. `reward` belongs to the turn sampled here: None, NaN and what float32
    cannot hold (inf, 1e39) = no verdict.
    """

    parent: Node | None = field(repr=False)
    role: str
    token_ids: tuple[int, ...]
    images: tuple[ImageSlot, ...] = ()
    generation: Generation | None = None
    reward: float | None = None
    index: int = 0
    start: int = 0

    @property
    def end(self) -> int:
        """Length of the context that ends with this node."""
        return self.start + len(self.token_ids)

    @property
    def delivered(self) -> bool:
        """Sampled, and given to the agent in full: its tokens are trained."""
        return self.generation is not None and self.generation.finish_reason != "abort" and len(self.token_ids) > 0

    def path(self) -> list[Node]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass
class Row:
    """One training sequence of T tokens; entry t of every array describes token t.

    `loss_mask` is True where the token was sampled and is trained in this row; `logprobs` (behaviour policy) and `versions` are
    0 and -1 where nothing was sampled; `rewards` holds each turn's reward on the turn's last token, where it is trained, so
    that of a turn in which nothing was sampled is in the total alone.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    rewards: NDArray[np.float32]
    images: list[ImageSlot] = field(default_factory=list)
    rollout_id: str = ""
    group_id: str = ""
    task_id: str = ""
    env: str = ""
    total_reward: float | None = None
    score: float | None = None
    truncated: bool = False
    finish_reason: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest trained token; -1 when none is trained."""
        trained = self.versions[self.loss_mask]
        return int(trained.min()) if len(trained) else -1


class Trajectory:
    """One episode; `tools` = those that its last rendered prompt showed. Every sampled token of a delivered generation lands in
    exactly one row with its mask set: the first row that holds it, after exactly the tokens it was sampled after. Aborted
    generations are recorded, never trained.
    """

    def __init__(self, task: Task, rollout_id: str = "", group_id: str = "", env: str = "") -> None:
        self.task = task
        self.rollout_id = rollout_id
        self.group_id = group_id
        self.env = env
        self.nodes: list[Node] = []
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.truncated = False
        self.finish_reason = ""
        self.error: BaseException | None = None
        self._score: float | None = None
        self._no_verdict = False

    def add(self, parent: Node | None, role: str, token_ids: Iterable[int], images: Sequence[ImageSlot] = ()) -> Node:
        """Tokens nobody sampled. Image starts count from the first of these tokens."""
        return self._append(Node(parent, role, tuple(int(i) for i in token_ids), tuple(images)))

    def add_sampled(self, parent: Node | None, generation: Generation) -> Node:
        """What the engine sampled after the context `parent`. Raises ValueError when its parts do not fit together."""
        fault = generation.fault()
        if fault is not None:
            raise ValueError(fault)
        return self._append(Node(parent, "assistant", tuple(generation.token_ids), generation=generation))

    def _append(self, node: Node) -> Node:
        node.index = len(self.nodes)
        node.start = node.parent.end if node.parent else 0
        self.nodes.append(node)
        return node

    # ------------------------------------------------------------------ the verdict

    @property
    def total_reward(self) -> float | None:
        """Sum of the rewards given; None when none was given, the last word was "no verdict", the episode failed, or float32
        cannot hold the sum.
        """
        given = [node.reward for node in self.nodes if node.reward is not None]
        if self._no_verdict or self.error is not None or not given or not _is_verdict(given[-1]):
            return None
        total = float(sum(reward for reward in given if _is_verdict(reward)))
        return total if _is_verdict(total) else None

    def withhold_verdict(self) -> None:
        """The last step gave no verdict: whatever was earned before, the rollout has none."""
        self._no_verdict = True

    @property
    def score(self) -> float | None:
        """0..1, for filter and pass@k: the last one given, else the total reward. None without a verdict."""
        if self.total_reward is None:
            return None
        return self.total_reward if self._score is None else self._score

    @score.setter
    def score(self, value: float | None) -> None:
        self._score = None if value is None or not math.isfinite(value) else float(value)

    # ------------------------------------------------------------------ training rows

    @property
    def sampled(self) -> list[Node]:
        """Delivered generations, in the order in which they were sampled."""
        return [node for node in self.nodes if node.delivered]

    def rows(self) -> list[Row]:
        """The training rows, in order of their first trained token."""
        taken: set[int] = set()
        rows: list[tuple[int, Row]] = []
        for leaf in self._leaves():
            path = leaf.path()
            fresh = [node.index for node in path if node.delivered and node.index not in taken]
            rows.append((fresh[0], self._row(path, set(fresh))))
            taken.update(fresh)
        return [row for _, row in sorted(rows, key=lambda pair: pair[0])]

    def _leaves(self) -> Iterator[Node]:
        """Delivered nodes with no delivered node below them, depth first, so a shared prefix goes to the oldest branch."""
        inner: set[int] = set()
        for node in self.sampled:
            inner.update(above.index for above in node.path()[:-1])
        leaves = [node for node in self.sampled if node.index not in inner]
        return iter(sorted(leaves, key=lambda leaf: [node.index for node in leaf.path()]))

    def _row(self, path: list[Node], fresh: set[int]) -> Row:
        length = path[-1].end
        row = Row(
            token_ids=np.fromiter((i for node in path for i in node.token_ids), np.int32, length),
            loss_mask=np.zeros(length, np.bool_),
            logprobs=np.zeros(length, np.float32),
            versions=np.full(length, -1, np.int32),
            rewards=np.zeros(length, np.float32),
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            task_id=self.task.id,
            env=self.env,
            total_reward=self.total_reward,
            score=self.score,
            truncated=self.truncated,
            finish_reason=self.finish_reason,
        )
        for node in path:
            row.images += [(sha, node.start + start, count) for sha, start, count in node.images]
            if node.generation is None:
                continue
            row.logprobs[node.start : node.end] = node.generation.logprobs
            for span in node.generation.version_spans:
                row.versions[node.start + span.start : node.start + span.end] = span.version
            if node.index in fresh:
                row.loss_mask[node.start : node.end] = True
                row.rewards[node.end - 1] = node.reward if _is_verdict(node.reward) else 0.0
        return row


def _is_verdict(reward: float | None) -> TypeGuard[float]:
    return reward is not None and abs(reward) <= LARGEST_REWARD
