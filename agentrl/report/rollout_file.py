"""Episodes in a file of their own, outside any run."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from ..rollout.episode import EpisodeResult
from .record import JSON_LINES, episode_record, json_line


class RolloutFile:
    """JSON lines as in a run's rollouts/, flushed one by one; pictures go to `images`, beside the file.

    A file that is there is replaced. Without a path nothing is kept. Raises ConfigError for a path that cannot be written.
    """

    def __init__(self, out: str | None) -> None:
        self._stack = ExitStack()
        self._file = None
        if out is None:
            self.images = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-images-")))
            return
        path = Path(out)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._stack.enter_context(path.open("w", **JSON_LINES))
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from error
        self.images = path.parent / "images"

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, result: EpisodeResult) -> None:
        """One line, as step 0."""
        if self._file is None:
            return
        record = episode_record(result, step=0, outcome="played" if result.error is None else "failed")
        self._file.write(json_line(record))
        self._file.flush()
