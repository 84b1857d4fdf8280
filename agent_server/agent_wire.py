"""The agent protocol: what the trainer orders of an agent server, and what comes back. Both sides import this."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentrl.schemas import TaskForm, Wire

MOST_WAIT_S = 60.0
"""Longest a server holds a request for an episode's end."""


class PolicyAccess(Wire):
    """Where the episode's agent finds the policy, and the key of this rollout."""

    base_url: str = Field(pattern="^https?://[!-~]+$")
    anthropic_base_url: str = Field(pattern="^https?://[!-~]+$")
    api_key: str = Field(repr=False, pattern="^[!-~]+$")
    model: str


class EpisodeRequest(Wire):
    """`POST /v1/episodes`. A repeat with the same idempotency_key is the same episode; a higher attempt supersedes."""

    episode_id: str = Field(min_length=1, max_length=200)
    attempt: int = Field(ge=0)
    task: TaskForm
    policy: PolicyAccess
    limits: dict[str, Any] = {}
    idempotency_key: str = Field(min_length=1, max_length=200)


class EpisodeReply(Wire):
    """The state of an episode: running (202), or done (200) with what the agent returned; absent fields were not said."""

    episode_id: str = ""
    attempt: int | None = None
    status: str = "done"
    reward: Any = None
    score: Any = None
    metrics: dict[str, Any] | None = None

    def outcome(self) -> dict[str, Any]:
        """What the agent said of its own work."""
        said = self.model_dump(exclude_unset=True)
        return {name: said[name] for name in ("reward", "score", "metrics") if name in said}
