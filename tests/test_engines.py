"""One contract for both engines, on asyncio and on trio; then what only one engine promises."""

import os
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
from digen.engines.placement import available_cores
from digen.engines.process import ProcessEngine
from digen.errors import ConfigError, WorkerDied, WorkerError

WORKERS = Path(__file__).with_name("workers_for_engines.py")


def spec(name: str = "group", payload: object = None, worker: str = "Worker", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, f"{WORKERS}:{worker}", payload, **more)


@pytest.fixture(params=["inline", "process"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return InlineEngine() if request.param == "inline" else ProcessEngine(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("digen-")] == []
    assert list(tmp_path.glob("digen-*")) == []


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

    async def test_a_worker_that_can_be_closed_is_closed_once_when_the_engine_closes(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        said = tmp_path / "closed"
        async with engine.open([spec(payload=str(said), worker="Closing")]) as groups:
            await groups["group"].call("echo")
            assert not said.exists()
        assert said.exists()

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
