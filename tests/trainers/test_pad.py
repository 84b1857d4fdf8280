"""The padding token of a reward model: never one that a text ends with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from agentrl.trainers.export import pad_apart
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ..core.tokenizers import byte_tokenizer


@pytest.mark.parametrize("spare", [0, 3])
def test_TOK_08_a_tokenizer_that_knows_nothing_but_the_end_of_a_text(models: Path, tmp_path: Path, spare: int) -> None:
    """Pad = eos, and no other special token: with rows of the embedding to spare, and without."""
    folder = tmp_path / "model"
    shutil.copytree(models / "untied", folder)
    tokenizer = byte_tokenizer(("</s>",), eos="</s>")
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    end = tokenizer.eos_token_id
    config.num_labels, config.vocab_size = 1, len(tokenizer) + spare
    config.pad_token_id = config.eos_token_id = end
    torch.manual_seed(0)
    for file in folder.glob("generation_config.json"):
        file.unlink()
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    ids = [10, 11, 12, end]
    before = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = before.score(before.model(torch.tensor([ids])).last_hidden_state[0, -1])
        assert not torch.allclose(before(torch.tensor([ids])).logits[0], wanted), "read at the token before the end"
        pad_apart(folder)
        after, pad = (
            AutoModelForSequenceClassification.from_pretrained(folder).eval(),
            json.loads((folder / "config.json").read_text())["pad_token_id"],
        )
        again = AutoTokenizer.from_pretrained(folder)
        assert pad == again.pad_token_id != end and again("ab").input_ids == tokenizer("ab").input_ids
        padded = torch.tensor([[*ids, pad, pad], [10, *ids, pad]])
        scores = after(padded, attention_mask=(padded != pad).long()).logits
    assert torch.allclose(scores[0], wanted, atol=1e-6)
