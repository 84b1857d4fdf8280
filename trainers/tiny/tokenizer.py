"""The tokenizer of the tiny policies: byte-level BPE of exactly `VOCAB_SIZE` tokens, trained on a few built-in lines.

Digits are never merged, so a number is its digits. Ids: merges and bytes first, then `SPECIAL`, then `MARKERS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MODEL_MAX_LENGTH = 1024

_CORPUS = (
    "system\nuser\nassistant\ntool\n",
    "user\nassistant\nuser\nassistant\nuser\nassistant\n",
    "tools: calculator(expression)\n",
    '{"name": "calculator", "arguments": {"expression": "',
    '{"name": "calculator", "arguments": {"expression": "',
    '"}}\n"}}\n"}}\n',
    "What is the value? What is the answer? What is the sum? Work it out with the calculator.",
    "higher\nlower\nhigher\nlower\n",
    "Reply with one whole number. Use the tool and then answer with the number only.",
    "Error: the tool call is not valid JSON. There is no tool of that name. Write an answer or call a tool.",
    "The result of the expression is the answer. Not right, try again. It is higher. It is lower.",
    "error: an unknown argument was given, a required argument is missing, the expression could not be read.",
    "You are a helpful assistant. Read the page, think step by step, and type the number that belongs in the box.",
    "The quick brown fox jumps over the lazy dog while many other people look at this and wonder how and why.",
    "Please write down the first two words that you can see on the screen, then click the button to go on.",
)


def chat_template() -> str:
    """ChatML with images, tool calls and tool results; tools are named in one line to keep prompts short."""
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer() -> Any:
    """The tokenizer as transformers' `PreTrainedTokenizerFast`, eos `<|im_end|>`, pad `<|endoftext|>`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(),
    )


def _train_bpe() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer
