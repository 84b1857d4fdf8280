"""Where things come from and go to: the run, the model, the data, the environments, rewards and logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from pydantic import Field, field_validator

from .section import Section

KeyValues = tyro.conf.UseAppendAction[list[str]]
Names = tyro.conf.UseAppendAction[list[str]]


def one_or_many(name: Any) -> Any:
    """A single name as a list of one, none as an empty one."""
    return [name] if isinstance(name, str) else [] if name is None else name


class RunFolderSection(Section):
    """The run and its folder."""

    dir: str = "runs"
    """Folder that holds the runs."""
    name: str | None = None
    """Name of the run's folder; made from env, algorithm and time when absent."""
    seed: int = Field(0, ge=0)
    """Seed of task draws, environments and sampling."""
    resume: Annotated[str | None, tyro.conf.arg(aliases=["--resume"])] = None
    """`latest` or `best` (with --run.name), or the path of a checkpoint."""


class RunSection(RunFolderSection):
    """The run and its folder."""

    replay: Annotated[str | None, tyro.conf.arg(aliases=["--replay"])] = None
    """A run's rollouts/ folder: train on what is recorded there, without engines and without playing."""


class TrainedModelSection(Section):
    """The model that is trained."""

    path: Annotated[str | None, tyro.conf.arg(aliases=["--model"])] = None
    """Folder or hub id of a Hugging Face model; without one and without a GPU, agentrl's own tiny policy."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """How the trainer computes attention. auto: sequences share a row and are kept apart, by PyTorch's fused kernels, where
    the model can be seen to allow it (on a GPU FlashAttention's is among them). sdpa, eager: transformers' own of that
    name, one sequence a row, which is slower."""
    chat_template: str = "auto"
    """auto: the tokenizer's own; none: contents are joined as they are; or the path of a jinja file."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings."""
    freeze_vision: bool = False
    """Train the language model alone: what turns pictures into embeddings, tower and projector, stays as it is."""


class ModelSection(TrainedModelSection):
    """The policy."""

    tool_parser: str = "hermes"
    """Name of vLLM's tool-call parser for this model family; json: Hermes' format, read without vLLM."""
    history: Literal["append", "branch"] = "append"
    """What to do where a template rewrites earlier turns: keep what was sampled, or follow the template in a new branch."""


class DataSection(Section):
    """A dataset of prompts, in place of or beside the tasks an environment brings."""

    empty_texts: ClassVar[bool] = False
    """Whether a row may hold an empty text."""

    path: Names = []
    """json, jsonl, parquet, csv or arrow file, a folder, or a hub id (ID@NAME: one of its configurations); several are used
    one after the other, or mixed by data.probs."""
    probs: list[float] = []
    """How often each of several datasets is drawn from, one number each; until every one has been passed over once."""
    split: str = "train"
    """Split of a dataset that has several."""
    input_key: str = "input"
    """Column with the prompt: a string or a list of chat messages."""
    template: str | None = None
    """Text around prompts that are strings; {} stands for the prompt."""
    label_key: str | None = None
    """Column with the label; reaches the environment or reward function with its type unchanged."""
    image_key: str | None = None
    """Column with an image or a list of images."""
    tools_key: str | None = None
    """Column with the tools of a prompt, OpenAI function schemas as a list or as JSON text; shown by the chat template."""
    max_samples: int | None = Field(None, ge=1)
    """Use the first N rows of each dataset."""
    max_prompt_len: int | None = Field(None, ge=1)
    """Leave out rows whose prompt has more tokens, images and tools included; absent: those that rollout.max_len cannot hold."""
    on_error: Literal["error", "skip"] = "error"
    """An unreadable row, or line of JSON: stop, or skip and count it."""
    check_images: int | None = Field(None, ge=0)
    """Open the images of the first N rows before the run; absent: of all."""
    min_pixels: int | None = Field(None, ge=1)
    """Enlarge images that have fewer pixels, for engine and trainer alike."""
    max_pixels: int | None = Field(None, ge=1)
    """Shrink images that have more pixels."""
    allow_urls: bool = False
    """Fetch images at http and https addresses; private addresses are refused."""
    test_path: Names = []
    """Datasets for evaluation, with the same columns; without one a run on a dataset is not evaluated."""
    test_split: str | None = None
    """Split of test_path; absent: data.split."""

    @field_validator("path", "test_path", mode="before")
    @classmethod
    def _one_or_many(cls, path: Any) -> Any:
        return one_or_many(path)

    @property
    def test_labels(self) -> list[str]:
        """What each dataset of test_path is called in metrics."""
        return dataset_labels(self.test_path)


def dataset_labels(paths: Sequence[str]) -> list[str]:
    """A short name of each dataset: its file's or folder's, numbered where two are alike."""
    stems = [Path(path.partition("@")[0]).name.partition(".")[0] or "data" for path in paths]
    return [stem if stems.count(stem) == 1 else f"{stem}-{i}" for i, stem in enumerate(stems)]


class EnvSection(Section):
    """The environments."""

    name: Annotated[Names, tyro.conf.arg(aliases=["--env"])] = []
    """A registered name, path/to/file.py:Class, gymnasium:ID, or http://host:port/name of an env server. Several are mixed:
    each task draw, with its whole group, is of one of them."""
    weights: list[float] = []
    """How often each of several environments is drawn, relative to the others; all 1 when absent."""
    opt: KeyValues = []
    """KEY=VALUE for the constructor and tasks() of every environment, NAME:KEY=VALUE for those of one; repeatable. The value
    is read as TOML, else as a string."""
    token_file: str | None = None
    """File with the bearer token of an env server or reward server."""

    @field_validator("name", mode="before")
    @classmethod
    def _one_or_many(cls, name: Any) -> Any:
        return one_or_many(name)

    @property
    def labels(self) -> dict[str, str]:
        """Each environment, and what it is called in records, metrics and env.opt: of several a short name, unless two
        would share it.
        """
        short = {spec: re.split(r"[:/]", spec.rstrip("/"))[-1] for spec in self.name}
        told_apart = len(self.name) > 1 and len(set(short.values())) == len(self.name)
        return short if told_apart else {spec: spec for spec in self.name}

    @property
    def shown(self) -> str | None:
        """All names in one; None where there is none."""
        return " ".join(self.name) or None

    @property
    def label(self) -> str:
        """What episodes say they were played in where there is one environment, or none but the data."""
        return self.shown or "data"

    def opt_of(self, spec: str) -> list[str]:
        """The KEY=VALUE pairs that are meant for one of the environments."""
        found = []
        for pair in self.opt:
            owner, rest = self._owner(pair)
            found += [rest] if owner in (None, spec) else []
        return found

    def strays(self) -> list[str]:
        """Pairs of `opt` for an environment that is none of this run's."""
        return [pair for pair in self.opt if ":" in self._owner(pair)[1].partition("=")[0]]

    def _owner(self, pair: str) -> tuple[str | None, str]:
        """(the environment a pair names, the pair without its name)."""
        for spec, label in self.labels.items():
            for name in (spec, label):
                if pair.startswith(f"{name}:"):
                    return spec, pair.removeprefix(f"{name}:")
        return None, pair


class RewardSection(Section):
    """Reward functions of single-turn runs."""

    name: Annotated[Names, tyro.conf.arg(aliases=["--reward"])] = []
    """path/to/file.py:function, or a reward file of OpenRLHF's, path/to/file.py; the folder of a reward model, which a process
    of its own scores with; judge.toml of a language model that judges; or http://host:port of a reward server (several with
    the same reward, separated by commas, share the work); repeatable."""
    weights: list[float] = []
    """One weight for each reward function; all 1 when absent."""
    normalize: bool = True
    """Scores of a reward model in a folder: less the mean and divided by the deviation that its training left in its
    config.json; or raw. (A reward server has `agentrl serve reward --no-normalize`.)"""

    @field_validator("name", mode="before")
    @classmethod
    def _one_or_many(cls, name: Any) -> Any:
        return one_or_many(name)


class AgentSection(Section):
    """An agent program in place of the stock turn loop."""

    name: Annotated[Names, tyro.conf.arg(aliases=["--agent"])] = []
    """path/to/file.py:NAME of an `async def run(task, client)` or of an AgentExecutorBase; an agent file of OpenRLHF's,
    path/to/file.py; or the URL of an agent server, repeatable."""
    sampling: Literal["force", "strict"] = "force"
    """An agent that asks for other sampling than the run's: gets the run's, or an error."""
    bind: str | None = None
    """HOST:PORT where the first worker's policy server listens, the others on the ports after it; absent: a free port of
    127.0.0.1."""
    advertise_url: str | None = None
    """URL under which agents elsewhere reach the policy server; {port} stands for its port."""
    token_file: str | None = None
    """File with the bearer token of the agent servers; required when agent.bind lets other machines in."""

    @field_validator("name", mode="before")
    @classmethod
    def _one_or_many(cls, name: Any) -> Any:
        return one_or_many(name)


class SinkSection(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files to the run folder (needs the tensorboard package)."""
    wandb: bool = False
    """Log to Weights & Biases (needs the wandb package; WANDB_MODE=offline writes to the run folder alone)."""
    wandb_project: str = "agentrl"
    """Project of the run there."""
    wandb_entity: str | None = None
    """User or team it belongs to; absent: your own default."""
    wandb_group: str | None = None
    """Group of runs it is shown in."""
    progress: Literal["auto", "plain", "none"] = "auto"
    """auto: a live table on a terminal, plain lines elsewhere."""


class LogSection(SinkSection):
    """What is written beside metrics.jsonl."""

    rollouts: bool = True
    """Write every trajectory to rollouts/."""
