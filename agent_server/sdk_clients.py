"""Ready clients of the vendors' SDKs, one for each rollout; they share their connections."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

from agentrl.errors import ConfigError

from .listen import is_loopback

Vendor = Literal["openai", "anthropic"]


def wanted_client(run: Callable[..., Any]) -> Vendor:
    """Which SDK an agent function is written for: the annotation of its second parameter says so, OpenAI's without one.

    Raises ConfigError for a function that does not take (task, client).
    """
    if not inspect.iscoroutinefunction(inspect.unwrap(run)):
        raise ConfigError("an agent function is `async def run(task, client)`.")
    parameters = list(inspect.signature(run).parameters.values())
    try:
        inspect.signature(run).bind(None, None)
    except TypeError as error:
        raise ConfigError("an agent function takes two arguments: `async def run(task, client)`.") from error
    annotation = parameters[1].annotation if len(parameters) > 1 else ""
    named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return "anthropic" if "Anthropic" in named else "openai"


class Clients:
    """Makes clients of one vendor. Connections belong to an event loop, so each loop has a base client of its own. A policy on
    this machine is asked directly, whatever proxy the environment names.
    """

    def __init__(self, vendor: Vendor) -> None:
        self.vendor = vendor
        self._base: Any = None
        self._made_for: tuple[asyncio.AbstractEventLoop, bool] | None = None

    def make(self, base_url: str, api_key: str) -> Any:
        """A client for one rollout; `base_url` ends in /v1, which Anthropic's SDK adds itself."""
        url = base_url if self.vendor == "openai" else base_url.removesuffix("/v1")
        wanted = asyncio.get_running_loop(), not is_loopback(urlsplit(url).hostname or "")
        if self._made_for != wanted:
            self._base, self._made_for = _client(self.vendor, url, api_key, proxies=wanted[1]), wanted
        return self._base.copy(base_url=url, api_key=api_key)


def _client(vendor: Vendor, url: str, api_key: str, *, proxies: bool) -> Any:
    try:
        sdk = importlib.import_module(vendor)
    except ImportError as error:
        raise ConfigError(f"the agent wants the {vendor} package: pip install 'agentrl[agents]'.") from error
    make = sdk.AsyncOpenAI if vendor == "openai" else sdk.AsyncAnthropic
    return make(base_url=url, api_key=api_key, http_client=sdk.DefaultAsyncHttpxClient(trust_env=proxies))
