"""The publisher's blocks and manifest, and the check of names against a checkpoint."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.engines.weights import SHM_DIR, WeightPublisher, WeightReader, WeightSource
from agentrl.errors import EngineError

WEIGHTS = {
    "a.weight": torch.arange(35, dtype=torch.float32).view(5, 7),
    "b.bias": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "c.scale": torch.tensor(7.0),
    "d.weight": torch.randn(100, 30).t(),
}


def test_what_is_read_is_what_was_published() -> None:
    with WeightPublisher(block_bytes=4096) as publisher:
        source = publisher.publish(WEIGHTS.items(), version=3)
        assert source.version == 3
        assert len(source.blocks) == 2
        for travelled in (
            pickle.loads(pickle.dumps(source)),
            WeightSource.from_dict(json.loads(json.dumps(source.to_dict()))),
        ):
            assert travelled == source
            reader = WeightReader(travelled)
            assert reader.fingerprint() == source.fingerprint
            read = dict(reader.tensors())
            assert list(read) == list(WEIGHTS)
            assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in WEIGHTS.items())


def test_a_tensor_is_copied_before_the_next_is_asked_for() -> None:
    def sharded() -> Iterator[tuple[str, torch.Tensor]]:
        gathered = torch.empty(4)
        for i in range(3):
            yield f"w{i}", gathered.fill_(i)
            gathered.fill_(float("nan"))

    with WeightPublisher() as publisher:
        read = dict(WeightReader(publisher.publish(sharded(), 1)).tensors())
        assert [tensor[0].item() for tensor in read.values()] == [0.0, 1.0, 2.0]


def test_release_and_the_next_publish_unlink_the_blocks() -> None:
    publisher = WeightPublisher()
    first = publisher.publish(WEIGHTS.items(), 1)
    reader = WeightReader(first)
    second = publisher.publish(WEIGHTS.items(), 2)
    assert not (SHM_DIR / first.blocks[0]).exists()
    assert torch.equal(dict(reader.tensors())["a.weight"], WEIGHTS["a.weight"])
    publisher.release()
    assert not (SHM_DIR / second.blocks[0]).exists()
    with pytest.raises(EngineError, match="gone"):
        WeightReader(second)


def test_a_reader_never_changes_the_blocks() -> None:
    with WeightPublisher() as publisher:
        source = publisher.publish(WEIGHTS.items(), 1)
        next(WeightReader(source).tensors())[1].zero_()
        assert torch.equal(dict(WeightReader(source).tensors())["a.weight"], WEIGHTS["a.weight"])


def test_another_content_has_another_fingerprint() -> None:
    with WeightPublisher() as one, WeightPublisher() as other:
        prints = {
            one.publish([("a", torch.ones(4))], 1).fingerprint,
            other.publish([("a", torch.zeros(4))], 1).fingerprint,
            one.publish([("b", torch.ones(4))], 1).fingerprint,
            other.publish([("a", torch.ones(2, 2))], 1).fingerprint,
        }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("a", torch.ones(2)), ("empty.weight", torch.empty(0))], "empty.weight has size 0"),
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "a was published twice"),
    ],
)
def test_what_cannot_be_published(tensors: list[tuple[str, torch.Tensor]], said: str) -> None:
    with WeightPublisher() as publisher, pytest.raises(EngineError, match=said):
        publisher.publish(tensors, 1)


def test_a_killed_publisher_leaves_nothing_behind_and_a_dead_reader_takes_nothing_along() -> None:
    with WeightPublisher() as publisher:
        source = publisher.publish(WEIGHTS.items(), 1)
        _python(f"from agentrl.engines.weights import _map\n_map({source.blocks[0]!r})")
        assert (SHM_DIR / source.blocks[0]).exists()
    killed = _python(
        "import os, signal, torch\n"
        "from agentrl.engines.weights import WeightPublisher\n"
        "publisher = WeightPublisher()\n"
        "print(publisher.publish([('a', torch.ones(4))], 1).blocks[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert killed.strip() and not _eventually_there(SHM_DIR / killed.strip())


def _python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return run.stdout


def _eventually_there(path: Path) -> bool:
    """Whether the file is still there once the dead process's resource tracker has had time to end."""
    for _ in range(100):
        if not path.exists():
            return False
        subprocess.run(["sleep", "0.05"], check=True)
    return True
