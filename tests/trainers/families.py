"""Tiny random vision-language models of several families, on disk with their processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..engines import tiny

TEXT = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": tiny.token_id("<|im_end|>"),
    "pad_token_id": tiny.token_id("<|endoftext|>"),
}
IMAGE = tiny.token_id("<|image_pad|>")
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
SQUARE = {"height": 56, "width": 56}


def save(kind: str, folder: Path) -> None:
    """One of `FAMILIES`: a float32 model whose token log-probs differ, and its processor."""
    torch.manual_seed(0)
    model, processor = FAMILIES[kind]()
    tiny._save(model, folder, processor)


def _qwen3_vl() -> tuple[Any, Any]:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": rope},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE,
        video_token_id=tiny.token_id("<|video_pad|>"),
        vision_start_token_id=tiny.token_id("<|vision_start|>"),
        vision_end_token_id=tiny.token_id("<|vision_end|>"),
    )
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 1}
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches, size=size),
        tokenizer=tiny.tokenizer(),
        video_processor=Qwen3VLVideoProcessor(**patches),
        chat_template=tiny.CHAT_TEMPLATE,
    )
    return Qwen3VLForConditionalGeneration(config), processor


def _llava(**text: Any) -> tuple[Any, Any]:
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT, **text},
        vision_config={"model_type": "clip_vision_model", **CLIP},
        image_token_id=IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=SQUARE),
        tokenizer=tiny.tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
        chat_template=tiny.CHAT_TEMPLATE,
    )
    return LlavaForConditionalGeneration(config), processor


def _llava_onevision() -> tuple[Any, Any]:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    grids = [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **{k: v for k, v in CLIP.items() if k != "projection_dim"}},
        image_token_id=IMAGE,
        video_token_id=tiny.token_id("<|video_pad|>"),
        image_grid_pinpoints=grids,
        vision_feature_layer=-1,
    )
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=grids),
        tokenizer=tiny.tokenizer(),
        video_processor=LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        chat_template=tiny.CHAT_TEMPLATE,
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "llava_onevision": _llava_onevision,
    "llava_gemma2": lambda: _llava(model_type="gemma2", head_dim=16),
}
