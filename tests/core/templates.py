"""Chat templates of the known families, each with a tokenizer that has its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tokenizers import byte_tokenizer

FOLDER = Path(__file__).parent / "templates"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Family:
    """A template and its special tokens. `stop` is what the model ends a plain turn with."""

    template: str
    specials: tuple[str, ...]
    stop: str
    eos: str
    bos: str | None = None
    adds: tuple[str, ...] = ()
    header: str = ""
    """What the model writes before its content because the generation prompt stops short of it."""

    def tokenizer(self) -> Any:
        return byte_tokenizer(
            self.specials,
            markers=("<tool_call>", "</tool_call>", "<think>", "</think>"),
            bos=self.bos,
            eos=self.eos,
            adds=self.adds,
            template=self.source,
        )

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.template}.jinja").read_text()


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = (*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
OUTPUTS = ("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|call_begin|>", "<|call_end|>", "<|output_begin|>")
FAMILIES = {
    "chatml": Family("chatml", CHATML, "<|im_end|>", "<|im_end|>"),
    "base": Family("chatml", CHATML, "<|im_end|>", "<|endoftext|>"),
    "thinking": Family("thinking", CHATML, "<|im_end|>", "<|im_end|>", header="<think>\n\n</think>\n\n"),
    "headers": Family("headers", HEADERS, "<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>"),
    "inst": Family("inst", (*INST, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), "</s>", "</s>", "<s>", ("<s>",)),
    "model_role": Family(
        "model_role", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<eos>", "<bos>"
    ),
    "channels": Family("channels", CHANNELS, "<|return|>", "<|return|>", header="<|channel|>final<|message|>"),
    "text_arguments": Family("text_arguments", (*OUTPUTS, "<|output_end|>"), "<|eos|>", "<|eos|>", "<|bos|>"),
    "drops_tools": Family(
        "drops_tools",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        "<|endoftext|>",
    ),
    "numbered": Family("numbered", CHATML, "<|im_end|>", "<|im_end|>"),
    "plain_bos": Family("plain_bos", ("<s>", *CHATML), "<|im_end|>", "<|im_end|>", "<s>", ("<s>",)),
    "vision": Family("vision", VISION, "<|im_end|>", "<|im_end|>"),
    "vision_lists": Family("vision_lists", VISION, "<|im_end|>", "<|im_end|>"),
}
