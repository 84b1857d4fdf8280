"""The two tiny policies, freshly initialised: a Qwen2.5-VL and a Qwen3 of 0.7 and 0.9 million parameters."""

from __future__ import annotations

from typing import Any

from .tokenizer import MODEL_MAX_LENGTH, VOCAB_SIZE, build_tokenizer, chat_template

PATCH = 14
MIN_PIXELS = PATCH * PATCH
MAX_PIXELS = 64 * PATCH * PATCH
PAPER = 1.0
CONTRAST = 0.5
HIDDEN = 128
LAYERS = 3
HEADS = 4


def build(kind: str, seed: int) -> tuple[Any, Any]:
    """(model in float32, processor or tokenizer) of `tiny-vlm` or `tiny-text`, initialised by `seed`.

    Embeddings are not tied. One image patch is one token of the language model, and pages of up to 64 patches keep
    their size. White paper is 0 to the model, ink negative: a patch is then what is written on it, not its background.
    """
    import torch

    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = _text_model(tokenizer) if kind == "tiny-text" else _vision_model(tokenizer)
    _spread(model)
    return model, tokenizer if kind == "tiny-text" else _processor(tokenizer)


def mixes_patches(name: str) -> bool:
    """Whether a parameter belongs to attention inside the vision tower."""
    return name.startswith("model.visual.blocks.") and ".attn." in name


def _spread(model: Any) -> None:
    """Draw every matrix with variance 1 / fan-in, embeddings with standard deviation 0.3.

    The usual 0.02 suits layers thousands wide: at width 128 each layer starts out as nearly nothing, and learning to
    read a page took more than five times as many steps. Attention among patches starts at zero output: a patch is read
    by itself, so that a digit looks the same beside any other (else pairs are learned by heart).
    """
    for name, parameter in model.named_parameters():
        if mixes_patches(name) and ".proj." in name:
            parameter.data.zero_()
        elif parameter.ndim > 1:
            fan_in = parameter[0].numel()
            parameter.data.normal_(0.0, 0.3 if "embed_tokens" in name else fan_in**-0.5)


def _text_options(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MODEL_MAX_LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _text_model(tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    options = _text_options(tokenizer)
    return Qwen3ForCausalLM(Qwen3Config(**options, head_dim=HIDDEN // HEADS, rope_parameters=rope))


def _vision_model(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    half = HIDDEN // HEADS // 2
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": 1,
        "temporal_patch_size": 1,
        "fullatt_block_indexes": [0, 1],
    }
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>"),
        )
    }
    text = {**_text_options(tokenizer), "rope_parameters": rope}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    return Qwen2_5_VLForConditionalGeneration(config)


def _processor(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    patches = {"patch_size": PATCH, "merge_size": 1, "temporal_patch_size": 1}
    pixels = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches, size=pixels, image_mean=[PAPER] * 3, image_std=[CONTRAST] * 3),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**patches, size=pixels),
        chat_template=chat_template(),
    )
