"""The Ray engine on two raylets of this machine: the contract of all engines, then what only it promises."""

import io
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen import plugins
from digen.engines.base import Watched, WorkerGroup, WorkerSpec
from digen.engines.ray import RayEngine
from digen.errors import ConfigError, WorkerDied
from digen.observe.files import read_rows
from digen.presets import resolve
from digen.run import run
from digen.testing.contract import EngineContract

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WORKERS = HERE / "workers_for_engines.py"
CPUS = 4
"""Of each node."""


def spec(name: str = "group", payload: object = None, worker: str = "Worker", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, f"{WORKERS}:{worker}", payload, **{"threads": 1, **more})


def placed(name: str, **more: Any) -> WorkerSpec:
    return WorkerSpec(name, f"{HERE}/workers_for_ray.py:Placed", None, **{"threads": 1, **more})


def node_of(zone: str) -> str:
    import ray

    return next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Labels"].get("zone") == zone)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose nodes are raylets of this machine, with this process connected: engines stay with that."""
    import ray
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    temp = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    with temp, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", temp.name)
        head = {"num_cpus": CPUS, "labels": {"zone": "a"}, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        ray.init(made.address, namespace="digen", log_to_driver=False, logging_level=logging.ERROR)
        yield made
        ray.shutdown()
        made.shutdown()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def two_nodes(cluster: Any) -> Any:
    cluster.add_node(num_cpus=CPUS, labels={"zone": "b"})
    return cluster


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """All that was reserved is free again, and no thread of ours is left."""
    if "cluster" not in request.fixturenames:
        yield
        return
    import ray

    yield
    assert soon(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("digen-")] == []


def soon(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    limit = time.monotonic() + within_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return condition()


class TestContract(EngineContract):
    engine = "ray"

    @pytest.fixture(autouse=True)
    def _connected(self, cluster: Any) -> None: ...


# --- how ranks end ---


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_rank_is_named_with_its_last_words_and_what_is_started_again_finds_what_was_stored(
    cluster: Any, tmp_path: Path
) -> None:
    engine = RayEngine(grace_s=2)
    specs = [spec("two", 1, ranks=2, log_dir=tmp_path), spec("one", worker="TensorWorker")]
    async with engine.open(specs) as groups:
        two, one = groups["two"], groups["one"]
        (ref,) = await one.call("put", "one/0", 5)
        with pytest.raises(WorkerDied) as caught, anyio.fail_after(5):
            await two.call("die", "out of luck", others_wait_s=60)
        assert re.match(r"two rank 0 failed in die\(\): process \d+ on [\d.]+ has ended: ", str(caught.value))
        assert f"the end of {tmp_path}/two-0.log:" in str(caught.value)
        assert "out of luck" in str(caught.value)
        with pytest.raises(WorkerDied, match=r"echo\(\): the group has ended, since "):
            await two.call("echo")
        await engine.respawn(two)
        assert await two.call("place") == tuple((1, "two", rank, 2, "cpu") for rank in range(2))

        await _dies_idle(one)
        await engine.respawn(one)
        assert await one.call("equals", ref, 5) == (True,)
        assert (await one.call("put", "one/0", 6))[0].key != ref.key


async def _dies_idle(group: WorkerGroup) -> None:
    (pid,) = await group.call("pid")
    assert isinstance(group, Watched)
    assert group.lost is None
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(5):
        await group.ended()
    assert isinstance(group.lost, WorkerDied)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_ranks_of_a_killed_node_are_dead_and_their_group_goes_to_another(cluster: Any) -> None:
    doomed = cluster.add_node(num_cpus=2 * CPUS)
    engine = RayEngine(grace_s=2)
    async with engine.open([placed("group"), placed("other")]) as groups:  # the first one has the roomiest node
        group = groups["group"]
        assert await group.call("node") == (doomed.node_id,)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_fails_by_death, group)
            await anyio.sleep(0.2)
            await anyio.to_thread.run_sync(lambda: cluster.remove_node(doomed, allow_graceful=False))
        await engine.respawn(group)
        assert await group.call("node") == await groups["other"].call("node")


async def _fails_by_death(group: WorkerGroup) -> None:
    with anyio.fail_after(20), pytest.raises(WorkerDied, match=r"group rank 0 failed in wait\(\): process \d+ on"):
        await group.call("wait", 600)


# --- where ranks are ---


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
class TestPlaces:
    async def test_ranks_on_two_nodes_are_one_process_group_and_labels_choose_nodes(self, two_nodes: Any) -> None:
        wide, narrow = placed("wide", ranks=2, threads=CPUS - 1), placed("narrow", node={"zone": "b"})
        async with RayEngine().open([wide, narrow]) as groups:
            assert await groups["wide"].call("sum_of_ranks") == (3, 3)
            assert await groups["wide"].call("threads") == (str(CPUS - 1),) * 2
            nodes = {*await groups["wide"].call("node"), *await groups["narrow"].call("node")}
            assert nodes == {node_of("a"), node_of("b")}
            assert await groups["narrow"].call("node") == (node_of("b"),)

    async def test_more_than_there_is_is_refused_with_wanted_and_available(self, two_nodes: Any) -> None:
        said = r"^group: 3 rank\(s\) of 3 CPU each are wanted\. Available in the cluster: .* has 4 CPU, 0 GPU"
        with pytest.raises(ConfigError, match=said), anyio.fail_after(20):
            async with RayEngine("auto").open([spec(ranks=3, threads=3)]):
                pytest.fail("it opened")

    async def test_a_node_with_other_versions_is_refused_before_a_worker_is_made(
        self, two_nodes: Any, tmp_path: Path
    ) -> None:
        info = tmp_path / "diffusers-0.0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 0.0.1\n")
        other = spec("other", "raise", env={"PYTHONPATH": str(tmp_path)})
        with pytest.raises(ConfigError, match=r"^other rank 0 on .* has diffusers 0\.0\.1, the driver has"):
            async with RayEngine().open([other]):
                pytest.fail("it opened")


# --- whole runs ---

SMALL = (
    "steps=2", "data.prompts_per_step=4", "algorithm.samples_per_prompt=4", "sampling.num_steps=6",
    "trainer.backend=fsdp", "trainer.ranks=2", "generator.replicas=2", "trainer.batch_size=1", "generator.batch_size=1",
    "trainer.optimizer=sgd", "trainer.learning_rate=0.3", "trainer.weight_decay=0", "schedule.ordered=true",
    "trainer.threads=1", "generator.threads=1",
    f'reward={{"{HERE}/recording.py:brightness": {{}}}}', "observe.tensorboard=false",
)  # fmt: skip


def train(folder: Path, *overrides: str, said: io.StringIO | None = None) -> dict[str, torch.Tensor]:
    console = Console(file=said, width=1000) if said else Console(quiet=True)
    run(resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {}), console=console)
    assert all(row["weight_delta"] > 1e-3 for row in read_rows(folder / "metrics.jsonl"))
    return load_file(next(folder.glob("checkpoints/*/weights.safetensors")))


def test_glyph_on_two_nodes_learns_what_it_learns_on_processes_and_no_tensor_goes_through_the_driver(
    two_nodes: Any, tmp_path: Path, warm: None
) -> None:
    counting: Any = plugins.load(f"{HERE}/counting_ray.py:CountingRay")
    there = train(tmp_path / "ray", f"engine.name={HERE}/counting_ray.py:CountingRay")
    here = train(tmp_path / "process", f"engine.name={HERE}/warm.py:WarmEngine")
    assert max(float((there[name] - here[name]).abs().max()) for name in here) <= 1e-6
    (engine,) = counting.made
    assert engine.store.tensor_bytes == 0
    assert engine.traffic.calls > 20
    media_bytes = 2 * 16 * 3 * 32 * 32
    assert engine.traffic.sent_bytes + engine.traffic.received_bytes < 10 * media_bytes


def test_a_run_whose_node_is_killed_goes_on_and_learns_the_same(two_nodes: Any, tmp_path: Path) -> None:
    """A replica of the generator is killed with its node while it generates; it is started again on the other one."""
    alone = ["steps=1", "trainer.backend=local", "trainer.ranks=1"]
    ray = ["engine.name=ray", "trainer.node={zone: a}", f"generator.backend={HERE}/holding_ray.py:Holding"]
    ray.append(f"generator.env={{HOLD_IN: {tmp_path}}}")

    def kill() -> None:
        assert soon((tmp_path / "generating").exists, 120)
        (doomed,) = (node for node in two_nodes.worker_nodes if node.node_id == node_of("b"))
        two_nodes.remove_node(doomed, allow_graceful=False)
        (tmp_path / "go").touch()

    thread, said = threading.Thread(target=kill), io.StringIO()
    thread.start()
    there = train(tmp_path / "ray", *alone, *ray, said=said)
    thread.join()
    assert "generator-0 is started again" in said.getvalue()
    here = train(tmp_path / "inline", *alone, "engine.name=inline")
    assert max(float((there[name] - here[name]).abs().max()) for name in here) <= 1e-6


def test_a_run_begins_with_one_replica_and_another_comes_with_a_node_that_joins_the_cluster(
    cluster: Any, tmp_path: Path
) -> None:
    """The first replica waits in the second step until the other one, for which there was no room, has generated.

    Weights reach it as files.
    """
    nodes, said = [cluster.add_node(num_cpus=1, labels={"zone": "c"})], io.StringIO()
    elastic = ["generator.min_replicas=1", "generator.node={zone: c}", "trainer.node={zone: a}"]
    elastic.append("weights.transport=safetensors")
    elastic.append(f"generator.backend={HERE}/passing_generators.py:Passing")
    elastic.append(f"generator.env={{HOLD_IN: {tmp_path}}}")
    alone = ["trainer.backend=local", "trainer.ranks=1", "schedule.assist=none"]
    with ThreadPoolExecutor(1) as thread:  # nodes are added in the main thread alone
        training = thread.submit(train, tmp_path / "ray", *alone, "engine.name=ray", *elastic, said=said)
        assert soon(lambda: (tmp_path / "waiting").exists() or training.done(), 600)
        nodes.append(cluster.add_node(num_cpus=1, labels={"zone": "c"}))
        there = training.result()
    for node in nodes:
        cluster.remove_node(node)
    wanted = r"1 rank\(s\) of 1 CPU each are wanted on nodes with zone=c\. Available .*; generator-1 is away: the run"
    assert re.search(wanted, said.getvalue())
    assert "generator-1 is there: the run has 2 of 2 generators" in said.getvalue()
    here = train(tmp_path / "inline", *alone, "engine.name=inline")
    assert max(float((there[name] - here[name]).abs().max()) for name in here) <= 1e-6


ALONE = """
from pathlib import Path

import anyio
from digen.engines.base import WorkerSpec
from digen.engines.ray import RayEngine
from digen.errors import WorkerDied

async def main():
    groups = [WorkerSpec(name, {target!r}, None, threads=1, log_dir=Path({logs!r})) for name in ("one", "two")]
    async with RayEngine().open(groups) as opened:
        assert await opened["one"].call("echo", 1) == (((1,), {{}}),)
        try:
            await opened["two"].call("die", "last words")
        except WorkerDied:
            await opened["one"].call("child")

for _ in range(2):  # the second run of a process has a cluster of its own too
    anyio.run(main)
"""


def test_a_cluster_of_its_own_is_quiet_even_when_a_worker_dies_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = ALONE.format(target=f"{WORKERS}:Worker", logs=str(tmp_path / "logs"))
    (home := tmp_path / "home").mkdir()
    with tempfile.TemporaryDirectory(prefix="ray-") as temp:  # a short path, for Ray's sockets
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**os.environ, "HOME": str(home), "TMPDIR": temp},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert "last words" in (tmp_path / "logs" / "two-0.log").read_text()
        assert list(Path(temp).glob("*/")) == []
        assert list(home.iterdir()) == []
        assert soon(lambda: not _with_environment("TMPDIR", temp))


def _with_environment(name: str, value: str) -> list[psutil.Process]:
    found = psutil.process_iter(["environ", "status"])
    return [p for p in found if (p.info["environ"] or {}).get(name) == value and p.info["status"] != "zombie"]
