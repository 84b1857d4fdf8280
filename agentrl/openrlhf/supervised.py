"""The options of `train_sft`, `train_rm` and `train_dpo` as those of `agentrl sft`, `rm` and `dpo`."""

from __future__ import annotations

from typing import Any

from ..config.supervised import SupervisedTrainSection
from ..errors import ConfigError
from .shared import Theirs, adapters, folder, listed, model_path, numbers, optimizer

MARGIN = "margin"
"""The column in which they look for margins."""


def _models(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    return {
        **model_path("model.model_name_or_path", theirs, notes),
        **adapters(theirs),
        "train.gradient_checkpointing": theirs["model.gradient_checkpointing_enable"],
    }


def _sources(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    """Which examples, and how their messages become text."""
    templated, held_out = theirs["data.apply_chat_template"], listed(theirs["eval.dataset"])
    if not theirs["data.dataset"]:
        notes.append("data.dataset is not given: say what to train on with data.path")
    if theirs["data.tokenizer_chat_template"] and templated:
        notes.append(
            "data.tokenizer_chat_template: write the template into a file, and give its path as model.chat_template"
        )
    return {
        "data.path": listed(theirs["data.dataset"]),
        "data.probs": numbers(theirs["data.dataset_probs"]),
        "data.split": theirs["data.dataset_split"],
        "data.max_samples": theirs["data.max_samples"],
        "model.chat_template": "auto" if templated else "none",
        "data.test_path": held_out,
        "data.test_split": theirs["eval.split"] if held_out else None,
        "eval.every": max(0, theirs["eval.steps"]) if held_out else None,
        "eval.samples": theirs["data.max_samples"] if held_out else None,
    }


def _answers(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    """The columns of train_sft."""
    templated, answer = theirs["data.apply_chat_template"], theirs["data.output_key"]
    if theirs["model.pretrain_mode_enable"]:
        if answer:
            raise ConfigError(
                "from-openrlhf: data.output_key with model.pretrain_mode_enable: plain text stands in one column here, "
                "data.input_key. Join the two columns."
            )
        return {"data.input_key": theirs["data.input_key"], "sft.pretrain": True}
    if theirs["data.multiturn"] and (answer or not templated):
        raise ConfigError(
            "from-openrlhf: data.multiturn is for whole conversations in data.input_key: it goes with "
            "data.apply_chat_template, and without data.output_key."
        )
    if not answer and not templated:
        notes.append("data.output_key is not given: name the column with the answers with data.answer_key")
    return {
        "data.input_key": theirs["data.input_key"],
        "data.answer_key": answer,
        "data.template": theirs["data.input_template"] if answer and not templated else None,
        "sft.turns": "all" if theirs["data.multiturn"] else "last",
    }


def _pairs(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    """The columns of train_rm and train_dpo."""
    templated, prompt = theirs["data.apply_chat_template"], theirs["data.prompt_key"]
    if not prompt and not templated:
        notes.append(
            "data.prompt_key is not given, and there is no chat template: pairs of whole texts are not read here; "
            "name the column with the prompt with data.input_key"
        )
    return {
        "data.input_key": prompt or theirs["data.chosen_key"],
        "data.chosen_key": theirs["data.chosen_key"],
        "data.rejected_key": theirs["data.rejected_key"],
        "data.template": theirs["data.input_template"] if prompt and not templated else None,
    }


def _updates(rows: int) -> Any:
    """`rows` = how many sequences an example is, which a micro-batch has to hold."""

    def updates(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
        longest = theirs["data.max_len"]
        return {
            "train.batch": theirs["train.batch_size"],
            "train.epochs": theirs["train.max_epochs"],
            "train.max_len": longest,
            "train.micro_batch_tokens": max(SupervisedTrainSection().micro_batch_tokens, rows * longest),
            "run.seed": theirs["train.seed"],
        }

    return updates


def _margins(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    return {"data.margin_key": MARGIN if theirs["model.margin_loss_enable"] else None}


def _preferences(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    smoothing, ipo = theirs["model.label_smoothing"], theirs["model.ipo_enable"]
    if smoothing and ipo:
        notes.append("model.label_smoothing: it does nothing with model.ipo_enable")
    return {
        "dpo.beta": theirs["model.beta"],
        "dpo.kind": "ipo" if ipo else "sigmoid",
        "dpo.label_smoothing": None if ipo else smoothing,
        "dpo.nll_coef": theirs["model.nll_loss_coef"],
        "ref.path": theirs["ref.model_name_or_path"],
    }


_SHARED = (_models, optimizer, _sources, folder)
SFT = (*_SHARED, _answers, _updates(1))
RM = (*_SHARED, _pairs, _margins, _updates(2))
DPO = (*_SHARED, _pairs, _preferences, _updates(2))
