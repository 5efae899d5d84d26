"""Work that was started and not yet read back: the futures R and U of Algorithm 1, at most one per worker group.

Invariant: work runs only inside the task group that this object is (rule R1), one piece per group (rule R5), and all
that ended at one instant is read back together, in the order in which it was started (rule R3). Work whose group died
or gave no answer in time is read back too: what becomes of it is not decided here. Paper section 3.4.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from digen.engines.base import Watched, WorkerGroup
from digen.errors import WorkerDied
from digen.schedule.tag import Activity
from digen.types import SpanKind, Version

T = TypeVar("T")

NO_INDEX = -1
"""`index` of work that is about no micro-batch."""


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """One piece of work on one group: `do` runs in a task of its own, `then` settles its value in the driver's loop.

    `index` is the micro-batch's, or NO_INDEX; `version` is that of the weights it is about.
    """

    kind: SpanKind
    group: WorkerGroup
    step: int
    index: int
    version: Version
    do: Callable[[], Awaitable[T]]
    then: Callable[[T], None]
    rows: int = 0
    """Samples that it is about; 0 if none."""
    undo: Callable[[], None] | None = None
    """Puts back what it took, if its group is lost while it runs; None: nobody can, as of an update (rule R18)."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """Work that ended, its value, and when it ran (seconds of the event loop's clock)."""

    work: Work[T]
    value: T
    start: float
    end: float
    lost: WorkerDied | None = None
    """Why there is no value: its group died or hangs."""


class InFlight:
    """An async context: leaving it ends what is left; an error of any work cancels the rest and leaves as itself.

    `limit_s`: after how many seconds without an answer work counts as lost.
    """

    def __init__(self, limit_s: Callable[[Work[Any]], float] = lambda _: inf) -> None:
        self._limit_s = limit_s
        self._tasks = anyio.create_task_group()
        self._running: dict[str, tuple[Work[Any], float]] = {}
        self._done: dict[str, Done[Any]] = {}
        self._news = anyio.Event()
        self._busy_s: dict[str, float] = {}
        self._taken_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            first = _first(errors)
        raise first from first.__cause__

    def idle(self, group: WorkerGroup) -> bool:
        """Whether the group may be given work."""
        return group.name not in self._running

    def running(self) -> list[tuple[Work[Any], float]]:
        """What is in flight and when it was started, oldest first."""
        return list(self._running.values())

    def count(self, *kinds: SpanKind, step: int | None = None) -> int:
        """How much work of these kinds is in flight, of one global step or of all."""
        return sum(w.kind in kinds and step in (None, w.step) for w, _ in self._running.values())

    def activity(self, group: WorkerGroup, *, old: bool = False) -> Activity:
        """What the group is doing now, and for how long it has been; `old`: it does not hold the newest weights."""
        if self.idle(group):
            return Activity(group.name, pulls=old)
        work, start = self._running[group.name]
        elapsed_s = anyio.current_time() - start
        return Activity(group.name, work.kind, work.step, elapsed_s, old and work.kind != "pull", work.rows)

    def take_busy_s(self, group: WorkerGroup) -> float:
        """Seconds for which the group has had work since this was last asked; to be started again is none."""
        now = self.activity(group)
        busy_s = self._busy_s.get(group.name, 0.0) + (now.elapsed_s if now.kind != "load" else 0.0)
        taken_s, self._taken_s[group.name] = self._taken_s.get(group.name, 0.0), busy_s
        return busy_s - taken_s

    def start(self, work: Work[Any]) -> None:
        assert self.idle(work.group), f"{work.group.name} is already at work"
        start = anyio.current_time()
        self._running[work.group.name] = (work, start)
        self._tasks.start_soon(self._carry_out, work, start, name=f"{work.kind} on {work.group.name}")

    async def _carry_out(self, work: Work[Any], start: float) -> None:
        value, lost, limit_s = None, None, self._limit_s(work)
        try:
            with anyio.move_on_after(limit_s) as scope:
                value = await work.do()
            if scope.cancelled_caught:
                lost = WorkerDied(work.group.name, 0, work.kind, f"it gave no answer within {limit_s:.0f} s")
        except WorkerDied as died:
            lost = died
        self._done[work.group.name] = Done(work, value, start, anyio.current_time(), lost)
        self._news.set()

    def watch(self, group: WorkerGroup) -> None:
        """Have `finished` return when a rank of the group ends, at work or not, if its engine can tell."""
        if isinstance(group, Watched):
            self._tasks.start_soon(self._watch, group)

    def wake(self) -> None:
        """Have `finished` return now: something else than work has happened."""
        self._news.set()

    async def _watch(self, group: Watched) -> None:
        await group.ended()
        self._news.set()

    async def finished(self) -> list[Done[Any]]:
        """Wait until something ends, then everything that ended at that instant, in the order of its start.

        Nothing at all when a group that is watched has ended. Raises RuntimeError when nothing is in flight: waiting
        would never end.
        """
        if not self._running:
            raise RuntimeError("nothing is in flight and nothing may start: the schedule is stuck")
        await self._news.wait()
        seen = 0
        while seen < len(self._done):  # what ends at the same instant may still be one turn of the event loop away
            seen = len(self._done)
            await checkpoint()
        self._news = anyio.Event()
        return [self._read_back(name) for name in list(self._running) if name in self._done]

    def _read_back(self, name: str) -> Done[Any]:
        done = self._done.pop(name)
        del self._running[name]
        if done.work.kind != "load":
            self._busy_s[name] = self._busy_s.get(name, 0.0) + done.end - done.start
        return done


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not itself a group; one that must stop the program goes first."""
    stopping, rest = errors.split(lambda e: not isinstance(e, (Exception, BaseExceptionGroup)))
    error: BaseException = stopping or rest or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
