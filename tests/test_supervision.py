"""Groups that die and are started again, by the engines themselves; two runs at once; who has a run folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from digen import plugins
from digen.checkpoint.resume import locked
from digen.engines.base import WorkerSpec
from digen.engines.inline import InlineEngine
from digen.engines.process import ProcessEngine
from digen.errors import ConfigError, WorkerDied, WorkerError
from digen.observe.files import RunFolder

WORKERS = Path(__file__).with_name("workers_for_engines.py")


def spec(name: str = "group", payload: object = None, worker: str = "Worker", ranks: int = 1) -> WorkerSpec:
    return WorkerSpec(name, f"{WORKERS}:{worker}", payload, ranks=ranks, threads=1)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
class TestProcess:
    async def test_the_death_of_an_idle_rank_is_known_at_once(self, tmp_path: Path) -> None:
        async with ProcessEngine(tmp_path).open([spec(ranks=2)]) as groups:
            group = groups["group"]
            pids = await group.call("pid")
            assert group.lost is None  # type: ignore[attr-defined]
            os.kill(pids[1], signal.SIGKILL)
            with anyio.fail_after(5):
                await group.ended()  # type: ignore[attr-defined]
            assert "group rank 1 failed in wait(): process" in str(group.lost)  # type: ignore[attr-defined]
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await group.call("echo")

    async def test_a_lost_group_is_started_again_and_takes_calls_as_the_same_object(self, tmp_path: Path) -> None:
        engine = ProcessEngine(tmp_path, grace_s=0.3)
        async with engine.open([spec(worker="TensorWorker", ranks=2), spec("other")]) as groups:
            group, before = groups["group"], await groups["group"].call("pid")
            await group.call("join")
            with pytest.raises(WorkerDied):
                await group.call("die", "")
            await engine.respawn(group)
            after = await group.call("pid")
            assert not set(before) & set(after)
            assert not any(psutil.pid_exists(pid) for pid in before)
            await group.call("join")  # at a new meeting place
            assert await group.call("all_reduce", 10) == (21, 21)
            assert await groups["other"].call("echo") == (((), {}),)

    async def test_what_a_lost_rank_stored_stays_and_its_successor_uses_new_keys(self, tmp_path: Path) -> None:
        engine = ProcessEngine(tmp_path)
        async with engine.open([spec(worker="TensorWorker")]) as groups:
            group = groups["group"]
            (first,) = await group.call("put", "a", 1)
            await engine.respawn(group)
            (second,) = await group.call("put", "a", 2)
            assert first != second
            assert await group.call("equals", first, 1) == (True,)
            assert await group.call("equals", second, 2) == (True,)
            engine.store.drop(second)
            assert (engine.store.has(first), engine.store.has(second)) == (True, False)

    async def test_a_stopped_rank_is_killed_when_it_is_started_again(self, tmp_path: Path) -> None:
        engine = ProcessEngine(tmp_path, grace_s=0.2)
        async with engine.open([spec()]) as groups:
            group = groups["group"]
            (pid,) = await group.call("pid")
            os.kill(pid, signal.SIGSTOP)
            with anyio.move_on_after(0.1):
                await group.call("echo")
            await engine.respawn(group)
            assert not psutil.pid_exists(pid)
            assert await group.call("echo") == (((), {}),)

    async def test_a_constructor_that_fails_the_second_time_is_an_error(self, tmp_path: Path) -> None:
        engine = ProcessEngine(tmp_path)
        async with engine.open([spec()]) as groups:
            group = groups["group"]
            group._spec = spec(payload="raise")  # type: ignore[attr-defined]
            with pytest.raises(WorkerError, match=r"failed in __init__\(\): ValueError: no such model"):
                await engine.respawn(group)

    async def test_abandoned_workers_and_their_folder_are_gone_at_once(self, tmp_path: Path) -> None:
        engine = ProcessEngine(tmp_path)
        async with engine.open([spec(ranks=2)]) as groups:
            pids = await groups["group"].call("pid")
            engine.abandon()
            assert not any(psutil.pid_exists(pid) for pid in pids)
            assert not any(os.scandir(tmp_path))
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await groups["group"].call("echo")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_inline_group_is_started_again_as_a_new_object_with_new_keys() -> None:
    engine = InlineEngine()
    async with engine.open([spec(worker="TensorWorker")]) as groups:
        group = groups["group"]
        (first,) = await group.call("put", "a", 1)
        await engine.respawn(group)
        (second,) = await group.call("put", "a", 2)
        assert first != second
        assert await group.call("equals", first, 1) == (True,)
        assert await group.call("equals", second, 2) == (True,)


def test_built_in_engines_can_start_a_group_again() -> None:
    for name in ("inline", "process", "ray"):
        assert hasattr(plugins.find("engines", name), "respawn")


# Isolation -----------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from digen.checkpoint.resume import locked
from digen.observe.files import RunFolder

with locked(RunFolder(Path(sys.argv[1]))):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_locked_run_folder_says_by_whom_and_for_how_long_and_a_killed_owner_leaves_a_stale_lock(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "locked\n"
        said = rf"is being trained by another process: process {owner.pid} on .+, for 0 h 0 min"
        with pytest.raises(ConfigError, match=said), locked(folder):
            pytest.fail("two have it")
        owner.kill()
    with locked(folder) as notes:
        assert len(notes) == 1
        assert f"the lock of process {owner.pid} on " in notes[0]
        assert "is stale" in notes[0]
    with locked(folder) as notes:
        assert notes == ()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_two_engines_at_once_share_nothing(tmp_path: Path) -> None:
    one, other = ProcessEngine(tmp_path), ProcessEngine(tmp_path)
    pair = [spec(worker="TensorWorker", ranks=2)]
    async with one.open(pair) as first, other.open(pair) as second:
        for groups in (first, second):
            await groups["group"].call("join")
        mine = (await first["group"].call("put_of_rank", 1))[0]
        assert not other.store.has(mine)
        assert await first["group"].call("all_reduce", 1) == await second["group"].call("all_reduce", 1)
    assert not any(os.scandir(tmp_path))
