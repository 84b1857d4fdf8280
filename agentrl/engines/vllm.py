"""The Engine over vLLM's AsyncLLM: token ids in, sampled ids with log-probs and weight versions out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..engine import Generation, GenerationRequest, Health, Memory, PauseMode, Sampling, Span
from ..errors import EngineError
from ..messages import ToolCall
from ..torchvision_ops import ensure_torchvision_imports
from .placeholders import check_expansion, collapse, refusal
from .tool_parsing import MARKERS, Extract, parse_tool_calls, parser_class, vllm_extract
from .vllm_noise import silence_expected
from .vllm_options import VLLMOptions, engine_arguments
from .vllm_plugin import backend, register
from .vllm_stats import Stats
from .weights import WeightSource

_FINISHES = ("stop", "length", "abort")
_MAX_SEED = 2**63


class VLLMEngine:
    """Implements `Engine`. Lives in one event loop; `launch` makes one, the constructor takes a ready AsyncLLM.

    Invariants: no request is admitted between `pause` and `resume`; the prefix cache is salted with the weight version
    at admission, so no request reads keys and values of older weights; `version` moves only after a load. A load that
    failed half-way, or another order that was given up before vLLM had answered, leaves the engine unusable: every later
    call raises EngineError, and `health` says why.
    """

    def __init__(self, llm: Any, options: VLLMOptions, version: int, stats: Stats, extract: Extract) -> None:
        self.version = version
        self._llm = llm
        self._options = options
        self._stats = stats
        self._extract = extract
        self._open = asyncio.Event()
        self._open.set()
        self._broken = ""
        self._image_token_id = _image_token_id(llm.model_config.hf_config) if options.max_images else None

    async def generate(self, request: GenerationRequest) -> Generation:
        async with self._engine_faults("generate"):
            prompt = await self._render(request)
            params = sampling_params(request.sampling, self._options.stop_token_ids)
            await self._open.wait()
            self._refuse_broken()
            prompt["cache_salt"] = f"weights-{self.version}"
            stream = self._llm.generate(prompt, params, request_id=_unique(request.request_id))
            with self._stats.owed():
                outputs = [output async for output in stream]
        if not outputs:
            raise EngineError("vLLM ended a request without an output")
        return as_generation(outputs[-1].outputs[0])

    async def _render(self, request: GenerationRequest) -> dict[str, Any]:
        """vLLM's engine input: images processed, placeholders expanded and checked against the request's ids."""
        ids = collapse(request.token_ids, self._image_token_id, len(request.images))
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if request.images:
            prompt["multi_modal_data"] = {"image": await asyncio.to_thread(lambda: [i.pil for i in request.images])}
            prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
        (rendered,) = await self._llm.renderer.render_cmpl_async([prompt])
        check_expansion(request.token_ids, rendered["prompt_token_ids"])
        return rendered

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return parse_tool_calls(text, tools, self._extract, MARKERS.get(self._options.tool_parser))

    async def pause(self, mode: PauseMode) -> None:
        """Close the door, then freeze ("keep"), drain ("wait") or abort what runs. Caches go unless KV is kept."""
        self._open.clear()
        keep = mode == "keep" and self._options.kv == "keep"
        try:
            async with self._order("pause"):
                await self._llm.pause_generation(mode=mode, clear_cache=not keep)
            self._stats.freeze(True)
        except (EngineError, asyncio.CancelledError):
            self._open.set()
            raise

    async def resume(self) -> None:
        """Open the door, whatever vLLM says: those who wait at it must learn of a dead engine too."""
        self._stats.freeze(False)
        try:
            async with self._order("resume"):
                await self._llm.resume_generation()
        finally:
            self._open.set()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Load what a `Publisher` published. Only between `pause` and `resume`; bounded by `update_timeout_s`."""
        self._refuse_broken()
        if self._open.is_set():
            raise EngineError("update_weights is called between pause and resume only")
        if source.transport != self._options.transport:
            raise EngineError(
                f"weights by {source.transport} for an engine that takes them by {self._options.transport}"
            )
        timeout_s = self._options.update_timeout_s
        try:
            async with self._order("update_weights"), asyncio.timeout(timeout_s):
                await self._load(source, version)
        except TimeoutError as error:
            raise EngineError(f"the update to weight version {version} took longer than {timeout_s} s") from error
        finally:
            if self._broken:
                self._open.set()
        self.version = version

    async def _load(self, source: WeightSource, version: int) -> None:
        """Check, then load. Until the check has passed nothing is touched; after that only the end makes it whole."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest({"source": source.to_dict()}))
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest())
            await self._llm.finish_weight_update(weight_version=str(version))
            for reset in (self._llm.reset_mm_cache, self._llm.reset_encoder_cache):
                if await reset() is False:
                    raise EngineError(f"vLLM refused {reset.__name__} after the update to weight version {version}")
        except BaseException:
            self._broken = f"the update to weight version {version} did not finish"
            raise

    async def sleep(self) -> None:
        """Free the device: KV cache and weights are gone, and stay so until `wake` and an update."""
        self._refuse_broken()
        if self._open.is_set():
            raise EngineError("sleep is called between pause and resume only")
        async with self._order("sleep"):
            await self._llm.sleep(level=2)

    async def wake(self, memory: Memory) -> None:
        async with self._order("wake"):
            await self._llm.wake_up(tags=[memory])

    async def health(self) -> Health:
        detail = self._broken or ("the engine process is gone" if self._llm.errored else self._stuck())
        unfinished = self._llm.get_num_unfinished_requests()
        # The scheduler reports only when it steps: after an abort its last report may be of requests that are gone.
        running = min(self._stats.running, unfinished)
        kv_usage = self._stats.kv_usage if unfinished else 0.0
        waiting = unfinished - running
        return Health(not detail, self.version, running, waiting, kv_usage, self._stats.preemptions, detail)

    def _stuck(self) -> str:
        """What is wrong with a core whose process lives and brings nothing."""
        silent = self._stats.silent_s
        if silent <= self._options.silence_timeout_s:
            return ""
        return f"it has brought no token for {silent:.0f} s while answers were awaited (engine.silence-timeout-s)"

    def shutdown(self) -> None:
        """End vLLM's processes: two seconds to leave, then killed; they have nothing to save. The last call."""
        self._llm.shutdown(timeout=2.0)
        del self._llm  # it cleans up when it goes, and cannot while the interpreter goes

    def _refuse_broken(self) -> None:
        if self._broken:
            raise EngineError(f"the engine is unusable: {self._broken}")

    @asynccontextmanager
    async def _order(self, doing: str) -> AsyncIterator[None]:
        """A call after which the engine is in another state; given up half-way, nobody knows in which."""
        self._refuse_broken()
        try:
            async with self._engine_faults(doing):
                yield
        except (TimeoutError, asyncio.CancelledError):
            self._broken = self._broken or f"it did not answer to {doing}"
            raise

    @asynccontextmanager
    async def _engine_faults(self, doing: str) -> AsyncIterator[None]:
        """The fault boundary to vLLM: whatever it raises becomes an EngineError that survives pickling."""
        try:
            yield
        except (EngineError, TimeoutError):
            raise
        except Exception as error:
            from vllm.exceptions import VLLMClientError

            cause = error.__cause__ or error
            message = f"vLLM failed in {doing}: {type(cause).__name__}: {cause}"
            raise (refusal(message) if isinstance(cause, VLLMClientError) else EngineError(message)) from None


async def launch(options: VLLMOptions, version: int = 0) -> VLLMEngine:
    """Start vLLM in this process's children and label its weights `version`. Its environment is set already."""
    silence_expected()
    patched = ensure_torchvision_imports() is not None
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = parser_class(options.tool_parser)
    register()
    if patched:
        _inspect_model_here(options)
    stats = Stats()
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**engine_arguments(options), weight_transfer_config={"backend": backend(options.transport)}),
        stat_loggers=[lambda config, index: stats],
    )
    try:
        extract = vllm_extract(parser, llm.get_tokenizer())
        await llm.update_weight_version(str(version))
        return VLLMEngine(llm, options, version, stats, extract)
    finally:
        del llm  # tracebacks that imports of vLLM's keep hold this frame for ever


def _inspect_model_here(options: VLLMOptions) -> None:
    """Spare vLLM the helper process in which it looks at the model class: there torchvision would not import."""
    from transformers import AutoConfig
    from vllm.model_executor.models.registry import ModelRegistry

    config = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    for architecture in config.architectures or ():
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def sampling_params(sampling: Sampling, stop_token_ids: tuple[int, ...]) -> Any:
    """Every parameter that shapes the distribution or the length, explicitly; the checkpoint's defaults never count."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    schema = sampling.json_schema
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=None if sampling.seed is None else sampling.seed % _MAX_SEED,
        max_tokens=sampling.max_new_tokens,
        min_tokens=0,
        stop=list(sampling.stop),
        stop_token_ids=list(stop_token_ids),
        ignore_eos=schema is None,  # it is the only token that vLLM's grammars end with
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_generation(output: Any) -> Generation:
    """vLLM's completion as ours. Raises EngineError for an end that is neither stop, length nor abort."""
    if output.finish_reason not in _FINISHES:
        raise EngineError(f"vLLM ended a request with {output.finish_reason!r}")
    ids = tuple(output.token_ids)
    logprobs = tuple(map(float, output.logprobs.logprobs)) if ids else ()
    spans = tuple(Span(int(span.version), span.start, span.end) for span in output.weight_versions or ())
    return Generation(ids, logprobs, spans, output.finish_reason)


def _image_token_id(hf_config: Any) -> int | None:
    values = hf_config.to_dict()
    return values.get("image_token_id", values.get("image_token_index"))


def _unique(request_id: str) -> str:
    """vLLM wants ids that are never in use twice; a retry may well overlap its first attempt's abort."""
    return f"{request_id}-{uuid.uuid4().hex[:12]}"
