"""Tiny byte-level BPE tokenizers, and a processor that takes images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MERGES = (("a", "n"), ("t", "h"), ("th", "e"), ("an", "s"), ("e", "r"), ("Ġ", "a"), ("l", "l"))
"""Enough that one text has several spellings in ids."""
PADS_PER_IMAGE = 4


def byte_tokenizer(
    specials: Sequence[str] = (),
    *,
    markers: Sequence[str] = (),
    bos: str | None = None,
    eos: str | None = None,
    adds: Sequence[str] = (),
    template: str | None = None,
) -> PreTrainedTokenizerFast:
    """256 bytes, `MERGES`, then `specials` and (not special) `markers`. `adds` are put around every text: BOS, EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)}
    for pair in MERGES:
        vocabulary["".join(pair)] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    core.add_tokens([AddedToken(s, special=False, normalized=False) for s in markers])
    if adds:
        around = [f"{adds[0]}:0", "$A:0", *(f"{token}:0" for token in adds[1:])]
        ids = [(token, core.token_to_id(token)) for token in adds]
        core.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    names = {name: token for name, token in (("bos_token", bos), ("eos_token", eos)) if token is not None}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **names)


class FakeProcessor:
    """Expands every image placeholder of a text to `PADS_PER_IMAGE`, or to what `pads(image)` says."""

    image_token = "<|image_pad|>"
    video_token = "<|video_pad|>"

    def __init__(self, tokenizer: Any, pads: Any = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.asked = 0
        self._pads = pads or (lambda image: PADS_PER_IMAGE)

    def __call__(self, text: list[str], images: list[Any]) -> dict[str, list[list[int]]]:
        self.asked += 1
        (only,) = text
        for image in images:
            only = only.replace(self.image_token, "\0" * self._pads(image), 1)
        return {"input_ids": [self.tokenizer(only.replace("\0", self.image_token)).input_ids]}
