"""Every benchmark starts: what it imports is there, and no file beside it stands in the way of Python's own modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_benchmark_says_how_it_is_called() -> None:
    assert len(SCRIPTS) > 5
    failed = {}
    for script in SCRIPTS:
        command = [sys.executable, str(script.relative_to(ROOT)), "--help"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode or "usage:" not in result.stdout:
            failed[script.name] = result.stderr[-500:]
    assert not failed
