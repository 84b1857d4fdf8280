"""The repair of torchvision's import, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPAIR = "from agentrl.torchvision_ops import ensure_torchvision_imports as ensure; ensure(); ensure()\n"
USE = "from transformers import Qwen3ForCausalLM, Qwen2VLImageProcessor\nimport torchvision.transforms.v2.functional\n"
USE += "import datasets; datasets.Dataset.from_list([{'a': 1}])\n"


BEFORE = ["", "import transformers, datasets; from transformers import AutoTokenizer\n"]


@pytest.mark.parametrize("before", BEFORE)
def test_models_and_processors_import_whatever_torchvision_is_there(before: str) -> None:
    pytest.importorskip("torch")
    run = subprocess.run(
        [sys.executable, "-c", before + REPAIR + USE], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_model_is_looked_at_whatever_torchvision_is_there(tmp_path: Path) -> None:
    """Of a kind whose configuration imports what handles pictures."""
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = f"from agentrl.model_folder import check_model; check_model({str(tmp_path)!r}, weights=False)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_nothing_is_loaded_where_torch_is_absent() -> None:
    code = "import sys; sys.modules['torch'] = None\n" + REPAIR + "assert 'torchvision' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
