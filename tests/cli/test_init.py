"""agentrl init: where the tiny policies go."""

from __future__ import annotations

from pathlib import Path

import agentrl.trainers.tiny as tiny
import pytest


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of the test's own, and folders that appear at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(kind: str, out: Path, *, progress=None, **options) -> Path:
        progress("training", 0.1)
        progress("training", 0.9)
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
        return out

    monkeypatch.setattr(tiny, "make_tiny", make)
    monkeypatch.setattr(tiny, "cached_tiny", lambda kind, progress: make(kind, tiny.tiny_path(kind), progress=progress))


def test_the_folder_is_all_that_stdout_gets(agentrl) -> None:
    said = agentrl("init", "tiny-text")
    assert said.code == 0
    assert said.out.strip() == str(tiny.tiny_path("tiny-text"))
    assert "training: 10%" in said.err and "training: 90%" in said.err


def test_out_makes_a_new_folder_and_replaces_none(agentrl, tmp_path) -> None:
    said = agentrl("init", "tiny-vlm", "--out", tmp_path / "new")
    assert said.code == 0 and said.out.strip() == str(tmp_path / "new")
    again = agentrl("init", "tiny-vlm", "--out", tmp_path / "new")
    assert again.code == 2 and "there already" in again.err


def test_an_unknown_kind_names_the_nearest(agentrl) -> None:
    said = agentrl("init", "tiny-vl")
    assert said.code == 2 and "Did you mean tiny-vlm" in said.err
    assert agentrl("init").code == 2


def test_a_policy_in_the_cache_is_shown(agentrl, monkeypatch) -> None:
    agentrl("init", "tiny-text")
    monkeypatch.setattr(tiny, "cached_tiny", lambda kind, progress: tiny.tiny_path(kind))
    said = agentrl("init", "tiny-text")
    assert said.out.strip() == str(tiny.tiny_path("tiny-text")) and "already" in said.err
