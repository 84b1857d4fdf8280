"""Requests and replies of the env server and the reward server: the contract that servers and clients import.

The forms inside (observation, action, task) are read and written by `wire.py`, which says what they are.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MAX_SEED = 2**64
MAX_INDEX = 2**53


class Wire(BaseModel):
    """Unknown keys are left out: either side may be newer."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TaskForm(Wire):
    """A task; `label` and `row` are any JSON, `images` are parts with data, `tools` OpenAI function schemas, `env` says of
    which of a run's environments it is.
    """

    id: str = Field(max_length=1000)
    prompt: str | list[dict[str, Any]] | None = None
    label: Any = None
    images: list[dict[str, Any]] = []
    row: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    env: str = ""


class OpenSession(Wire):
    """`POST /v1/sessions`. Without a task the env draws one by the seed; `options` go to `reset`."""

    env: str
    task: TaskForm | None = None
    seed: int | None = Field(None, ge=0, lt=MAX_SEED)
    options: dict[str, Any] = {}
    idempotency_key: str | None = Field(None, min_length=1, max_length=200)


class SessionReply(Wire):
    """`lease_s`: how long the session lives without a call. `task` is there when the env drew it."""

    session_id: str
    observation: str | list[dict[str, Any]] | dict[str, Any]
    info: dict[str, Any] = {}
    lease_s: float = Field(600.0, gt=0)
    tools: list[dict[str, Any]] = []
    task: TaskForm | None = None


class ActionForm(Wire):
    """What the model did. Each of `tool_calls` is `{"id", "name", "arguments"}`."""

    text: str = ""
    tool_calls: list[dict[str, Any]] = []
    finish_reason: str = "stop"


class StepRequest(Wire):
    """`POST /v1/sessions/{id}/step`. `index` counts the session's steps from 0."""

    index: int = Field(ge=0, lt=MAX_INDEX)
    action: str | ActionForm

    @property
    def form(self) -> Any:
        """The action as plain values, as `wire.read_action` takes it."""
        return self.action if isinstance(self.action, str) else self.action.model_dump(exclude_unset=True)


class StepReply(Wire):
    """`reward` null, absent or not a number = no verdict."""

    index: int
    observation: str | list[dict[str, Any]] | dict[str, Any] = ""
    reward: Any = None
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}


class LeaseReply(Wire):
    """`POST /v1/sessions/{id}/heartbeat`."""

    lease_s: float


class EnvForm(Wire):
    """One served environment. `task_counts` has null where only reading the tasks to their end would tell."""

    name: str
    description: str = ""
    tools: list[dict[str, Any]] = []
    max_turns: int | None = None
    splits: list[str] = []
    task_counts: dict[str, int | None] = {}


class EnvsReply(Wire):
    """`GET /v1/envs`."""

    envs: list[EnvForm]


class TasksReply(Wire):
    """`GET /v1/envs/{name}/tasks`. `total` null = unknown; the last page is shorter than `limit`."""

    tasks: list[TaskForm]
    offset: int
    total: int | None = None


class ErrorDetail(Wire):
    kind: str = Field(alias="class")
    message: str
    retryable: bool


class ErrorReply(Wire):
    """What every answer that is an error says."""

    error: ErrorDetail


class RewardRequest(Wire):
    """`POST /v1/reward`: three lists of one length; `labels` may be left out."""

    prompts: list[Any]
    completions: list[str]
    labels: list[Any] | None = None


class RewardReply(Wire):
    """One entry for each completion; a reward that is null is no verdict."""

    rewards: list[float | None]
    scores: list[float | None] = []
    metrics: list[dict[str, float]] = []


class GetRewardRequest(Wire):
    """OpenRLHF's `POST /get_reward`. Each `query` is a prompt with its completion."""

    query: list[str]
    prompts: list[Any] = []
    labels: list[Any] | None = None
