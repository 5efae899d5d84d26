"""One contract for both engines, on asyncio and on trio; then what only one engine promises."""

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

from digen.engines.base import Engine, WorkerSpec
from digen.engines.inline import InlineEngine
from digen.engines.placement import available_cores, named_devices, place
from digen.engines.process import ProcessEngine
from digen.errors import ConfigError, WorkerDied, WorkerError

WORKERS = Path(__file__).with_name("workers_for_engines.py")


def spec(name: str = "group", payload: object = None, worker: str = "Worker", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, f"{WORKERS}:{worker}", payload, **more)


@pytest.fixture(params=["inline", "process"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return InlineEngine() if request.param == "inline" else ProcessEngine(tmp_path)


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


# --- what every engine does ---


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
class TestContract:
    async def test_a_worker_learns_its_payload_and_its_place(self, engine: Engine) -> None:
        async with engine.open([spec("here", {"a": 1}), spec("there", "b")]) as groups:
            assert await groups["here"].call("place") == (({"a": 1}, "here", 0, 1, "cpu"),)
            assert await groups["there"].call("place") == (("b", "there", 0, 1, "cpu"),)
            assert [(name, g.name, g.world_size) for name, g in groups.items()] == [
                ("here", "here", 1),
                ("there", "there", 1),
            ]

    async def test_arguments_and_keywords_arrive(self, engine: Engine) -> None:
        async with engine.open([spec()]) as groups:
            assert await groups["group"].call("echo", 1, "b", method=2, self_=3) == (
                ((1, "b"), {"method": 2, "self_": 3}),
            )

    async def test_a_worker_exception_names_group_rank_method_and_line_and_the_worker_goes_on(
        self, engine: Engine
    ) -> None:
        async with engine.open([spec()]) as groups:
            with pytest.raises(WorkerError) as caught:
                await groups["group"].call("raise_on", 0)
            assert str(caught.value) == "group rank 0 failed in raise_on(): LookupError: rank 0 lost it"
            assert 'raise LookupError(f"rank {rank} lost it")' in caught.value.remote_traceback
            assert "digen/engines" not in caught.value.remote_traceback
            with pytest.raises(WorkerError, match=r"AttributeError: .*no_such_method"):
                await groups["group"].call("no_such_method")
            assert await groups["group"].call("echo") == (((), {}),)

    async def test_a_failing_constructor_is_reported_and_everything_is_closed(self, engine: Engine) -> None:
        with pytest.raises(WorkerError, match=r"^bad rank 0 failed in __init__\(\): ValueError: no such model"):
            async with engine.open([spec("good"), spec("bad", "raise")]):
                pytest.fail("it opened")

    async def test_an_unknown_class_is_reported_with_those_that_exist(self, engine: Engine) -> None:
        with pytest.raises(WorkerError, match=r"PluginError: .*got 'Wroker'.*Did you mean 'Worker'"):
            async with engine.open([spec(worker="Wroker")]):
                pytest.fail("it opened")

    async def test_an_error_of_the_caller_passes_through_as_it_is(self, engine: Engine) -> None:
        with pytest.raises(ZeroDivisionError):
            async with engine.open([spec()]):
                raise ZeroDivisionError

    async def test_two_groups_work_at_the_same_time(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "meeting").mkdir()
        async with engine.open([spec("a"), spec("b")]) as groups, anyio.create_task_group() as tasks:
            for group in groups.values():
                tasks.start_soon(group.call, "meet", tmp_path / "meeting", 2)

    async def test_the_calls_of_one_group_run_one_at_a_time(self, engine: Engine) -> None:
        intervals: list[tuple[float, float]] = []
        async with engine.open([spec()]) as groups:

            async def call() -> None:
                intervals.extend(await groups["group"].call("interval", 0.02))

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(call)
        ends = [moment for interval in sorted(intervals) for moment in interval]
        assert ends == sorted(ends)

    async def test_the_event_loop_runs_while_a_worker_works(self, engine: Engine) -> None:
        ticks = 0
        async with engine.open([spec()]) as groups, anyio.create_task_group() as tasks:

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await anyio.sleep(0.01)
                    ticks += 1

            tasks.start_soon(tick)
            await groups["group"].call("interval", 0.3)
            tasks.cancel_scope.cancel()
        assert ticks >= 5

    async def test_the_answer_of_a_cancelled_call_is_not_taken_for_the_next_one(self, engine: Engine) -> None:
        async with engine.open([spec()]) as groups:
            for size in (10, 3_000_000):
                with anyio.move_on_after(0.02) as scope:
                    await groups["group"].call("interval", 0.1)
                assert scope.cancelled_caught
                with anyio.move_on_after(0.01) as scope:
                    await groups["group"].call("length", b"x" * size, 0.1)
                assert scope.cancelled_caught
                with anyio.fail_after(5):
                    assert await groups["group"].call("echo", size) == (((size,), {}),)

    async def test_large_messages_arrive_whole(self, engine: Engine) -> None:
        data = os.urandom(3_000_000)
        async with engine.open([spec()]) as groups:
            assert await groups["group"].call("length", data) == ((len(data), data),)

    async def test_a_call_after_the_engine_was_closed_is_an_error(self, engine: Engine) -> None:
        async with engine.open([spec()]) as groups:
            pass
        with pytest.raises(WorkerDied):
            await groups["group"].call("echo")

    async def test_leaving_the_engine_by_cancellation_ends_the_workers(self, engine: Engine) -> None:
        with anyio.move_on_after(0.02):
            async with engine.open([spec()]) as groups:
                await groups["group"].call("interval", 0.5)
                pytest.fail("it was not cancelled")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tensors_go_from_one_group_to_another_bit_equal(engine: Engine) -> None:
    async with engine.open([spec(name, None, "TensorWorker", threads=1) for name in ("one", "two")]) as groups:
        (ref,) = await groups["one"].call("put", "one/0/tensors", seed=5)
        assert ref.nbytes == 4 * 30 * 2 + 2 * 30 + 8 * 3
        assert await groups["two"].call("equals", ref, seed=5) == (True,)
        assert await groups["two"].call("equals", ref, seed=6) == (False,)
        assert await groups["one"].call("threads") == (1,)
        engine.store.drop(ref)
        with pytest.raises(WorkerError, match=r"KeyError: .*one/0/tensors"):
            await groups["two"].call("equals", ref, seed=5)


@pytest.mark.parametrize(("kind", "cycles"), [(InlineEngine, 20), (ProcessEngine, 3)])
def test_opening_and_closing_again_leaves_no_process_thread_file_or_memory(
    kind: type[InlineEngine | ProcessEngine], cycles: int
) -> None:
    engine, me, threads = kind(), psutil.Process(), threading.active_count()

    async def cycle() -> None:
        async with engine.open([spec("a"), spec("b")]) as groups:
            await groups["a"].call("echo", 1)

    def left() -> tuple[object, ...]:
        return me.num_fds(), me.children(), [*Path("/dev/shm").glob(f"digen-{os.getpid()}-*")]

    anyio.run(cycle)
    before = left()
    for _ in range(cycles - 1):
        anyio.run(cycle)
    assert left() == before
    assert soon(lambda: threading.active_count() <= threads)


# --- placement ---


@pytest.mark.parametrize(
    ("devices", "ranks", "named"),
    [
        ("cpu", 2, ("cpu",)),
        ("cuda", 2, ("cuda:0", "cuda:1")),
        ("cuda:3", 2, ("cuda:3",)),
        ("cuda:0-3", 1, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:0,2", 2, ("cuda:0", "cuda:2")),
        ("cuda:4-5,1", 3, ("cuda:4", "cuda:5", "cuda:1")),
    ],
)
def test_devices_are_named_in_the_order_given(devices: str, ranks: int, named: tuple[str, ...]) -> None:
    assert named_devices(devices, ranks) == named


@pytest.mark.parametrize("devices", ["gpu", "cuda:", "cuda:a", "cuda:3-0", "cuda:-1", "cpu:0", ""])
def test_other_device_names_are_refused(devices: str) -> None:
    with pytest.raises(ConfigError, match=f"got {devices!r}"):
        named_devices(devices, 1)


def test_ranks_take_devices_in_turn() -> None:
    places = place([spec(devices="cuda:1-2", ranks=3)], lambda _: 8)
    assert places["group"].devices == ("cuda:1", "cuda:2", "cuda:1")


def test_threads_are_the_cores_divided_by_all_ranks_unless_given() -> None:
    cores = available_cores()
    places = place([spec("a"), spec("b", threads=1)], lambda _: 0)
    assert (places["a"].threads, places["b"].threads) == (max(1, cores // 2), 1)
    assert place([spec(ranks=cores + 1)], lambda _: 0)["group"].threads == 1


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("a"), spec("a")], "'a' is given twice"),
        ([spec("a/b")], "got 'a/b'"),
        ([spec(ranks=0)], "at least 1 rank, got 0"),
        ([spec(threads=10_000)], r"10000 threads are wanted, \d+ CPU cores are available"),
        ([spec(ranks=10_000)], r"10000 ranks are wanted, but \d+ CPU cores can carry \d+"),
        ([spec(devices="cuda:0-7")], r"wants 8 CUDA device\(s\); torch finds 2 on this host, so there is no cuda:2, "),
        ([spec(devices="cuda", ranks=3)], r"wants 3 CUDA device\(s\); torch finds 2 .* no cuda:2$"),
    ],
)
def test_what_the_host_does_not_have_is_refused(specs: list[WorkerSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(specs, lambda _: 2)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_missing_cuda_devices_are_reported_in_seconds_and_before_anything_starts(
    engine: Engine, tmp_path: Path
) -> None:
    start = time.monotonic()
    wanted = [spec("a", log_dir=tmp_path / "logs"), spec("b", devices="cuda:900-907")]
    with pytest.raises(ConfigError, match=r"^b: devices 'cuda:900-907' .* wants 8 .* torch finds \d+ on this host"):
        async with engine.open(wanted):
            pytest.fail("it opened")
    assert time.monotonic() - start < 30
    assert not (tmp_path / "logs").exists()


# --- the inline engine ---


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestInline:
    async def test_several_ranks_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="1 rank per group, got 2"):
            async with InlineEngine().open([spec(ranks=2)]):
                pytest.fail("it opened")

    async def test_an_environment_is_refused_unless_it_is_the_one_there_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DIGEN_TEST", "there")
        async with InlineEngine().open([spec(env={"DIGEN_TEST": "there"})]) as groups:
            assert (await groups["group"].call("environment", "DIGEN_TEST"))[0][0] == ["there"]
        with pytest.raises(ConfigError, match=r"\{'DIGEN_TEST': 'other'\}"):
            async with InlineEngine().open([spec(env={"DIGEN_TEST": "other"})]):
                pytest.fail("it opened")

    async def test_an_exit_in_a_worker_does_not_end_the_driver(self) -> None:
        async with InlineEngine().open([spec()]) as groups:
            with pytest.raises(WorkerError, match="SystemExit: 7"):
                await groups["group"].call("exit")

    @pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
    async def test_each_group_has_its_own_number_of_torch_threads(self) -> None:
        numbers = [spec("one", 0, "TensorWorker", threads=1), spec("two", 0, "TensorWorker", threads=2)]
        async with InlineEngine().open(numbers) as groups:
            for _ in range(2):
                assert await groups["one"].call("threads") == (1,)
                assert await groups["two"].call("threads") == (2,)


# --- the process engine ---


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
import sys
from pathlib import Path
import anyio
from digen.engines.base import WorkerSpec
from digen.engines.process import ProcessEngine

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
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        driver.send_signal(how)
        driver.communicate(timeout=10)
    assert soon(lambda: not any(alive(pid) for pid in pids))
    if how == signal.SIGINT:
        assert list((tmp_path / "store").iterdir()) == []
