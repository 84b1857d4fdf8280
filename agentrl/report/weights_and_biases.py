"""Every number of a record in a run of Weights & Biases."""

from __future__ import annotations

import importlib.util
import secrets
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ConfigError

ID_FILE = "wandb_id"


@dataclass(frozen=True)
class WandbRun:
    """Where a run is logged. `config` is shown beside it; it holds no secrets. The key is wandb's own: WANDB_API_KEY, or what
    `wandb login` stored.
    """

    folder: Path
    project: str
    entity: str | None = None
    group: str | None = None
    config: dict[str, Any] | None = None


class WandbSink:
    """Logs to the run of the folder: one that is resumed goes on in the same run. Raises ConfigError when the wandb package is
    not installed or the service refuses.

    A point carries the step of its record, so that evaluations may come later than the steps they are of.
    """

    def __init__(self, where: WandbRun) -> None:
        check_installed()
        import wandb

        self._where = where
        where.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=where.project,
                entity=where.entity,
                group=where.group,
                name=where.folder.name,
                id=self._id(),
                resume="allow",
                dir=str(where.folder),
                config=where.config,
                settings=wandb.Settings(quiet=True, silent=True, console="off"),
            )
        except (wandb.errors.Error, OSError) as error:
            raise ConfigError(
                f"--log.wandb: {error} (WANDB_MODE=offline logs to {where.folder}/wandb without a server.)"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _id(self) -> str:
        file = self._where.folder / ID_FILE
        if not file.is_file():
            file.write_text(secrets.token_hex(4))
        return file.read_text().strip()

    def __enter__(self) -> WandbSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def stage(self, doing: str) -> None:
        return None

    def step(self, record: dict[str, Any]) -> None:
        numbers = {key: value for key, value in record.items() if key != "time" and isinstance(value, int | float)}
        self._run.log(numbers)

    def evaluation(self, record: dict[str, Any]) -> None:
        self.step(record)


def check_installed() -> None:
    """Raises ConfigError when the wandb package is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("--log.wandb needs the wandb package: pip install wandb.")
