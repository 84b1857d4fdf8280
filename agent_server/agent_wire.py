"""The agent protocol: what the trainer orders of an agent server, and what comes back. Both sides import this."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.engine import Limits
from agentrl.env import Task
from agentrl.errors import DataError
from agentrl.messages import Image

MOST_WAIT_S = 60.0
"""Longest a server holds a request for an episode's end."""


class PolicyAccess(BaseModel):
    """Where the episode's agent finds the policy, and the key of this rollout."""

    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str


class EpisodeRequest(BaseModel):
    """`POST /v1/episodes`. A repeat with the same idempotency_key is the same episode; a higher attempt supersedes."""

    model_config = ConfigDict(extra="ignore")

    episode_id: str = Field(min_length=1, max_length=200)
    attempt: int = Field(ge=0)
    task: dict[str, Any]
    policy: PolicyAccess
    limits: dict[str, Any] = {}
    idempotency_key: str = Field(min_length=1, max_length=200)


class EpisodeReply(BaseModel):
    """The state of an episode: running (202), or done (200) with what the agent returned; absent fields were not said."""

    model_config = ConfigDict(extra="ignore")

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


def task_to_json(task: Task) -> dict[str, Any]:
    """{"id", "prompt", "label", "images", "row"} in JSON values; pictures as parts with base64 PNG data."""
    return {
        "id": task.id,
        "prompt": _plain(task.prompt),
        "label": _plain(task.label),
        "images": [_picture(Image(image)) for image in task.images],
        "row": _plain(task.row),
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Image):
        return _picture(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return _picture(Image(value))
    except DataError:
        return str(value)


def _picture(image: Image) -> dict[str, Any]:
    return {"type": "image", "sha256": image.sha256, "data": base64.b64encode(image.png).decode()}


def task_from_json(fields: Mapping[str, Any]) -> Task:
    """The task an agent is given; pictures are `Image`s again. Raises DataError."""
    if not isinstance(fields.get("id"), str):
        raise DataError("a task needs an id")
    images = fields.get("images") or []
    row = fields.get("row") or {}
    if not isinstance(images, list) or not isinstance(row, dict):
        raise DataError("a task's images are a list and its row an object")
    pictures = tuple(_restored(image) for image in images)
    return Task(fields["id"], _restored(fields.get("prompt")), _restored(fields.get("label")), pictures, _restored(row))


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("type") == "image" and isinstance(value.get("data"), str):
            return Image(f"data:image/png;base64,{value['data']}")
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def limits_to_json(limits: Limits) -> dict[str, Any]:
    return dict(vars(limits))
