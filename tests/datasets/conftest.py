"""Data files of a test, and a cache of its own for `datasets`."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    """lines(rows): a jsonl file; what is a str already is written as it is."""

    def file(rows: Iterable[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        texts = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
        path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return file


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str, list[dict[str, Any]]], str]:
    """stored("parquet", rows): the rows in a file, folder or disk format of `datasets`, and its path."""
    import datasets

    def store(kind: str, rows: list[dict[str, Any]]) -> str:
        table, path = datasets.Dataset.from_list(rows), tmp_path / f"stored.{kind}"
        if kind == "parquet":
            table.to_parquet(path)
        elif kind == "csv":
            table.to_csv(path)
        elif kind == "json":
            path.write_text(json.dumps(rows))
        elif kind == "arrow":
            table.save_to_disk(tmp_path / "written")
            next((tmp_path / "written").glob("*.arrow")).rename(path)
        elif kind == "disk":
            table.save_to_disk(path)
        elif kind == "dict":
            datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(path)
        else:
            path.mkdir()
            table.to_parquet(path / "train-00000-of-00001.parquet")
            (path / "test.jsonl").unlink(missing_ok=True)
        return str(path)

    return store


RED = PILImage.new("RGB", (2, 2), (200, 10, 10))


@pytest.fixture
def forms(tmp_path: Path) -> dict[str, Any]:
    """One picture of 2x2 pixels in every form a row may hold."""
    buffer = io.BytesIO()
    RED.save(buffer, "PNG")
    png = buffer.getvalue()
    (tmp_path / "red.png").write_bytes(png)
    return {
        "absolute": str(tmp_path / "red.png"),
        "relative": "red.png",
        "bytes": png,
        "dict": {"bytes": png, "path": None},
        "data": "data:image/png;base64," + base64.b64encode(png).decode(),
        "pil": RED,
    }
