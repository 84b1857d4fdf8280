"""sft, rm and dpo on the trainer's core: what their losses read, and that nothing depends on how a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers.models import load_policy
from agentrl.trainers.packing import pack
from agentrl.trainers.scorer import AnswerScorer
from agentrl.trainers.supervised_losses import Imitation, Preference, Totals
from PIL import Image as PILImage

from agentrl import ConfigError, DataError, Image, Row
from agentrl.config import DpoConfig, RmConfig, SftConfig
from agentrl.image_store import ImageStore
from agentrl.supervised.examples import Item, Pair, rows_of

from ..engines import tiny
from .rollouts import distance, make_row

Make = Callable[..., Any]
CONFIGS = {"sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
KINDS = list(CONFIGS)


@pytest.fixture
def make(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make("sft", policy="untied", **sections): a SupervisedTrainer at lr 0.1 with sgd unless told otherwise."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def trainer(kind: str, policy: str = "untied", **sections: dict[str, Any]) -> Any:
        from agentrl.trainers.supervised_trainer import SupervisedTrainer

        sections["optim"] = {"name": "sgd", "max_norm": 0.0, "lr": 0.1} | sections.get("optim", {})
        config = CONFIGS[kind].model_validate(sections)
        return SupervisedTrainer(config, str(models / policy), str(tmp_path / "images"), 8, 1e-3)

    return trainer


def item(kind: str, seed: int) -> Item:
    if kind == "sft":
        return make_row(seed, 10 + seed % 17)
    trained = 1 if kind == "rm" else 0
    sides = [make_row(1000 * side + seed, 10 + (3 * seed + side) % 17, trained=trained) for side in (0, 1)]
    return Pair(sides[0], sides[1], margin=0.5 * (seed % 2), reference=(-20.0 - seed, -21.0))


def items(kind: str, count: int = 7, start: int = 0) -> list[Item]:
    return [item(kind, start + i) for i in range(count)]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.reader.policy.model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_convention_08_nothing_depends_on_the_cut(make: Make, kind: str) -> None:
    runs = []
    for budget in (100_000, 110, 60):
        dpo = {"dpo": {"nll_coef": 0.3}} if kind == "dpo" else {}
        trainer = make(kind, train={"micro_batch_tokens": budget}, **dpo)
        metrics = [trainer.train(items(kind, start=10 * step), step).metrics for step in range(2)]
        runs.append((metrics, trainer.evaluate(items(kind)), weights(trainer)))
    for metrics, evaluated, result in runs[1:]:
        assert distance(result, runs[0][2]) < 1e-6
        assert evaluated == pytest.approx(runs[0][1], abs=1e-5, rel=1e-5)
        for one, other in zip(metrics, runs[0][0], strict=True):
            assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-6)
            assert one == pytest.approx(other, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_makes_the_updates_it_would_have_made(make: Make, kind: str, tmp_path: Path) -> None:
    options = {"optim": {"name": "adamw", "lr": 1e-3, "ema": 0.5}, "lora": {"rank": 4, "dropout": 0.1}}
    whole, first, second = (make(kind, **options) for _ in range(3))
    torch.manual_seed(0)
    whole_reports = [whole.train(items(kind, start=10 * step), step).metrics for step in range(4)]
    torch.manual_seed(0)
    for step in range(2):
        first.train(items(kind, start=10 * step), step)
    (tmp_path / "checkpoint").mkdir()
    first.save(tmp_path / "checkpoint")
    torch.manual_seed(99)
    second.load(tmp_path / "checkpoint")
    reports = [second.train(items(kind, start=10 * step), step).metrics for step in range(2, 4)]
    assert reports == whole_reports[2:]
    assert distance(weights(second), weights(whole)) == 0.0
    assert [report["train/lr"] for report in whole_reports] == pytest.approx([1e-3, 8.75e-4, 7.5e-4, 6.25e-4])


def test_every_attention_computes_the_same(make: Make, models: Path) -> None:
    runs = {}
    for attention in ("auto", "sdpa", "eager"):
        trainer = make("sft", model={"attention": attention})
        assert trainer.reader.policy.packs == (attention == "auto")
        used = trainer.reader.policy.model.config._attn_implementation
        assert used == attention or attention == "auto"
        runs[attention] = [trainer.train(items("sft"), step).metrics for step in range(2)]
    for name in ("sdpa", "eager"):
        for one, other in zip(runs[name], runs["auto"], strict=True):
            assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    with pytest.raises(ConfigError, match=r"--model.attention flash_attention_2: .*(F|f)lash"):
        load_policy(str(models / "untied"), attention="flash_attention_2")


def labels(rows: Sequence[Row], policy: Any) -> list[list[int]]:
    packed = pack(rows, policy, None)
    return [part.tolist() for part in packed.labels.split(packed.counts)]


def test_TOK_06_the_trained_targets_are_the_answer_and_its_end(tmp_path: Path) -> None:
    """A model that knows nothing: 3 ln 100. Not 2 ln 100, and not tempered."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape))
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    row = make_row(0, 5, trained=3)
    row.token_ids[:] = [10, 11, 20, 21, 2]
    assert labels([row], policy) == [[20, 21, 2]]
    packed = pack([row], policy, None)
    outputs = [list(output.split(packed.counts)) for output in AnswerScorer(policy)([packed])]
    share = Imitation().share(outputs, [row], Totals.of([row]))
    assert 3 * share.loss.item() == pytest.approx(13.81551, abs=1e-5)
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logp, likeliest = AnswerScorer(policy)._measure(logits, torch.tensor([0]))
    assert float(-logp) == pytest.approx(0.407606, abs=1e-6) and float(likeliest) == 1.0


ODDS = {10: -0.5, 11: 0.3, 20: 0.2, 21: -0.1, 22: -0.2, 2: 0.1}
"""Policy minus reference of a model that looks at nothing but the token."""


def context_free(prompt: list[int], answer: list[int]) -> Row:
    row = make_row(0, len(prompt) + len(answer), trained=len(answer))
    row.token_ids[:] = prompt + answer
    return row


def test_TOK_08_dpo_sums_over_the_answer_tokens_alone(models: Path) -> None:
    policy = load_policy(str(models / "untied"))
    loss = Preference(beta=0.5, kind="sigmoid", label_smoothing=0.0, nll_coef=0.0)
    for prompt in ([10, 11], [10] * 50 + [10, 11]):
        pair = Pair(context_free(prompt, [20, 2]), context_free(prompt, [21, 22, 2]), reference=(0.0, 0.0))
        outputs = [[torch.tensor([ODDS[token] for token in row]) for row in labels(rows_of([pair]), policy)]]
        assert float(loss.share(outputs, [pair], Totals.of([pair])).loss) == pytest.approx(0.575939, abs=1e-6)
    nothing_learned = [[torch.zeros(2), torch.zeros(3)]]
    assert float(loss.share(nothing_learned, [pair], Totals.of([pair])).loss) == pytest.approx(math.log(2))


def test_the_reference_is_the_model_before_its_first_update(make: Make, models: Path) -> None:
    for options in ({}, {"lora": {"rank": 4}}):
        trainer = make("dpo", **options)
        pairs = items("dpo", 3)
        sums = trainer.reference(pairs)
        model = load_policy(str(models / "untied")).model
        for row, found in zip(rows_of(pairs), sums, strict=True):
            ids = torch.from_numpy(row.token_ids).long()
            logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            assert found == pytest.approx(float(logp[torch.from_numpy(row.loss_mask[1:])].sum()), abs=1e-3)
        for pair, chosen, rejected in zip(pairs, sums[::2], sums[1::2], strict=True):
            pair.reference = (chosen, rejected)
        before = trainer.evaluate(pairs)
        assert before["loss"] == pytest.approx(math.log(2), abs=1e-4) and before["margin"] == pytest.approx(0, abs=1e-4)
        for step in range(3):
            trainer.train(pairs, step)
        assert trainer.evaluate(pairs)["margin"] > 0.01
    other = make("dpo", ref={"path": str(models / "untied")})
    for step in range(2):
        other.train(items("dpo", 3), step)
    assert other.reference(pairs) == pytest.approx(sums, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4}}], ids=["whole", "lora, averaged"])
def test_TOK_08_a_reward_model_reads_the_last_attended_token(
    make: Make, tmp_path: Path, models: Path, options: dict[str, Any]
) -> None:
    """The exported folder scores a text alone, padded on the left or on the right, as the trainer does, also from a
    checkpoint, after a resume and, with LoRA, as an adapter with its head; mean and std are those of its own scores.
    """
    from agentrl.trainers.checkpoint_export import export_checkpoint
    from transformers import AutoModelForSequenceClassification

    optim = {"name": "adamw", "lr": 5e-3} | ({"ema": 0.8} if options else {})
    trainer = make("rm", optim=optim, **options)
    pairs = items("rm", 6)
    before = trainer.evaluate(pairs)
    for step in range(8):
        trainer.train(pairs, step)
    after = trainer.evaluate(pairs)
    assert after["loss"] < before["loss"] - 0.1 and after["margin"] > before["margin"]
    rows = rows_of(pairs)
    with torch.no_grad(), trainer.core.averaged():
        ours = torch.cat(list(trainer.reader(trainer.core.backend, rows)[0]))
    for name in ("final", "checkpoint", "resumed"):
        (tmp_path / name).mkdir()
    trainer.export(tmp_path / "final")
    trainer.save(tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported")
    again = make("rm", optim=optim, **options)
    again.load(tmp_path / "checkpoint")
    again.export(tmp_path / "resumed")
    folders = [tmp_path / name for name in ("final", "exported", "resumed")]
    scorers = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in folders]
    if options:
        from peft import PeftModel

        base = AutoModelForSequenceClassification.from_pretrained(models / "untied", num_labels=1)
        base.config.pad_token_id = scorers[0].config.pad_token_id
        scorers.append(PeftModel.from_pretrained(base, tmp_path / "exported" / "adapter"))
    for scorer in scorers:
        pad = scorer.config.pad_token_id
        alone = torch.stack([scorer(torch.from_numpy(row.token_ids).long()[None]).logits[0, 0] for row in rows])
        assert torch.allclose(alone, ours, atol=1e-5)
        for left in (True, False):
            width = max(map(len, rows))
            sides = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
            padded = [np.pad(row.token_ids, side, constant_values=pad) for row, side in zip(rows, sides, strict=True)]
            ids = torch.from_numpy(np.stack(padded)).long()
            real = torch.from_numpy(np.stack([np.pad(np.ones(len(r)), s) for r, s in zip(rows, sides, strict=True)]))
            positions = (real.cumsum(1) - 1).clamp(min=0).long()
            scores = scorer(ids, attention_mask=real.long(), position_ids=positions).logits[:, 0]
            assert torch.allclose(scores, ours, atol=1e-5)
    for scorer in scorers[: len(folders)]:
        found = (scorer.config.mean, scorer.config.std)
        assert found == pytest.approx((float(ours.mean()), float(ours.std(correction=0))), abs=1e-5)


def test_a_model_that_scores_otherwise_than_at_the_last_token_is_no_reward_model_to_train(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for labels, why in ((1, "type bert do not score a text at its last token"), (2, "tells 2 classes apart")):
        config = BertConfig(**sizes, intermediate_size=8, num_labels=labels)
        BertForSequenceClassification(config).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=why):
            load_policy(str(tmp_path), head="score")


def test_a_reward_model_trained_without_a_template_has_none(make: Make, tmp_path: Path) -> None:
    """It scores texts as they were spelled for training."""
    from agentrl.trainers.checkpoint_export import export_checkpoint
    from transformers import AutoTokenizer

    for choice in ("none", "auto"):
        trainer, folders = make("rm", model={"chat_template": choice}), [tmp_path / choice / name for name in "abc"]
        for folder in folders[:2]:
            folder.mkdir(parents=True)
        trainer.save(folders[0])
        trainer.export(folders[1])
        export_checkpoint(folders[0], folders[2])
        for folder in folders[1:]:
            assert bool(AutoTokenizer.from_pretrained(folder).chat_template) == (choice == "auto")


def test_a_reward_model_is_not_taken_for_a_policy_with_a_new_head(models: Path, tmp_path: Path) -> None:
    load_policy(str(models / "untied"), head="score").model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"its weights lack lm_head\.weight"):
        load_policy(str(tmp_path))


def test_pictures_are_learned_from_and_their_placeholders_are_not_trained(make: Make, tmp_path: Path) -> None:
    store, placeholder = ImageStore(tmp_path / "images"), tiny.token_id("<|image_pad|>")
    rows: list[Row] = []
    for i, color in enumerate(((200, 30, 60), (10, 30, 220))):
        sha = store.put(Image(PILImage.new("RGB", (56, 56), color)))
        row = make_row(5, 30, trained=3, images=((sha, 3, 16),), placeholder=placeholder)
        row.token_ids[-3:] = [60 + 20 * i, 61 + 20 * i, 3]
        rows.append(row)
    trainer = make(
        "sft", "vision", optim={"name": "adamw", "lr": 3e-3, "schedule": "constant"}, train={"micro_batch_tokens": 40}
    )
    losses = [trainer.train(rows, step).metrics["train/loss"] for step in range(30)]
    found = trainer.evaluate(rows)
    assert losses[0] > 3 and found["loss"] < 0.3 and found["accuracy"] == 1.0, "only the picture tells the two apart"


def test_an_update_that_is_not_finite_is_skipped_and_its_rows_are_kept(make: Make, tmp_path: Path) -> None:
    trainer = make("dpo")
    pairs = items("dpo", 3)
    pairs[1].reference = (float("nan"), 0.0)  # type: ignore[union-attr]
    before = weights(trainer)
    report = trainer.train(pairs, 4)
    assert not report.updated and report.metrics["train/bad_steps"] == 1.0
    assert distance(before, weights(trainer)) == 0.0
    assert (tmp_path / "bad_rows" / "step_000004.jsonl").is_file()
