"""What every engine must do with worker groups (docs/concepts.md; rules R1, R5)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import anyio
import pytest

from digen import plugins
from digen.engines.base import Engine, WorkerContext, WorkerGroup, WorkerSpec
from digen.errors import WorkerError
from digen.types import Ref

TARGET = f"{__name__}:Probe"


class Probe:
    """The worker that an engine is tried with."""

    def __init__(self, payload: Any, context: WorkerContext) -> None:
        if payload == "refuse":
            raise ValueError("no such payload")
        self.payload, self.context = payload, context

    def place(self) -> tuple[Any, str, int, int, str]:
        return self.payload, self.context.group, self.context.rank, self.context.world_size, self.context.device

    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def fail(self, rank: int) -> None:
        if self.context.rank == rank:
            raise LookupError(f"rank {rank} lost it")

    def interval(self, length_s: float) -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(length_s)
        return start, time.monotonic()

    def meet(self, folder: Path, number: int) -> None:
        """Returns when so many are here at the same time."""
        (folder / self.context.group).touch()
        while len(list(folder.iterdir())) < number:
            time.sleep(0.001)

    def put(self, value: float) -> Ref:
        import torch

        return self.context.store.put(f"{self.context.group}/{value}", {"x": torch.full((3,), value)})

    def get(self, ref: Ref) -> float:
        return float(self.context.store.get(ref)["x"].sum())

    def close(self) -> None:
        if isinstance(self.payload, Path):
            (self.payload / self.context.group).touch()


class EngineContract:
    """Subclass it as `class TestMine(EngineContract)` and set `engine`: a name, or `path.py:Name`."""

    engine: ClassVar[str]
    ranks: ClassVar[int] = 2
    """Ranks of the groups that it is tried with; 1 for an engine that has no others."""

    def test_every_rank_learns_its_payload_and_its_place_and_values_come_in_rank_order(self) -> None:
        async def body(groups: Mapping[str, WorkerGroup], _: Engine) -> None:
            assert list(groups) == ["a", "b"]
            assert await groups["a"].call("place") == tuple(
                ({"k": 1}, "a", r, self.ranks, "cpu") for r in range(self.ranks)
            )
            assert (groups["b"].name, groups["b"].world_size) == ("b", 1)
            assert await groups["b"].call("echo", 1, method=2) == (((1,), {"method": 2}),)

        self._within(body, a={"k": 1}, b=None)

    def test_an_exception_names_group_rank_and_method_and_the_group_goes_on(self) -> None:
        async def body(groups: Mapping[str, WorkerGroup], _: Engine) -> None:
            with pytest.raises(WorkerError) as caught:
                await groups["a"].call("fail", self.ranks - 1)
            assert (
                str(caught.value)
                == f"a rank {self.ranks - 1} failed in fail(): LookupError: rank {self.ranks - 1} lost it"
            )
            assert "raise LookupError" in caught.value.remote_traceback
            with pytest.raises(WorkerError, match="no_such_method"):
                await groups["a"].call("no_such_method")
            assert len(await groups["a"].call("echo")) == self.ranks

        self._within(body, a=None)

    def test_a_worker_that_cannot_be_made_is_an_error_and_nothing_opens(self) -> None:
        async def body(groups: Mapping[str, WorkerGroup], _: Engine) -> None:
            pytest.fail(f"it opened: {list(groups)}")

        with pytest.raises(WorkerError, match=r"b rank 0 failed in __init__\(\): ValueError: no such payload"):
            self._within(body, a=None, b="refuse")

    def test_groups_work_at_the_same_time_and_each_does_one_call_at_a_time(self, tmp_path: Path) -> None:
        spans: list[tuple[float, float]] = []

        async def body(groups: Mapping[str, WorkerGroup], _: Engine) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(groups["b"].call, "meet", tmp_path, 2)
                tasks.start_soon(groups["c"].call, "meet", tmp_path, 2)

            async def once() -> None:
                spans.append((await groups["b"].call("interval", 0.02))[0])

            async with anyio.create_task_group() as tasks:
                for _number in range(3):
                    tasks.start_soon(once)

        self._within(body, b=None, c=None)
        moments = [moment for span in sorted(spans) for moment in span]
        assert moments == sorted(moments)

    def test_what_one_worker_stores_another_reads_until_it_is_dropped(self) -> None:
        async def body(groups: Mapping[str, WorkerGroup], engine: Engine) -> None:
            (ref,) = await groups["b"].call("put", 2.0)
            assert await groups["c"].call("get", ref) == (6.0,)
            assert engine.store.has(ref)
            engine.store.drop(ref)
            engine.store.drop(ref)
            with pytest.raises(WorkerError, match="KeyError"):
                await groups["c"].call("get", ref)

        self._within(body, b=None, c=None)

    def test_a_group_that_is_started_again_is_the_same_object_and_never_uses_a_key_twice(self) -> None:
        async def body(groups: Mapping[str, WorkerGroup], engine: Engine) -> None:
            first = (await groups["b"].call("put", 2.0))[0]
            await engine.respawn(groups["b"])
            second = (await groups["b"].call("put", 2.0))[0]
            assert first != second
            engine.store.drop(second)
            assert await groups["b"].call("get", first) == (6.0,)
            assert len(await groups["a"].call("echo")) == self.ranks

        self._within(body, a=None, b=None)

    def test_workers_are_closed_and_an_error_of_the_caller_passes_through(self, tmp_path: Path) -> None:
        async def body(_groups: Mapping[str, WorkerGroup], _: Engine) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self._within(body, b=tmp_path, c=tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"b", "c"}

    def _within(self, body: Callable[[Mapping[str, WorkerGroup], Engine], Awaitable[None]], /, **payloads: Any) -> None:
        """Run it with a group for each payload: `a` has `ranks` ranks, the others one."""
        specs = [
            WorkerSpec(name, TARGET, payload, ranks=self.ranks if name == "a" else 1, threads=1)
            for name, payload in payloads.items()
        ]

        async def main() -> None:
            engine = cast("type[Engine]", plugins.find("engines", self.engine))()
            async with engine.open(specs) as groups:
                await body(groups, engine)

        anyio.run(main)
