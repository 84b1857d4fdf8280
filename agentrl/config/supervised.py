"""The configuration of supervised and preference training: `agentrl sft`, `agentrl rm`, `agentrl dpo`."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from pydantic import Field

from .how import CkptSection, LoraSection, OptimSection, ParallelSection, UpdateSection, WatchdogSection
from .section import Section
from .where import DataSection, RunFolderSection, SinkSection, TrainedModelSection


class TrainerConfig(Protocol):
    """What the trainer's backend reads of any run's configuration."""

    @property
    def run(self) -> RunFolderSection: ...
    @property
    def model(self) -> TrainedModelSection: ...
    @property
    def optim(self) -> OptimSection: ...
    @property
    def train(self) -> UpdateSection: ...
    @property
    def parallel(self) -> ParallelSection: ...
    @property
    def lora(self) -> LoraSection: ...


class ExamplesSection(DataSection):
    """The examples to learn from. `path` may be trajectories (sft): files of `agentrl rollout --out`, a run's rollouts/."""


class AnswersSection(ExamplesSection):
    """What to imitate: conversations, prompts with answers, recorded trajectories, or plain text."""

    input_key: str = "messages"
    """Column with the chat messages; with data.answer_key the prompt; with sft.pretrain the text."""
    answer_key: str | None = None
    """Column with the answer to the prompt in data.input_key; absent: that column holds whole conversations."""


class TextsSection(AnswersSection):
    """Plain text: a row without any is left out."""

    empty_texts: ClassVar[bool] = True


class PairsSection(ExamplesSection):
    """Pairs of a better and a worse answer."""

    input_key: str = "prompt"
    """Column with the prompt: a string or chat messages. The same as data.chosen_key where chosen and rejected are whole
    conversations."""
    chosen_key: str = "chosen"
    """Column with the better answer: a string, or chat messages."""
    rejected_key: str = "rejected"
    """Column with the worse answer."""
    margin_key: str | None = None
    """Column with the margin by which a reward model is to tell the two apart."""


class SupervisedTrainSection(UpdateSection):
    """The updates."""

    epochs: int = Field(1, ge=1)
    """Passes over the examples."""
    steps: int | None = Field(None, ge=1)
    """Updates to make in all; absent: those of the epochs."""
    batch: int = Field(32, ge=1)
    """Examples, or pairs, in one update; the last update of a pass takes what is left."""
    max_len: int = Field(4096, ge=2)
    """Longest example in tokens with image placeholders. A longer conversation is cut, and left out when nothing that is
    trained remains; a longer pair is left out."""
    shuffle: bool = True
    """Take the examples of each pass in a new order, which depends on run.seed alone."""


class SupervisedOptimSection(OptimSection):
    """The optimizer."""

    lr: float | None = Field(None, gt=0)
    """Learning rate; absent: 1e-5 for sft and rm, 1e-6 for dpo; 1e-3, 1e-3 and 1e-4 for models of a few million parameters;
    ten times that for LoRA adapters."""


class SupervisedEvalSection(Section):
    """Evaluation on data.test_path: before the first update, every `every` updates, and after the last."""

    every: int = Field(0, ge=0)
    """Updates between evaluations; 0 = one after each pass over the examples."""
    enable: bool = True
    """Evaluate at all."""
    samples: int = Field(1024, ge=1)
    """Most examples that are evaluated: the first of data.test_path."""


class SftSection(Section):
    """Supervised fine-tuning."""

    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns are trained. A message with `"weight": 0` never is."""
    pretrain: bool = False
    """data.input_key holds plain text, all of which is trained; longer text is cut into pieces of train.max_len."""
    min_score: float | None = None
    """Of recorded trajectories take those with at least this score."""


class DpoSection(Section):
    """Direct preference optimisation."""

    beta: float = Field(0.1, gt=0)
    """How strongly the policy is held to the reference."""
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO (Rafailov 2023); ipo: IPO (Azar 2023), on summed log-probabilities."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the pairs taken to be labelled the wrong way round: cDPO (Mitchell 2023). With kind sigmoid."""
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the chosen answers' negative log-likelihood, a mean over their tokens."""


class ReferenceSection(Section):
    """The reference of DPO. Its log-probabilities are computed once, before the first update."""

    path: str | None = None
    """Folder or hub id; absent: the model as it was before the first update."""


class SupervisedConfig(Section):
    """What supervised and preference training have in common. `kind` = sft, rm or dpo."""

    kind: ClassVar[str]

    run: RunFolderSection = RunFolderSection()
    model: TrainedModelSection = TrainedModelSection()
    data: ExamplesSection = ExamplesSection()
    optim: SupervisedOptimSection = SupervisedOptimSection()
    train: SupervisedTrainSection = SupervisedTrainSection()
    parallel: ParallelSection = ParallelSection()
    lora: LoraSection = LoraSection()
    eval: SupervisedEvalSection = SupervisedEvalSection()
    ckpt: CkptSection = CkptSection()
    log: SinkSection = SinkSection()
    watchdog: WatchdogSection = WatchdogSection()


class SftConfig(SupervisedConfig):
    """Everything `agentrl sft` can be told."""

    kind: ClassVar[str] = "sft"

    data: AnswersSection = AnswersSection()
    sft: SftSection = SftSection()


class RmConfig(SupervisedConfig):
    """Everything `agentrl rm` can be told."""

    kind: ClassVar[str] = "rm"

    data: PairsSection = PairsSection()


class DpoConfig(SupervisedConfig):
    """Everything `agentrl dpo` can be told."""

    kind: ClassVar[str] = "dpo"

    data: PairsSection = PairsSection()
    dpo: DpoSection = DpoSection()
    ref: ReferenceSection = ReferenceSection()
