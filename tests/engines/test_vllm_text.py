"""Real vLLM on text models, tied and untied: log-probs before and after updates, spans, caches, seeds, aborts, parsing."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from agentrl import Env, MultiTurnExecutor, Renderer, Task
from agentrl.engine import Generation, GenerationRequest, Limits, Sampling
from agentrl.engines.vllm_actor import RayEngine
from agentrl.errors import EngineError
from agentrl.rollout.episode import EpisodeOrder
from agentrl.rollout.worker import EpisodePlayer

from . import reference, tiny

pytestmark = pytest.mark.slow
STOP = tiny.token_id("<|im_end|>")


class Pair:
    """An engine and the HF model that holds the same weights. Tests move both, in file order."""

    def __init__(self, engine: RayEngine, model: Any, *, tied: bool) -> None:
        self.engine, self.model, self.tied, self.version = engine, model, tied, 0

    async def sample(self, prompt: list[int], tokens: int = 24, **sampling: Any) -> Generation:
        request = GenerationRequest(tuple(prompt), Sampling(max_new_tokens=tokens, **sampling))
        return await self.engine.generate(request)

    async def update(self, *, with_head: bool = True) -> None:
        self.version += 1
        state = self.model.state_dict()
        if not with_head:
            del state["lm_head.weight"]
        await reference.update(self.engine, state.items(), self.version)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., RayEngine]
) -> Pair:
    tied = request.param == "tied"
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = tiny.text_model(folder, tied=tied)
    kv = "keep" if tied else "recompute"
    engine = launch(folder, kv=kv, stop_token_ids=(STOP,), silence_timeout_s=3.0)
    return Pair(engine, model, tied=tied)


async def test_logprobs_match_before_and_after_updates(pair: Pair) -> None:
    prompt = list(range(40))
    for seed in (None, 1, 2):
        if seed is not None:
            reference.disturb(pair.model, seed)
            await pair.update(with_head=not pair.tied or seed == 1)
        for temperature in (1.0, 0.7):
            generation = await pair.sample(prompt, seed=11, temperature=temperature)
            expected = reference.hf_logprobs(pair.model, prompt, generation.token_ids, temperature)
            assert reference.worst(generation, expected) < 1e-4
            assert {span.version for span in generation.version_spans} == {pair.version}


async def test_greedy_takes_the_likeliest(pair: Pair) -> None:
    prompt = [5, 6, 7]
    generation = await pair.sample(prompt, tokens=8, temperature=0.0)
    assert generation.token_ids == (await pair.sample(prompt, tokens=8, temperature=0.0)).token_ids
    expected = reference.hf_logprobs(pair.model, prompt, generation.token_ids)
    assert reference.worst(generation, expected) < 1e-4


async def test_seeds_repeat_and_differ(pair: Pair) -> None:
    seeds = [3, 3, 2**63 + 5, 2**64 - 1, -1, 4]
    runs = await asyncio.gather(*(pair.sample([1, 2, 3], seed=seed) for seed in seeds))
    assert runs[0].token_ids == runs[1].token_ids
    assert len({run.token_ids for run in runs}) >= 4
    assert (await pair.sample([1, 2, 3], seed=2**64 - 1)).token_ids == runs[3].token_ids


async def test_a_sampled_stop_token_is_in_the_record(pair: Pair) -> None:
    runs = await asyncio.gather(*(pair.sample([9, i], tokens=400, seed=i) for i in range(32)))
    stopped = [run for run in runs if run.finish_reason == "stop"]
    assert stopped
    assert all(run.token_ids[-1] == STOP and STOP not in run.token_ids[:-1] for run in stopped)
    assert all(len(run.token_ids) == len(run.logprobs) for run in runs)


async def test_spans_across_an_update_with_running_requests(pair: Pair) -> None:
    prompts = [[i, *range(20)] for i in range(16)]
    old = pair.version
    tasks = [asyncio.create_task(pair.sample(p, tokens=600, seed=i)) for i, p in enumerate(prompts)]
    await reference.until_running(pair.engine, 8)
    before = pair.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    reference.disturb(pair.model, 5)
    await pair.update()
    runs = await asyncio.gather(*tasks)
    spanning = [(p, run) for p, run in zip(prompts, runs, strict=True) if len(run.version_spans) == 2]
    assert len(spanning) >= 4
    for _, run in spanning:
        first, second = run.version_spans
        assert (first.version, second.version) == (old, pair.version)
        assert (first.start, first.end, second.end) == (0, second.start, len(run.token_ids))
    after, cuts = pair.model, [run.version_spans[0].end for _, run in spanning]
    old_model = copy.deepcopy(after)
    old_model.load_state_dict(before)
    for (prompt, run), cut in zip(spanning, cuts, strict=True):
        assert reference.worst(run, reference.hf_logprobs(old_model, prompt, run.token_ids), end=cut) < 1e-4
        recomputed = reference.hf_logprobs(after, prompt, run.token_ids)
        kept = recomputed.clone()
        kept[cut:] = reference.kept_logprobs(old_model, after, prompt, run.token_ids, cut)
        expected, other = (kept, recomputed) if pair.tied else (recomputed, kept)
        assert reference.worst(run, expected, start=cut) < 1e-4
        assert reference.worst(run, other, start=cut) > 1e-3, "keep and recompute are told apart"


class Talk(Env):
    """Three turns."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.turn = 0
        return "go", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return "go on", 1.0, self.turn == 3, False, {}


async def test_rows_of_several_turns_across_updates(pair: Pair) -> None:
    """Updates within turns: what each token of the row is stamped with is the version whose log-probability it has. With the
    KV cache kept, what follows an update within its turn is of both.
    """
    player = EpisodePlayer([pair.engine], Renderer(tiny.tokenizer()), MultiTurnExecutor(Talk, "talk"), env="talk")
    limits = Limits(max_turns=3, max_new_tokens=200, max_len=1000)
    orders = [
        EpisodeOrder(f"{i}", "g", 0, i, Task("t"), 0, seed, Sampling(max_new_tokens=200), limits)
        for i, seed in enumerate(range(100, 108))
    ]
    playing = [asyncio.create_task(player.play(order)) for order in orders]
    models = {pair.version: copy.deepcopy(pair.model)}
    for seed in (31, 32):
        await reference.until_running(pair.engine, 1)
        reference.disturb(pair.model, seed)
        await pair.update()
        models[pair.version] = copy.deepcopy(pair.model)
    results = await asyncio.gather(*playing)
    assert all(result.error is None and len(result.rows) == 1 for result in results)
    rows = [result.rows[0] for result in results]
    assert any(len(set(row.versions[row.loss_mask])) > 1 for row in rows)
    checked = set()
    for row in rows:
        sampled = row.loss_mask
        assert (row.versions[~sampled] == -1).all() and list(row.versions[sampled]) == sorted(row.versions[sampled])
        starts = np.flatnonzero(np.diff(sampled, prepend=False) & sampled)
        assert len(starts) == 3
        begun = row.versions[starts[np.maximum(np.searchsorted(starts, np.arange(len(row)), "right") - 1, 0)]]
        for version, model in models.items():
            own = sampled & (row.versions == version) & ((begun == version) | (not pair.tied))
            expected = reference.hf_logprobs(model, row.token_ids[:1].tolist(), row.token_ids[1:].tolist()).numpy()
            assert np.abs(row.logprobs[1:] - expected)[own[1:]].max(initial=0.0) < 1e-4
            checked |= {version} if own.any() else set()
    assert {min(models), max(models)} <= checked


async def test_no_request_is_admitted_while_paused(pair: Pair) -> None:
    await pair.engine.pause("keep")
    task = asyncio.create_task(pair.sample([1, 2, 3], tokens=4))
    await asyncio.sleep(0.3)
    assert not task.done()
    health = await pair.engine.health()
    assert (health.running, health.waiting) == (0, 0)
    await pair.engine.resume()
    assert (await asyncio.wait_for(task, 20)).token_ids


async def test_the_prefix_cache_forgets_older_weights(pair: Pair) -> None:
    prompt = [i % 250 for i in range(600)]
    await pair.sample(prompt, tokens=2)
    for name, parameter in pair.model.named_parameters():
        if name.endswith("v_proj.weight"):
            parameter.data.neg_()
    await pair.update()
    generation = await pair.sample(prompt, seed=1)
    expected = reference.hf_logprobs(pair.model, prompt, generation.token_ids)
    assert reference.worst(generation, expected) < 1e-4


async def test_an_update_that_does_not_fit_is_refused_and_harmless(pair: Pair) -> None:
    state = pair.model.state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    for wrong, said in (
        ({k: v for k, v in state.items() if k != name}, "1 missing"),
        ({**state, "model.layers.7.mlp.up_proj.weight": state[name]}, "1 unknown"),
        ({**state, name: state[name][:3]}, "another shape"),
    ):
        with pytest.raises(EngineError, match=said):
            await reference.update(pair.engine, wrong.items(), pair.version + 1)
    generation = await pair.sample([1, 2, 3])
    assert {span.version for span in generation.version_spans} == {pair.version}
    assert reference.worst(generation, reference.hf_logprobs(pair.model, [1, 2, 3], generation.token_ids)) < 1e-4


async def test_a_cancelled_call_ends_the_request_in_vllm(pair: Pair) -> None:
    tasks = [asyncio.create_task(pair.sample([1, 2, i], tokens=1000)) for i in range(16)]
    await reference.until_running(pair.engine, 8)
    await pair.engine.pause("keep")  # so that none can come to its end by itself
    assert (await pair.engine.health()).running > 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await reference.until_running(pair.engine, 0)
    await pair.engine.resume()


async def test_abort_returns_what_there_is(pair: Pair) -> None:
    tasks = [asyncio.create_task(pair.sample([1, 2, i], tokens=1000)) for i in range(4)]
    await reference.until_running(pair.engine, 1)
    await pair.engine.pause("abort")
    runs = await asyncio.wait_for(asyncio.gather(*tasks), 20)
    await pair.engine.resume()
    assert {run.finish_reason for run in runs} <= {"abort", "stop"}
    assert all(run.version_spans[-1].end == len(run.token_ids) for run in runs)


async def test_refused_requests_name_the_reason(pair: Pair) -> None:
    with pytest.raises(EngineError, match="temperature") as caught:
        await pair.sample([1, 2, 3], temperature=-1.0)
    assert not caught.value.retryable


async def test_tool_calls_are_parsed_block_by_block(pair: Pair) -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    content, calls = await pair.engine.parse(f"so: {good}\n<tool_call>{{bad</tool_call>{good}<|im_end|>", [])
    assert content == "so:"
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1}), ("", None), ("add", {"a": 1})]
    assert calls[1].raw == "{bad"
    assert len({call.id for call in calls}) == 3
    assert await pair.engine.parse("plain", []) == ("plain", [])


async def test_a_core_that_stands_still_is_not_healthy(pair: Pair) -> None:
    """The newest core: that of the engine at hand. Its actor lives and answers, and says so again when the core goes on."""
    cores = [child for child in psutil.Process().children(recursive=True) if "VLLM::EngineCore" in child.name()]
    core = max(cores, key=lambda process: process.create_time())
    asked = asyncio.create_task(pair.sample([1, 2, 3], tokens=1000))
    await reference.until_running(pair.engine, 1)
    core.suspend()
    try:
        health = await reference.until_unhealthy(pair.engine)
    finally:
        core.resume()
    assert "brought no token" in health.detail
    await asked
    assert (await pair.engine.health()).ok
