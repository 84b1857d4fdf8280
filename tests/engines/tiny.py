"""Random tiny models on disk: text Qwen3 (tied, untied) and Qwen2.5-VL, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.torchvision_ops import ensure_torchvision_imports

ensure_torchvision_imports()

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKERS = ("<tool_call>", "</tool_call>")
VOCAB = 320
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    """A byte-level tokenizer: 256 bytes, then `SPECIALS`, then `MARKERS` (kept when special tokens are skipped)."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    core.add_tokens([AddedToken(s, special=False) for s in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def token_id(text: str) -> int:
    """The id of one of `SPECIALS` or `MARKERS`."""
    return 256 + (*SPECIALS, *MARKERS).index(text)


def text_model(folder: Path, *, tied: bool, seed: int = 0) -> Any:
    """A random Qwen3 saved in `folder` with its tokenizer; returns the float32 HF model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=token_id("<|im_end|>"),
        pad_token_id=token_id("<|endoftext|>"),
    )
    return _save(Qwen3ForCausalLM(config), folder, tokenizer())


def vision_model(folder: Path, seed: int = 0) -> Any:
    """A random Qwen2.5-VL (patch 14, merge 1, temporal patch 1) saved with its processor; returns the HF model."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=_text_half(),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return _save(Qwen2_5_VLForConditionalGeneration(config), folder, _processor())


def _text_half() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }


def _processor() -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    patches = {"patch_size": 14, "merge_size": 1, "temporal_patch_size": 1}
    pixels = {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 64}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches, size=pixels),
        tokenizer=tokenizer(),
        video_processor=Qwen2VLVideoProcessor(**patches),
        chat_template=CHAT_TEMPLATE,
    )


def _save(model: Any, folder: Path, tokenizer_or_processor: Any) -> Any:
    """Make the random policy peaked enough that log-probs differ between tokens, then save it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.eval().save_pretrained(folder)
    tokenizer_or_processor.save_pretrained(folder)
    return model
