"""What the process engine promises beyond the common contract: logs, deaths, process groups, nothing left behind."""

import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from digen.engines.base import WorkerSpec
from digen.engines.process import ProcessEngine
from digen.errors import WorkerDied, WorkerError

WORKERS = Path(__file__).with_name("workers_for_engines.py")


def spec(name: str = "group", payload: object = None, worker: str = "Worker", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, f"{WORKERS}:{worker}", payload, **more)


@pytest.fixture
def processes(tmp_path: Path) -> ProcessEngine:
    return ProcessEngine(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("digen-")] == []
    assert list(tmp_path.glob("digen-*")) == []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def soon(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    limit = time.monotonic() + within_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    return condition()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestProcess:
    async def test_values_come_in_rank_order(self, processes: ProcessEngine) -> None:
        async with processes.open([spec(ranks=3)]) as groups:
            places = await groups["group"].call("place")
            assert places == tuple((None, "group", rank, 3, "cpu") for rank in range(3))
            assert len(set(await groups["group"].call("pid"))) == 3

    async def test_what_does_not_pickle_is_said_and_the_worker_goes_on(self, processes: ProcessEngine) -> None:
        with pytest.raises(WorkerError, match=r"__init__\(\): the arguments do not pickle: "):
            async with processes.open([spec(payload=lambda: 0)]):
                pytest.fail("it opened")
        async with processes.open([spec()]) as groups:
            group = groups["group"]
            with pytest.raises(WorkerError, match=r"echo\(\): the arguments do not pickle: .*lambda"):
                await group.call("echo", lambda: 0)
            with pytest.raises(WorkerError, match=r"lock\(\): the result does not pickle: TypeError: .*lock"):
                await group.call("lock")
            with pytest.raises(WorkerError, match=r"broken\(\): the result does not unpickle in the driver: KeyError"):
                await group.call("broken")
            with pytest.raises(WorkerError, match="the arguments do not unpickle in the worker: KeyError: "):
                await group.call("echo", Broken())
            assert await group.call("echo", 1) == (((1,), {}),)

    async def test_environment_and_thread_counts_are_set_before_torch_is_loaded(
        self, processes: ProcessEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        monkeypatch.setenv("OMP_NUM_THREADS", "64")
        own = {"OMP_NUM_THREADS": "5", "DIGEN_TEST": "x"}
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "DIGEN_TEST")
        async with processes.open([spec("a", threads=1), spec("b", threads=1, env=own)]) as groups:
            plain, with_own = [(await groups[name].call("environment", *names))[0] for name in "ab"]
        assert plain == (["1", "1", "PASSIVE", "0", None], False)
        assert with_own == (["5", "1", "PASSIVE", "0", "x"], False)

    async def test_all_that_a_rank_writes_goes_to_its_log_and_nowhere_else(
        self, processes: ProcessEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        logs = tmp_path / "run" / "logs"
        async with processes.open([spec(ranks=2, log_dir=logs)]) as groups:
            await groups["group"].call("talk")
            texts = {path.name: path.read_text() for path in logs.iterdir()}
        assert texts.keys() == {"group-0.log", "group-1.log"}
        for text in texts.values():
            assert all(word in text for word in ("printed", "complained", "UserWarning: warned", "written by C code"))
        assert capfd.readouterr() == ("", "")

    async def test_a_killed_rank_is_named_with_signal_and_last_words_within_two_seconds(
        self, processes: ProcessEngine, tmp_path: Path
    ) -> None:
        async with processes.open([spec(log_dir=tmp_path), spec("other")]) as groups:
            (pid,) = await groups["group"].call("pid")
            with pytest.raises(WorkerDied) as caught, anyio.fail_after(2):
                await groups["group"].call("die", "out of luck")
            assert str(caught.value).startswith(
                f"group rank 0 failed in die(): process {pid} was killed by SIGKILL; the end of {tmp_path}/group-0.log:"
            )
            assert "out of luck" in str(caught.value)
            with pytest.raises(WorkerDied, match=r"echo\(\): the group has ended, since .* SIGKILL"):
                await groups["group"].call("echo")
            assert await groups["other"].call("echo") == (((), {}),)

    async def test_a_rank_that_died_while_idle_is_noticed_at_the_next_call(self, processes: ProcessEngine) -> None:
        async with processes.open([spec()]) as groups:
            (pid,) = await groups["group"].call("pid")
            os.kill(pid, signal.SIGSEGV)
            assert soon(lambda: not alive(pid))
            with pytest.raises(WorkerDied, match=rf"process {pid} was killed by SIGSEGV"), anyio.fail_after(2):
                await groups["group"].call("echo")

    async def test_a_rank_that_exits_in_its_constructor_is_reported_with_its_exit_code(
        self, processes: ProcessEngine, tmp_path: Path
    ) -> None:
        said = r"(?s)^bad rank 0 failed in __init__\(\): process \d+ ended with exit code 3; .*cannot go on"
        with pytest.raises(WorkerDied, match=said), anyio.fail_after(10):
            async with processes.open([spec("slow", "forever"), spec("bad", "exit", log_dir=tmp_path)]):
                pytest.fail("it opened")

    async def test_an_exit_in_a_call_is_the_end_of_the_rank(self, processes: ProcessEngine) -> None:
        async with processes.open([spec()]) as groups:
            with pytest.raises(WorkerDied, match="ended with exit code 7"):
                await groups["group"].call("exit")

    async def test_when_one_rank_dies_the_others_do_not_wait_for_it(self, processes: ProcessEngine) -> None:
        async with processes.open([spec(ranks=2)]) as groups:
            pids = await groups["group"].call("pid")
            with pytest.raises(WorkerDied, match=r"group rank 1 .*SIGKILL"), anyio.fail_after(2):
                await groups["group"].call("die", "", rank=1, others_wait_s=60)
            assert not any(alive(pid) for pid in pids)

    async def test_a_death_is_reported_rather_than_what_others_raise_because_of_it(
        self, processes: ProcessEngine
    ) -> None:
        async with processes.open([spec(ranks=2)]) as groups:
            with pytest.raises(WorkerDied, match=r"group rank 1 .*SIGKILL"), anyio.fail_after(2):
                await groups["group"].call("die_slowly")

    async def test_a_rank_that_raises_leaves_the_group_usable_when_all_ranks_answer(
        self, processes: ProcessEngine
    ) -> None:
        async with processes.open([spec(ranks=2)]) as groups:
            with pytest.raises(WorkerError, match="group rank 1 failed in raise_on"):
                await groups["group"].call("raise_on", 1, others_wait_s=0.1)
            assert await groups["group"].call("raise_on", 2) == (0, 1)

    async def test_a_rank_that_raises_while_others_wait_for_it_ends_the_group(self, tmp_path: Path) -> None:
        async with ProcessEngine(tmp_path, grace_s=0.2).open([spec(ranks=2)]) as groups:
            with pytest.raises(WorkerError, match=r"rank 1 failed in raise_on.*lost it") as caught, anyio.fail_after(2):
                await groups["group"].call("raise_on", 1, others_wait_s=60)
            assert not isinstance(caught.value, WorkerDied)
            with pytest.raises(WorkerDied, match="the group has ended, since group rank 1 failed in raise_on"):
                await groups["group"].call("echo")

    async def test_a_process_group_works_inside_a_worker_group_and_ends_with_a_dead_rank(self, tmp_path: Path) -> None:
        engine = ProcessEngine(tmp_path, grace_s=0.5)
        pair = spec(worker="TensorWorker", ranks=2, threads=1)
        async with engine.open([pair]) as groups:
            await groups["group"].call("join")
            assert await groups["group"].call("all_reduce", 10) == (21, 21)
            with pytest.raises(WorkerError, match=r"rank 0 failed in all_reduce.*not in the mood"), anyio.fail_after(5):
                await groups["group"].call("all_reduce", 10, failing_rank=0)

    async def test_ctrl_c_is_for_the_driver_only(self, processes: ProcessEngine) -> None:
        async with processes.open([spec()]) as groups:
            (pid,) = await groups["group"].call("pid")
            assert os.getpgid(pid) != os.getpgid(0)
            os.kill(pid, signal.SIGINT)
            assert await groups["group"].call("echo") == (((), {}),)

    async def test_a_workers_own_children_end_with_it(self, processes: ProcessEngine) -> None:
        async with processes.open([spec("a"), spec("b")]) as groups:
            (closed,), (orphan,) = await groups["a"].call("child"), await groups["b"].call("child")
            with pytest.raises(WorkerDied):
                await groups["b"].call("die", "")
            assert soon(lambda: not alive(orphan))
            assert alive(closed)
        assert soon(lambda: not alive(closed))

    async def test_a_forked_child_does_not_hide_the_death_of_a_worker(self, processes: ProcessEngine) -> None:
        async with processes.open([spec()]) as groups:
            await groups["group"].call("fork")
            with pytest.raises(WorkerDied, match="SIGKILL"), anyio.fail_after(2):
                await groups["group"].call("die", "")

    async def test_a_busy_worker_is_ended_without_waiting_for_it(self, processes: ProcessEngine) -> None:
        async with processes.open([spec()]) as groups:
            (pid,) = await groups["group"].call("pid")
            with anyio.move_on_after(0.05):
                await groups["group"].call("interval", 60)
            start = time.monotonic()
        assert time.monotonic() - start < 2
        assert not alive(pid)


class Broken:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return operator.getitem, ({}, "nothing")


DRIVER = """
import signal
import sys
from pathlib import Path
import anyio
from digen.engines.base import WorkerSpec
from digen.engines.process import ProcessEngine

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts the tests may have it ignored

async def main():
    async with ProcessEngine(Path(sys.argv[1])).open([WorkerSpec("group", sys.argv[2], None, ranks=2)]) as groups:
        assert "torch" not in sys.modules
        print(*await groups["group"].call("pid"), flush=True)
        await groups["group"].call("interval", 600)

anyio.run(main)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_survives_its_driver_which_is_a_plain_script_without_torch(
    how: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(tmp_path / "store"), f"{WORKERS}:Worker"]
    (tmp_path / "store").mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as driver:
        assert driver.stdout
        try:
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 2
            assert all(alive(pid) for pid in pids)
            driver.send_signal(how)
            driver.communicate(timeout=10)
        finally:
            driver.kill()  # or leaving the block would wait for one that did not end
    assert soon(lambda: not any(alive(pid) for pid in pids))
    if how == signal.SIGINT:
        assert list((tmp_path / "store").iterdir()) == []
