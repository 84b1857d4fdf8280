"""What went wrong with a request, in the shape that each vendor's SDK reads.

Non-retryable errors carry `x-should-retry: false`: both SDKs would retry some of them otherwise.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentrl.errors import AgentRLError, ConfigError, DataError, EngineError
from agentrl.policy_ask import ContextLengthError, SessionEndedError

log = logging.getLogger(__name__)


class UnknownKeyError(AgentRLError):
    """The request's key opens no rollout."""


class UnknownThreadError(AgentRLError):
    """The request continues a conversation that is not kept here. Anthropic's SDK then sends the whole of it."""


class BodyError(AgentRLError):
    """The body is not what can be read: too large, no JSON, not an object. `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Fault:
    """An error as HTTP sees it; `code` is OpenAI's error.code and Anthropic's error_code, `kind` Anthropic's error.type."""

    status: int
    code: str
    kind: str
    message: str

    @property
    def retryable(self) -> bool:
        return self.status in (429, 503)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        return headers | ({"retry-after": "1"} if self.retryable else {})

    def openai(self) -> dict[str, Any]:
        """OpenAI's form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    def both(self) -> dict[str, Any]:
        """The inner object of both."""
        return {**self.openai()["error"], **self.anthropic()["error"]}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's form."""
        error = {"type": self.kind, "message": self.message, "code": self.code, "details": {"error_code": self.code}}
        return {"type": "error", "error": error}


def fault_of(error: Exception) -> Fault:
    """The fault boundary of the policy server: every error has a status; unknown ones are logged and tell nothing."""
    message = str(error)
    if isinstance(error, UnknownKeyError):
        return Fault(401, "invalid_api_key", "authentication_error", message)
    if isinstance(error, UnknownThreadError):
        return Fault(404, "thread_not_found", "not_found_error", message)
    if isinstance(error, SessionEndedError):
        return Fault(410, "rollout_ended", "invalid_request_error", message)
    if isinstance(error, ContextLengthError):
        return Fault(400, "context_length_exceeded", "invalid_request_error", message)
    if isinstance(error, BodyError):
        kind = "request_too_large" if error.status == 413 else "invalid_request_error"
        return Fault(error.status, kind, kind, message)
    if isinstance(error, ValidationError):
        return Fault(400, "invalid_request_error", "invalid_request_error", explain(error))
    if isinstance(error, DataError | ConfigError) or (isinstance(error, EngineError) and not error.retryable):
        return Fault(400, "invalid_request_error", "invalid_request_error", message)
    if isinstance(error, EngineError):
        return Fault(503, "engine_unavailable", "overloaded_error", message)
    log.error("a policy request failed", exc_info=error)
    return Fault(500, "internal_error", "api_error", "internal error")


def explain(error: ValidationError) -> str:
    """One clause a mistake: where, and what is wrong."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(str(part) for part in d['loc']) or 'body'}: {d['msg']}" for d in details[:5])
