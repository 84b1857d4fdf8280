"""Real vLLM on a tiny Qwen2.5-VL: images over two turns, before and after an update; then an engine that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import ray
import torch
from PIL import Image as PILImage

from agentrl.engine import Generation, GenerationRequest, Sampling
from agentrl.engines.vllm_actor import RayEngine
from agentrl.errors import ConfigError, EngineError
from agentrl.messages import Image

from . import reference, tiny

pytestmark = pytest.mark.slow
START, PAD, END = (tiny.token_id(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end"))


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., RayEngine]) -> tuple[RayEngine, Any, Any]:
    """(engine, HF model, HF processor) with the same weights."""
    from transformers import AutoProcessor

    folder = tmp_path_factory.mktemp("vision")
    model = tiny.vision_model(folder)
    engine = launch(folder, max_images=4, stop_token_ids=(PAD, tiny.token_id("<|video_pad|>")))
    return engine, model, AutoProcessor.from_pretrained(folder)


def picture(seed: int, width: int, height: int) -> Image:
    pixels = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    return Image(PILImage.fromarray(pixels))


def image_ids(image: Image) -> list[int]:
    width, height = image.size
    return [START, *[PAD] * (width // 14 * (height // 14)), END]


async def sample(engine: RayEngine, prompt: list[int], images: list[Image], seed: int = 0) -> Generation:
    sampling = Sampling(max_new_tokens=12, seed=seed)
    return await engine.generate(GenerationRequest(tuple(prompt), sampling, images=tuple(images)))


def expected(
    model: Any, processor: Any, prompt: list[int], generation: Generation, images: list[Image]
) -> torch.Tensor:
    inputs = processor.image_processor(images=[image.pil for image in images], return_tensors="pt")
    types = torch.tensor([[int(token == PAD) for token in (*prompt, *generation.token_ids)]])
    return reference.hf_logprobs(
        model,
        prompt,
        generation.token_ids,
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
        mm_token_type_ids=types,
    )


async def test_two_turns_with_images_before_and_after_updates(trio: tuple[RayEngine, Any, Any]) -> None:
    engine, model, processor = trio
    first, second, third = picture(1, 56, 28), picture(2, 28, 42), picture(3, 70, 14)
    for version in range(3):
        if version:
            reference.disturb(model, seed=version)
            await reference.update(engine, model.state_dict().items(), version)
        prompt, images = [1, 2, *image_ids(first), 3], [first]
        turn = await sample(engine, prompt, images)
        assert reference.worst(turn, expected(model, processor, prompt, turn, images)) < 1e-4
        prompt = [*prompt, *turn.token_ids, 7, *image_ids(second), *image_ids(third), 8]
        if PAD in turn.token_ids:
            continue
        images = [first, second, third]
        turn = await sample(engine, prompt, images, seed=1)
        assert reference.worst(turn, expected(model, processor, prompt, turn, images)) < 1e-4
        assert {span.version for span in turn.version_spans} == {version}


async def test_the_same_slot_with_another_picture_is_another_prompt(trio: tuple[RayEngine, Any, Any]) -> None:
    engine, model, processor = trio
    for seed in (4, 5):
        image = picture(seed, 56, 28)
        prompt = [*range(200), *image_ids(image), 3]
        turn = await sample(engine, prompt, [image])
        assert reference.worst(turn, expected(model, processor, prompt, turn, [image])) < 1e-4


async def test_text_alone_needs_no_image(trio: tuple[RayEngine, Any, Any]) -> None:
    engine, model, _ = trio
    turn = await sample(engine, [1, 2, 3], [])
    assert reference.worst(turn, reference.hf_logprobs(model, [1, 2, 3], turn.token_ids)) < 1e-4


async def test_placeholders_that_do_not_match_are_refused(trio: tuple[RayEngine, Any, Any]) -> None:
    image = picture(1, 56, 28)
    for prompt, images, said in (
        ([1, PAD, 2, *image_ids(image)], [image], "2 runs"),
        ([1, *image_ids(image)], [], "0 images"),
        ([1, START, PAD, PAD, END], [image], "expands the prompt to 11 ids where the request has 5"),
    ):
        with pytest.raises(EngineError, match=said) as caught:
            await sample(trio[0], prompt, images)
        assert not caught.value.retryable


async def test_a_dead_engine_process_is_an_engine_error(trio: tuple[RayEngine, Any, Any]) -> None:
    engine = trio[0]
    actor_pid = ray.get(engine.actor.__ray_call__.remote(lambda _: __import__("os").getpid()))
    for child in psutil.Process(actor_pid).children(recursive=True):
        child.kill()
    with pytest.raises(EngineError):
        await sample(engine, [1, 2, 3], [])
    health = await engine.health()
    assert not health.ok and health.detail
    ray.kill(engine.actor)
    with pytest.raises(EngineError, match=r"gone|not answer"):
        await sample(engine, [1, 2, 3], [])
    assert not (await engine.health()).ok


async def test_an_unknown_tool_parser_is_the_users_mistake(launch: Callable[..., RayEngine], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean hermes"):
        await asyncio.to_thread(launch, tmp_path, tool_parser="hermess")
