"""Who is to blame when an episode or a run fails.

Each class says whose fault it was and whether trying again can help. The name of the class is the key of the
`errors/<class>` metrics, so a new kind of failure is a new class here.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of every error agentrl raises on purpose; `retryable` = the same attempt may succeed next time."""

    retryable = False


class EnvError(AgentRLError):
    """The user's environment raised, hung or returned what the contract forbids. Never retried: it is a bug."""


class AgentError(AgentRLError):
    """The user's agent program (executor, function agent, remote agent) raised or broke the protocol."""


class EngineError(AgentRLError):
    """The inference engine refused or lost a request, or answered with something other than what was asked."""

    retryable = True


class InfrastructureError(AgentRLError):
    """A process, host, connection or service failed underneath: nobody's verdict, so the attempt is repeated."""

    retryable = True


class StoreFullError(InfrastructureError):
    """Ray's object store has no room for what travels between processes, nor has the disk behind it."""


class BusyError(InfrastructureError):
    """A service that works has no place free. Who waits for one has no other bound than the episode's own."""


class ConfigError(AgentRLError):
    """The user asked for something that cannot be. The message is one paragraph and names the flag."""


class DataError(AgentRLError):
    """A dataset, row, image or model folder is not what it should be. The message names the row or path."""


class RunStoppedError(AgentRLError):
    """The run cannot go on; the message says why."""


def error_class(error: BaseException) -> str:
    """The metric key of an error: the name of its class, or of the class here that something else was mixed into (Ray
    does that to what an actor raised); `InfrastructureError` for lost processes and connections, `EnvError` for the rest.
    """
    if isinstance(error, AgentRLError):
        kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, AgentRLError)]
        return next(name for name in kinds if name.isidentifier())
    if isinstance(error, ConnectionError | TimeoutError):
        return InfrastructureError.__name__
    return EnvError.__name__
