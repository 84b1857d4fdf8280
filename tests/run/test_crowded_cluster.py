"""A run on a cluster of two nodes that others use as well, with small object stores and no space on the disk behind them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.placement import Share, Wanted

from .test_ending import wait_until
from .test_faults import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PICTURES = Path(__file__).with_name("pictures.py")
HOLDER = """
import sys, time, ray
from agentrl.config import Config
from agentrl.placement import Share, Wanted, reserved
ray.init(logging_level="ERROR")
with reserved(Wanted(rank=Share(1, 0), ranks=6), 0.0, Config().watchdog):
    print("held", flush=True)
    time.sleep(300)
"""

DRIVER = """
import json, logging, sys, ray
from agentrl.config import WatchdogSection
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.placement import Share, Wanted, check_room, reserved
logging.basicConfig(stream=sys.stderr, format="%(message)s")
ray.init(logging_level="ERROR")
found = {}

def refused(name, wanted):
    try:
        check_room(wanted)
    except ConfigError as error:
        found[name] = str(error)

@ray.remote(num_cpus=1)
class Actor:
    def node(self):
        return ray.get_runtime_context().get_node_id()

def nodes(places):
    actors = [Actor.options(**place).remote() for place in places]
    return actors, ray.get([actor.node.remote() for actor in actors], timeout=60)

one = Share(1, 0)
refused("all", Wanted(one, 3, one, 4))
refused("one node", Wanted(one, 2, one, 3, one_node=True))
refused("one engine", Wanted(Share(5, 0), 1))
refused("fits", Wanted(one, 2, one, 4))
large = {node["NodeID"] for node in ray.nodes() if node["Resources"]["CPU"] == 4}
with reserved(Wanted(one, 1, one, 3, one_node=True), 0.0, WatchdogSection()) as places:
    actors, where = nodes([places.engine(0), *map(places.rank, range(3))])
    found["together"] = set(where) == large
    ray.kill(actors[0])
    found["again"] = set(nodes([places.engine(0)])[1]) == large
    try:
        with reserved(Wanted(one, 2, one, 2), 0.0, WatchdogSection(reserve_timeout_s=5)):
            found["waited"] = "in vain"
    except InfrastructureError as error:
        found["waited"] = str(error)
with reserved(Wanted(rank=one, ranks=2), 0.0, WatchdogSection()) as places:
    found["ranks"] = len(set(nodes(map(places.rank, range(2)))[1]))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of a node with 2 CPUs and one with 4, to which this process is not connected. Each has an object store of 80 MiB,
    and takes its disk for full.
    """
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 80 * 2**20}
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": {"local_fs_capacity_threshold": 0.0001}}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head | store)
    try:
        cluster.add_node(num_cpus=4, **store)
        yield cluster.address
    finally:
        cluster.shutdown()


def test_what_is_wanted_is_counted_in_places() -> None:
    engine, rank = Share(1, 2), Share(3, 1)
    apart = Wanted(engine, 2, rank, 1)
    assert apart.bundles() == [engine, engine, rank] and str(apart.total) == "5 CPUs and 5 GPUs"
    assert Wanted(Share(1, 0.5), 1, Share(3, 0.5), 1, shared=True).bundles() == [Share(4, 1)]


def test_places_are_refused_reserved_and_waited_for(address: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", DRIVER], env={**os.environ, "RAY_ADDRESS": address}, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["all"] == (
        "The run wants 7 CPUs (3 for engines, 4 for the trainer); the cluster has 6, 6 of them free. Lower --engine.count, "
        "--parallel.ranks or --parallel.threads."
    )
    assert "They want 5 CPUs; the nodes have 2 CPUs; 4 CPUs" in found["one node"].replace(
        "4 CPUs; 2 CPUs", "2 CPUs; 4 CPUs"
    )
    assert found["one engine"].startswith("An engine wants 5 CPUs on one node")
    assert found["together"] and found["again"] and found["ranks"] == 1 and "fits" not in found
    said = "2 CPUs for engines and 2 CPUs for the trainer; free are 2 of 6 CPUs"
    assert found["waited"] == f"waited 5 s (--watchdog.reserve-timeout-s) for {said}. Other jobs hold the rest."
    assert f"waiting for {said}" in run.stderr


def test_a_run_waits_for_room_in_the_cluster_and_in_its_object_store(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins when the job that held all CPUs is killed. Pictures that do not fit into the store cost attempts, which the log
    explains, and no episode; nothing is held afterwards.
    """
    from ..engines import tiny

    tiny.vision_model(tmp_path / "model")
    monkeypatch.setenv("RAY_ADDRESS", address)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    engine = ["--engine", "scripted", "--engine.script", f"{PICTURES}:reply", "--model", str(tmp_path / "model")]
    sizes = ["--train.batch-groups", "1", "--rollout.n-samples", "2", "--rollout.max-len", "512"]
    lengths = ["--rollout.max-new-tokens", "16", "--rollout.retries", "9", "--train.steps", "1"]
    plain = ["--eval.no-enable", "--train.max-staleness", "0"]
    run = None
    try:
        assert holder.stdout is not None and "held" in holder.stdout.readline()
        run = Running(tmp_path, "--env", f"{PICTURES}:Noise", *engine, *sizes, *lengths, *plain)
        run.wait(lambda: "waiting for 1 CPU for the trainer; free are 0 of 6 CPUs" in run.log.read_text(), 120)
        assert not (tmp_path / "run").exists()
        holder.send_signal(signal.SIGKILL)
        assert run.process.wait(200) == 0, run.log.read_text()[-3000:]
    finally:
        holder.kill()
        if run is not None:
            run.end()
    said = run.log.read_text()
    assert (
        "attempt 1 lost, played again: StoreFullError: no room for the pictures of a request: Ray's object store and"
        in said
    )
    assert "Traceback" not in said and run.steps() == [1]
    (path,) = (tmp_path / "run" / "rollouts").glob("*1.jsonl")
    lines = [json.loads(line) for line in path.open()]
    assert len(lines) == 2 and all(line["error"] is None for line in lines)
    pictures = {line["messages"][0]["content"][0]["sha256"] for line in lines if line["rows"]}
    assert pictures <= {path.stem for path in (tmp_path / "run" / "images").iterdir()}
    assert wait_until(lambda: groups_left(address) == 0, 20)


def groups_left(address: str) -> int:
    """Placement groups that the cluster still holds."""
    code = (
        "import ray\nfrom ray.util import placement_group_table\nray.init(logging_level='ERROR')\n"
        "print(sum(group['state'] != 'REMOVED' for group in placement_group_table().values()))"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)
