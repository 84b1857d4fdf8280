"""An engine that another package brings under the entry point group agentrl.engines."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl import ConfigError, GenerationRequest, Limits, Sampling, ScriptedEngine
from agentrl.config import Config
from agentrl.config.checks import TRAINING_ENGINES, check_engine
from agentrl.engines.starting import engine_kind, start_in_process, vllm_options
from agentrl.engines.vllm_actor import spawn_engine
from agentrl.preflight import EnvFacts, Ready
from agentrl.registry import lookup

PACKAGE = """
from agentrl import Reply, ScriptedEngine


class Parrot(ScriptedEngine):
    def __init__(self, options, version):
        super().__init__(lambda request: Reply(list(request.token_ids[-2:])), version)
        self.options = options

    async def start(self):
        assert self.options.model.endswith("any")

    async def shutdown(self):
        pass
"""


ASKED = GenerationRequest((1, 2, 3), Sampling(max_new_tokens=4), request_id="r")


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `parrot_engine` is installed."""
    (tmp_path / "parrot_engine.py").write_text(PACKAGE)
    about = tmp_path / "parrot_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[agentrl.engines]\nparrot = parrot_engine:Parrot\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield


def ready(folder: Path) -> Ready:
    """A run with that engine."""
    model = folder / "any"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = Config.model_validate({"engine": {"name": "parrot"}})
    return Ready(config, str(model), {}, [], EnvFacts(None), Limits(), ())


def test_its_name_is_known(parrot: None) -> None:
    config = Config.model_validate({"engine": {"name": "parrot"}})
    check_engine(config, TRAINING_ENGINES)
    assert issubclass(lookup("engine", "parrot"), ScriptedEngine)
    with pytest.raises(ConfigError, match=r"no engine 'parot' here\. Did you mean parrot"):
        check_engine(Config.model_validate({"engine": {"name": "parot"}}), TRAINING_ENGINES)


@pytest.mark.slow
async def test_it_plays_in_a_process_of_its_own(parrot: None, ray_cluster: None, tmp_path: Path) -> None:
    import parrot_engine
    from ray import cloudpickle

    # The workers of the shared cluster were started before the package was there.
    cloudpickle.register_pickle_by_value(parrot_engine)
    engine = spawn_engine(vllm_options(ready(tmp_path), gpus=0), kind=engine_kind("parrot"))
    await engine.start()
    try:
        assert tuple((await engine.generate(ASKED)).token_ids) == (2, 3)
    finally:
        await engine.close()


async def test_it_answers_in_this_process(parrot: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    engine = await start_in_process(ready(tmp_path), gpus=0)
    assert tuple((await engine.generate(ASKED)).token_ids) == (2, 3)
    assert engine.options.device == "cpu" and os.environ["OMP_NUM_THREADS"] == "1"
    await engine.shutdown()
