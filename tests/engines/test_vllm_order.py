"""What VLLMEngine asks of vLLM, and in which order, over a recorded client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.engine import GenerationRequest, Sampling
from agentrl.engines import vllm as engine_module
from agentrl.engines.vllm import VLLMEngine
from agentrl.engines.vllm_options import VLLMOptions
from agentrl.engines.vllm_stats import Stats
from agentrl.engines.weights import WeightPublisher, WeightSource
from agentrl.errors import EngineError


class RecordedLLM:
    """Stands for AsyncLLM: records the calls; `fail` is the one that raises, `hang` the one that never returns."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fail = self.hang = ""
        self.refuse = ""
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"image_token_id": 9}))
        self.renderer = SimpleNamespace(render_cmpl_async=self._render)

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, kwargs) if kwargs else name)
            if name == self.fail:
                raise RuntimeError("no")
            if name == self.hang:
                await asyncio.Event().wait()
            return False if name == self.refuse else None

        call.__name__ = name
        return call

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def _render(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"type": "token", **prompt} for prompt in prompts]

    async def generate(self, prompt: dict[str, Any], params: Any, request_id: str) -> Any:
        self.calls.append(("generate", prompt["cache_salt"]))
        if self.hang == "generate":
            await asyncio.Event().wait()
        spans = [SimpleNamespace(version="4", start=0, end=1)]
        flat = SimpleNamespace(logprobs=[-0.5])
        completion = SimpleNamespace(token_ids=[5], logprobs=flat, weight_versions=spans, finish_reason="stop")
        yield SimpleNamespace(outputs=[completion])


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few names VLLMEngine takes from vLLM, as plain holders of their arguments."""
    transfer, exceptions = ModuleType("base"), ModuleType("exceptions")
    transfer.WeightTransferInitRequest = transfer.WeightTransferUpdateRequest = SimpleNamespace  # type: ignore[attr-defined]
    transfer.WeightTransferInitRequest = lambda init_info: SimpleNamespace(init_info=init_info)  # type: ignore[attr-defined]
    exceptions.VLLMClientError = KeyError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", transfer)
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    monkeypatch.setattr(engine_module, "sampling_params", lambda sampling, stop_token_ids: sampling)


@pytest.fixture
def source() -> Iterator[WeightSource]:
    with WeightPublisher() as publisher:
        yield publisher.publish([("w", torch.ones(2))], 5)


def engine(llm: RecordedLLM, stats: Stats | None = None, **options: Any) -> VLLMEngine:
    return VLLMEngine(llm, VLLMOptions(model="m", **options), 4, stats or Stats(), lambda text, tools: (text, []))


@pytest.mark.parametrize(("kv", "clear"), [("keep", False), ("recompute", True)])
async def test_an_update_pauses_checks_loads_resets_and_resumes(kv: str, clear: bool, source: WeightSource) -> None:
    llm = RecordedLLM()
    subject = engine(llm, kv=kv)
    await subject.pause("keep")
    await subject.update_weights(source, 5)
    await subject.resume()
    assert llm.calls == [
        ("pause_generation", {"mode": "keep", "clear_cache": clear}),
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        ("finish_weight_update", {"weight_version": "5"}),
        "reset_mm_cache",
        "reset_encoder_cache",
        "resume_generation",
    ]
    assert subject.version == 5


async def test_the_salt_is_written_when_the_request_is_admitted(source: WeightSource) -> None:
    llm = RecordedLLM()
    subject = engine(llm)
    await subject.pause("keep")
    waiting = asyncio.create_task(subject.generate(GenerationRequest((1, 2), Sampling())))
    await asyncio.sleep(0)
    await subject.update_weights(source, 5)
    assert not any(call[0] == "generate" for call in llm.calls)
    await subject.resume()
    assert (await waiting).logprobs == (-0.5,)
    assert llm.calls[-1] == ("generate", "weights-5")


async def test_weights_are_loaded_only_while_paused(source: WeightSource) -> None:
    llm = RecordedLLM()
    with pytest.raises(EngineError, match="between pause and resume"):
        await engine(llm).update_weights(source, 5)
    assert llm.calls == []


async def test_a_refused_check_leaves_a_usable_engine(source: WeightSource) -> None:
    llm = RecordedLLM()
    subject = engine(llm)
    llm.fail = "init_weight_transfer_engine"
    await subject.pause("keep")
    with pytest.raises(EngineError, match="update_weights"):
        await subject.update_weights(source, 5)
    await subject.resume()
    assert (await subject.health()).ok
    assert subject.version == 4


@pytest.mark.parametrize("step", ["start_weight_update", "update_weights", "finish_weight_update", "reset_mm_cache"])
async def test_a_load_that_failed_half_way_ends_the_engine(step: str, source: WeightSource) -> None:
    llm = RecordedLLM()
    subject = engine(llm)
    llm.fail = step
    await subject.pause("keep")
    with pytest.raises(EngineError):
        await subject.update_weights(source, 5)
    health = await subject.health()
    assert not health.ok and "did not finish" in health.detail and health.version == 4
    with pytest.raises(EngineError, match="unusable"):
        await asyncio.wait_for(subject.generate(GenerationRequest((1, 2), Sampling())), 5)
    with pytest.raises(EngineError, match="unusable"):
        await subject.resume()


@pytest.mark.parametrize("step", ["pause_generation", "resume_generation"])
async def test_nobody_waits_at_the_door_of_an_engine_that_failed(step: str) -> None:
    llm = RecordedLLM()
    subject = engine(llm)
    llm.fail = step
    with pytest.raises(EngineError, match="RuntimeError: no"):
        await subject.pause("keep")
        await subject.resume()
    await asyncio.wait_for(subject.generate(GenerationRequest((1, 2), Sampling())), 5)


async def test_a_reset_that_says_no_is_an_error(source: WeightSource) -> None:
    llm = RecordedLLM()
    subject = engine(llm)
    llm.refuse = "reset_encoder_cache"
    await subject.pause("keep")
    with pytest.raises(EngineError, match="reset_encoder_cache"):
        await subject.update_weights(source, 5)


async def test_an_update_that_hangs_is_bounded(source: WeightSource) -> None:
    """As long as it is under way, nothing is wrong with the engine."""
    llm = RecordedLLM()
    subject = engine(llm, update_timeout_s=0.05)
    llm.hang = "update_weights"
    await subject.pause("keep")
    updating = asyncio.create_task(subject.update_weights(source, 5))
    for _ in range(9):
        await asyncio.sleep(0)
    assert "update_weights" in llm.calls and (await subject.health()).ok
    with pytest.raises(EngineError, match="longer than"):
        await updating
    assert not (await subject.health()).ok


async def test_a_core_that_brings_nothing_while_it_owes_answers_is_not_healthy() -> None:
    """Neither a pause nor idleness is a silence; one that the last request was given up in ends when the core moves."""
    now = 0.0
    llm, stats = RecordedLLM(), Stats(lambda: now)
    subject = engine(llm, stats, silence_timeout_s=100.0)

    async def healthy_after(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return (await subject.health()).ok

    assert await healthy_after(1000)
    llm.hang = "generate"
    hanging = asyncio.create_task(subject.generate(GenerationRequest((1, 2), Sampling())))
    await asyncio.sleep(0.01)
    assert await healthy_after(90)
    stats.record(None, None)
    assert await healthy_after(90)
    await subject.pause("keep")
    assert await healthy_after(1000)
    await subject.resume()
    assert await healthy_after(90)
    assert not await healthy_after(20)
    assert "no token for 110 s" in (await subject.health()).detail
    hanging.cancel()
    await asyncio.wait([hanging])
    assert not await healthy_after(1)
    stats.record(None, None)
    assert await healthy_after(1000)


def test_the_silence_of_one_core_is_heard_among_the_others() -> None:
    """Of two cores of a data-parallel engine; what it had that was given up meanwhile is awaited no more."""
    now = 0.0
    stats = Stats(lambda: now)

    def says(core: int, running: int, waiting: int = 0, kv: float = 0.0) -> None:
        said = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_skipped_waiting_reqs": 0}
        stats.record(SimpleNamespace(**said, kv_cache_usage=kv), None, engine_idx=core)

    with ExitStack() as three:
        for _ in range(3):
            three.enter_context(stats.owed())
        says(1, 1, kv=0.7)
        for now in (100.0, 200.0):
            says(0, 1, waiting=1, kv=0.2)
            assert (stats.silent_s, stats.running, stats.kv_usage) == (now, 2, 0.7)
        says(1, 1)
        assert stats.silent_s == 0
        now = 300.0
        says(0, 2, waiting=1)
        assert stats.silent_s == 0, "all three are on the other core"
        now = 350.0
        assert stats.silent_s == 50


async def test_an_order_that_is_given_up_ends_the_engine_and_lets_nobody_wait() -> None:
    llm = RecordedLLM()
    subject = engine(llm)
    llm.hang = "pause_generation"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(subject.pause("keep"), 0.02)
    health = await subject.health()
    assert not health.ok and "did not answer to pause" in health.detail
    with pytest.raises(EngineError, match="unusable"):
        await asyncio.wait_for(subject.generate(GenerationRequest((1, 2), Sampling())), 5)
