"""The inline engine: every group is one object in this process, with a thread of its own.

Invariant: a worker is made and called in one and the same thread (torch keeps settings per thread), so groups run at
the same time and each runs one call at a time; leaving the engine's context leaves no such thread. Python cannot stop a
thread, so a cancelled call is waited for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from digen.engines.base import WorkerContext, WorkerGroup, WorkerSpec
from digen.engines.placement import Place, place
from digen.engines.rank import close, failure, make_worker
from digen.engines.store import MemoryStore, Prefixed
from digen.engines.together import all_at_once
from digen.errors import ConfigError, WorkerDied, WorkerError
from digen.plugins import load


class InlineEngine:
    """Threads of this process, one rank per group; output is not redirected."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._groups: dict[str, InlineWorker] = {}

    @property
    def store(self) -> MemoryStore:
        return self._store

    @asynccontextmanager
    async def open(self, specs: Sequence[WorkerSpec]) -> AsyncIterator[Mapping[str, WorkerGroup]]:
        """Start all groups at once. ConfigError for several ranks or an environment that this process does not have."""
        for spec in specs:
            _check(spec)
        places = await anyio.to_thread.run_sync(place, specs, _count_cuda)
        self._groups = groups = {spec.name: InlineWorker(spec, places[spec.name], self._store) for spec in specs}
        try:
            await all_at_once(group.start for group in groups.values())
            yield groups
        finally:
            with anyio.CancelScope(shield=True):
                await all_at_once(group.end for group in groups.values())
            self._store.clear()

    async def respawn(self, group: WorkerGroup) -> None:
        """A new object in a new thread, once the call that may be under way has ended. Raises WorkerError."""
        await self._groups[group.name].respawn(self._store)

    def abandon(self) -> None:
        """Threads end with the process."""


class InlineWorker:
    """A group of one rank."""

    world_size = 1

    def __init__(self, spec: WorkerSpec, here: Place, store: MemoryStore) -> None:
        self.name = spec.name
        self._context = WorkerContext(spec.name, 0, 1, here.devices[0], store)
        self._target, self._payload, self._threads = spec.target, spec.payload, here.threads
        self._life = 0
        self._begin()

    def _begin(self) -> None:
        self._worker: Any = None
        self._closed = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=f"digen-{self.name}", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        """Construct the worker. Raises WorkerError (method `__init__`)."""
        await self._run("__init__", self._construct)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run `method`; a second call waits for the first. Raises WorkerError."""
        return (await self._run(method, lambda: getattr(self._worker, method)(*args, **kwargs)),)

    async def end(self) -> None:
        """End the thread, after the call that may be under way."""
        self._closed = True
        self._jobs.put(lambda: close(self._worker))
        self._jobs.put(None)
        await anyio.to_thread.run_sync(self._thread.join)
        self._worker = None

    async def respawn(self, store: MemoryStore) -> None:
        """End the thread, then begin anew."""
        with anyio.CancelScope(shield=True):
            await self.end()
        self._life += 1
        self._context = replace(self._context, store=Prefixed(store, f"{self._life}~"))
        self._begin()
        await self.start()

    def _construct(self) -> None:
        load(self._target)
        _limit_threads(self._threads)
        self._worker = make_worker(self._target, self._payload, self._context)

    def _serve(self) -> None:
        while job := self._jobs.get():
            job()

    async def _run(self, method: str, work: Callable[[], Any]) -> Any:
        if self._closed:
            raise WorkerDied(self.name, 0, method, "the engine was closed")
        answer: Future[Any] = Future()
        answered = anyio.Event()
        token = anyio.lowlevel.current_token()

        def job() -> None:
            try:
                _limit_threads(self._threads)
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 (the worker boundary: it is raised again in the caller)
                answer.set_exception(error)
            anyio.from_thread.run_sync(answered.set, token=token)

        self._jobs.put(job)
        with anyio.CancelScope(shield=True):
            await answered.wait()
        await anyio.lowlevel.checkpoint_if_cancelled()
        if error := answer.exception():
            what = failure(error)
            raise WorkerError(self.name, 0, method, what.cause, what.remote_traceback) from error
        return answer.result()


def _limit_threads(threads: int) -> None:
    """torch's thread count is set per thread, so it must be set in a worker's own; torch may not be loaded yet."""
    if "torch" in sys.modules:
        import torch  # waits when another group's thread is in the middle of this

        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _check(spec: WorkerSpec) -> None:
    if spec.ranks != 1:
        raise ConfigError(f"{spec.name}: the inline engine runs 1 rank per group, got {spec.ranks}; use engine process")
    foreign = {name: value for name, value in spec.env.items() if os.environ.get(name) != value}
    if foreign:
        raise ConfigError(
            f"{spec.name}: the inline engine cannot give a group its own environment, got {foreign}; set it before "
            "digen starts, or use engine process"
        )


def _count_cuda(env: Mapping[str, str]) -> int:  # noqa: ARG001 (it is this process's own, see `_check`)
    import torch

    return torch.cuda.device_count()
