"""An engine that another package brings under the entry point group agentrl.engines."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl import ConfigError, GenerationRequest, Limits, Sampling, ScriptedEngine
from agentrl.cluster import Cluster
from agentrl.config import Config
from agentrl.config.checks import TRAINING_ENGINES, check_engine
from agentrl.placement import Reservation
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
    config = Config.model_validate({"engine": {"name": "parrot"}})
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "config.json").write_text("{}")
    ready = Ready(config, str(tmp_path / "any"), {}, [], EnvFacts(None), Limits(), ())
    cluster = Cluster(ready, tmp_path, Reservation())
    engine = await cluster.lone_engine()
    try:
        made = await engine.generate(GenerationRequest((1, 2, 3), Sampling(max_new_tokens=4), request_id="r"))
        assert tuple(made.token_ids) == (2, 3)
    finally:
        await cluster.close()
