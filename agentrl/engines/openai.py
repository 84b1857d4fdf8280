"""A model that someone else serves, through OpenAI's chat API: to try an environment or agent, never to train.

Such a server takes messages and gives text. The messages of a request are those its prompt was rendered from; the ids of a reply
are its text in our tokenizer, without log-probabilities.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import OrderedDict
from typing import Any

import aiohttp

from ..engine import Generation, GenerationRequest, Health, PauseMode, Sampling, Span
from ..errors import EngineError
from ..messages import Image, Message, ToolCall
from ..renderer import Prompt, Renderer
from .hermes import END, START, parse_hermes
from .placeholders import refusal

PROMPTS_KEPT = 4096
BACKOFF_S = (0.5, 1.0, 2.0)
PREFIX = "openai:"


class OpenAIEngine:
    """Implements `Engine` over `{url}/chat/completions`. `model` None = the first that the server lists."""

    def __init__(
        self,
        url: str,
        renderer: Renderer,
        *,
        model: str | None = None,
        token: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.version = 0
        self._url = url.rstrip("/")
        self._renderer = renderer
        self._model = model
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._prompts: OrderedDict[tuple[int, ...], Prompt] = OrderedDict()
        renderer.seen = self._remember

    def _remember(self, prompt: Prompt) -> None:
        self._prompts[prompt.token_ids] = prompt
        self._prompts.move_to_end(prompt.token_ids)
        while len(self._prompts) > PROMPTS_KEPT:
            self._prompts.popitem(last=False)

    async def generate(self, request: GenerationRequest) -> Generation:
        prompt = self._prompts.get(request.token_ids)
        if prompt is None:
            raise EngineError("an engine behind a chat API takes rendered conversations, not ids of another make")
        async with aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as http:
            if self._model is None:
                self._model = _first_model(await self._ask(http, "GET", "models"))
            body = {"model": self._model, "messages": [_as_openai(message) for message in prompt.messages]}
            body |= {"tools": list(prompt.tools)} if prompt.tools else {}
            answer = await self._ask(http, "POST", "chat/completions", json=body | _options(request.sampling))
        return self._generation(_choice(answer), request.sampling.max_new_tokens)

    async def _ask(self, http: aiohttp.ClientSession, method: str, path: str, **options: Any) -> Any:
        """The JSON of an answer; what may pass is asked again. Raises EngineError."""
        refused = False
        for pause in (*BACKOFF_S, None):
            try:
                async with http.request(method, f"{self._url}/{path}", **options) as response:
                    text = await response.text()
                if response.status == 200:
                    return json.loads(text)
                why, again = f"HTTP {response.status}: {text[:300]}", response.status in (429, 500, 502, 503, 504)
                refused = response.status in (400, 413, 422)
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                why, again = f"{type(error).__name__}: {error}", True
            except ValueError as error:
                why, again = f"no JSON: {error}", False
            if pause is None or not again:
                break
            await asyncio.sleep(pause)
        raise (refusal if refused else EngineError)(f"{self._url}/{path}: {why}")

    def _generation(self, choice: dict[str, Any], most: int) -> Generation:
        tokenizer = self._renderer.tokenizer
        text = _text(choice["message"])
        ids = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        if finish == "stop" and tokenizer.eos_token_id is not None:
            ids.append(int(tokenizer.eos_token_id))
        spans = (Span(0, 0, len(ids)),) if ids else ()
        return Generation(tuple(ids), (0.0,) * len(ids), spans, finish)

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return parse_hermes(text)

    async def pause(self, mode: PauseMode) -> None:
        raise EngineError("a model that someone else serves takes no weights")

    async def resume(self) -> None:
        """Nothing is ever paused."""

    async def update_weights(self, source: Any, version: int) -> None:
        raise EngineError("a model that someone else serves takes no weights")

    async def health(self) -> Health:
        return Health(ok=True, version=0)


def _options(sampling: Sampling) -> dict[str, Any]:
    """What every server knows; the rest only where it says something."""
    options: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens}
    extra = {
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "stop": list(sampling.stop) or None,
        "seed": None if sampling.seed is None else sampling.seed % 2**31,
    }
    return options | {name: value for name, value in extra.items() if value is not None}


def _as_openai(message: Message) -> dict[str, Any]:
    shown = {**message, "content": _content(message.get("content"))}
    if message.get("tool_calls"):
        shown["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return shown


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_picture(part) if isinstance(part, Image) else {"type": "text", "text": str(part)} for part in content]


def _picture(image: Image) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image.png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _text(message: dict[str, Any]) -> str:
    """What a model of ours would have written: the text, then the calls in Hermes' syntax."""
    pieces = [message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        pieces.append(f'{START}\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n{END}')
    return "\n".join(piece for piece in pieces if piece)


def _choice(answer: Any) -> dict[str, Any]:
    try:
        choice = answer["choices"][0]
        _text(choice["message"])
        return dict(choice)
    except (LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"this is no chat completion: {str(answer)[:300]}") from error


def _first_model(answer: Any) -> str:
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise EngineError("the server lists no model: name one with --engine.model") from error
