"""What every trainer has: one model under DeepSpeed on one rank, its average, its counters, its checkpoints and exports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TrainerConfig
from ..engines.weights import Publisher, WeightPublisher, WeightSource
from ..report.run_folder import RunFolder
from ..trajectory import Row
from .backend import Backend, Offload, Place, join
from .bad_rows import DivergenceError, report_bad_rows
from .checkpoint import TAG, UNIVERSAL, About, Counters, load_state, save_state
from .ema import WeightAverage
from .export import adapter_weights, export_adapter, export_model, finish_reward_model, hub_weights, whole_weights
from .models import SCORE, TEXT
from .optimizers import learning_rate, make_optimizer
from .reading import Reader, compute_dtype


def enter(config: TrainerConfig, place: Place) -> torch.device:
    """Make this process a rank of the run: threads, seed, process group. The device to compute on."""
    torch.set_num_threads(config.parallel.threads)
    torch.manual_seed(config.run.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    join(place, device)
    return device


class Core:
    """A model and its optimizer. `module` = what is called with packs; it holds the reader's model as `policy_model`.

    planned_updates = the horizon of the learning rate; default_lr where `optim.lr` is absent. `image_dir` is in the run's
    folder. `publisher` = how engines get the weights; shared memory where none is given. Every rank has one, and every method
    is called on all of them alike.
    """

    def __init__(
        self,
        config: TrainerConfig,
        module: nn.Module,
        reader: Reader,
        *,
        place: Place,
        model_path: str,
        image_dir: str,
        planned_updates: int,
        default_lr: float,
        head: str = TEXT,
        publisher: Publisher | None = None,
    ) -> None:
        self.reader = reader
        self.rank, self.ranks, self.device = place.rank, place.ranks, reader.device
        self.counters = Counters()
        self._config = config
        self._model_path = model_path
        self._run_folder = RunFolder(Path(image_dir).parent)
        self._planned = planned_updates
        self._bad_step: int | None = None
        self._lr = config.optim.lr or default_lr
        self._publisher = publisher or WeightPublisher()
        dtype = compute_dtype(config, reader.device)
        self.backend = Backend(
            module,
            make_optimizer(module, config.optim, self._lr),
            stage=config.parallel.zero_stage,
            max_norm=config.optim.max_norm,
            dtype=dtype,
            offload=Offload.of(config.parallel),
        )
        self._about = About(
            model=model_path,
            trust_remote_code=config.model.trust_remote_code,
            dtype=str(dtype).removeprefix("torch."),
            stage=self.backend.stage,
            lora=config.lora.model_dump(),
            head=head,
            optimizer=config.optim.name,
            freeze_vision=config.model.freeze_vision,
            chat_template=_chat_template(config.model.chat_template) if place.rank == 0 else None,
        )
        self._average = _average(config, self.backend)

    @property
    def lr(self) -> float:
        """The learning rate that the schedule starts from."""
        return self._lr

    def rate(self, update: int) -> float:
        """The learning rate of a planned update, made or skipped."""
        return learning_rate(self._config.optim, self._lr, update, self._planned)

    def average(self) -> None:
        """The model's weights have moved: take them into the moving average, where there is one."""
        if self._average is not None:
            self._average.update()

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that `export` writes: averaged ones where an average is kept."""
        return nullcontext() if self._average is None else self._average.in_place()

    def made(self, norm: float, what: str, step: int, rows: Sequence[Row]) -> bool:
        """Whether an update with a gradient of this norm was made. If not its step is bad, see `bad`."""
        if math.isfinite(norm):
            return True
        self.bad(what, f"the gradient is not finite ({norm}); the update was skipped", step, rows)
        return False

    def bad(self, what: str, fault: str, step: int, rows: Sequence[Row]) -> None:
        """Rows cost a step an update: they are saved, and the step is counted, once however many updates it loses. Raises
        DivergenceError when there are too many such steps.
        """
        if step != self._bad_step:
            self._bad_step = step
            self.counters.bad_steps += 1
        count, allowed = self.counters.bad_steps, self._config.train.max_bad_steps
        message = self.report(what, f"{fault} (bad steps so far: {count})", step, rows)
        if count > allowed:
            raise DivergenceError(f"{message}; --train.max-bad-steps allows {allowed}")

    def report(self, what: str, fault: str, step: int, rows: Sequence[Row]) -> str:
        """See report_bad_rows."""
        return report_bad_rows(what, fault, rows, self._run_folder.bad_rows(step) if self.rank == 0 else None)

    def describe(self, **facts: Any) -> None:
        """What config.json of the exported model is to hold besides, from now on."""
        self._about = replace(self._about, config=facts)

    # ------------------------------------------------------------------ weights and state

    def publish(self, version: int) -> WeightSource | None:
        """The current weights, under the names of a Hugging Face checkpoint, offered by rank 0's publisher.

        None on other ranks, which take part in the gathering.
        """
        self.counters.version = version
        weights = self._weights()
        model = self.reader.policy.model
        return self._publisher.publish(hub_weights(model, weights).items(), version) if weights else None

    def send(self, source: WeightSource) -> None:
        """Rank 0's part while engines load what was published."""
        self._publisher.send(source)

    def release(self) -> None:
        """Free what `publish` gave."""
        self._publisher.release()

    def save(self, folder: Path) -> None:
        """Weights, their average, optimizer, random state and counters into an existing folder."""
        save_state(self.backend, self.counters, self._about, folder)
        if self._average is not None:
            self._average.save(folder / TAG)

    def load(self, folder: Path) -> None:
        """The state that `save` wrote with as many ranks. Raises DataError when the folder holds another."""
        self.counters = load_state(self.backend, self._about, folder)
        self.describe(**About.read(folder).config)
        if self._average is not None:
            self._average.load(folder / TAG, joined=(folder / TAG / UNIVERSAL).is_file())

    def export(self, folder: Path) -> None:
        """A Hugging Face folder of the weights, averaged ones where an average is kept: weights, configuration, tokenizer,
        processor, chat template; a LoRA adapter once more by itself in `adapter/`.
        """
        model, first = self.reader.policy.model, self.rank == 0
        with self.averaged():
            weights = self._weights()
            adapter = adapter_weights(model, self.backend, keep=first)
            if first:
                export_model(model, weights, self._model_path, folder, self._about.config, self._about.chat_template)
                if self._about.head == SCORE:
                    finish_reward_model(folder, self._about.chat_template)
            if adapter:
                export_adapter(model, adapter, self._model_path, folder)

    def _weights(self) -> dict[str, Tensor]:
        """All of them on rank 0, none on the others, which take part in the gathering."""
        return whole_weights(self.reader.policy.model, self.backend, keep=self.rank == 0)

    def close(self) -> None:
        """Free what was published and leave the process group."""
        self._publisher.close()
        self.backend.close()


def _chat_template(choice: str) -> str | None:
    """The text of the chat template that the run uses, where it is not the model's own."""
    if choice in ("auto", "none"):
        return None if choice == "auto" else ""
    return Path(choice).read_text(encoding="utf-8")


def _average(config: TrainerConfig, backend: Backend) -> WeightAverage | None:
    module = backend.engine.module
    return WeightAverage(module, config.optim.ema, sharded=backend.stage == 3) if config.optim.ema else None
