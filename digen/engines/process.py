"""The process engine: every rank is an OS process with a fresh interpreter and a socket to the driver for its calls.

Invariants: the event loop never blocks on a worker and no thread waits for an answer, on asyncio and trio alike; a
cancelled call's answer is thrown away by its number; a process that ends is known at once, by the end of its socket in
a call, by the kernel's word (Linux) between two; leaving the engine's context leaves no process (not even a worker's
own children), no shared memory, no open file.
A fresh interpreter does not import the caller's main module, so scripts need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from digen.engines.base import WorkerContext, WorkerGroup, WorkerSpec
from digen.engines.placement import Place, count_cuda_in_child, place
from digen.engines.rank import Start
from digen.engines.remote import RemoteRank
from digen.engines.store import Prefixed, SharedStore, new_folder, shared_folder
from digen.engines.together import all_at_once
from digen.errors import WorkerDied, WorkerError

SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Idle OpenMP threads sleep: those of two processes that spin slow each other down 5 to 8 times."""
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""torch takes its thread count from the first one."""


class ProcessEngine:
    """One OS process per rank, on this host."""

    def __init__(self, store_dir: Path | None = None, grace_s: float = 10.0) -> None:
        """Tensors wait below `store_dir` (None: shared memory); `grace_s` bounds each wait for a rank to give up."""
        self._store = SharedStore(new_folder(store_dir))
        self._grace_s = grace_s
        self._places: dict[str, Place] = {}
        self._groups: dict[str, ProcessWorkers] = {}

    @property
    def store(self) -> SharedStore:
        return self._store

    @asynccontextmanager
    async def open(self, specs: Sequence[WorkerSpec]) -> AsyncIterator[Mapping[str, WorkerGroup]]:
        """Start all groups at once. ConfigError before any process starts; WorkerError when a constructor fails."""
        self._places = places = await anyio.to_thread.run_sync(place, specs, count_cuda_in_child)
        self._groups = groups = {}
        with shared_folder(self._store.folder):
            try:
                for spec in specs:
                    groups[spec.name] = ProcessWorkers(spec, self._grace_s)
                    groups[spec.name].launch(places[spec.name], self._store)
                await all_at_once(group.start for group in groups.values())
                yield groups
            finally:
                with anyio.CancelScope(shield=True):
                    await all_at_once(group.end for group in groups.values())

    async def respawn(self, group: WorkerGroup) -> None:
        """Fresh processes for a group of this engine. Raises WorkerError."""
        ours = self._groups[group.name]
        await ours.respawn(self._places[group.name], self._store)

    def abandon(self) -> None:
        """Kill all processes and remove their folder; whoever waits for them is told that they died."""
        for group in self._groups.values():
            group.kill()
        shutil.rmtree(self._store.folder, ignore_errors=True)


class ProcessWorkers:
    """A group of ranks.

    When a rank raises, the others get `grace_s` to answer. If they do, nobody waits for anybody and the group goes on.
    If one does not (it waits in a collective for the rank that raised), or if a rank dies, the group is unusable: all
    its ranks are ended, and every later call raises WorkerDied.
    """

    def __init__(self, spec: WorkerSpec, grace_s: float) -> None:
        self.name, self.world_size = spec.name, spec.ranks
        self._spec, self._grace_s = spec, grace_s
        self._ranks: list[RemoteRank] = []
        self._lock = anyio.Lock()
        self._ended_by: WorkerError | None = None
        self._life = 0

    @property
    def lost(self) -> WorkerError | None:
        """Why the group is unusable."""
        return self._ended_by

    def launch(self, here: Place, store: SharedStore) -> None:
        """Start the processes."""
        env = environment(self._spec, here.threads)
        meeting = f"file://{store.folder}/rendezvous-{self.name}-{self._life}"
        rendezvous = meeting if self.world_size > 1 else None
        own = Prefixed(store, f"{self._life}~") if self._life else store
        for rank, device in enumerate(here.devices):
            context = WorkerContext(self.name, rank, self.world_size, device, own, rendezvous, store.folder)
            log = self._spec.log_dir and self._spec.log_dir / f"{self.name}-{rank}.log"
            self._ranks.append(RemoteRank(context, env, log))

    async def start(self) -> None:
        """Construct the workers. Raises WorkerError (method `__init__`) or WorkerDied."""
        starts = [Start(self._spec.target, self._spec.payload, rank.context) for rank in self._ranks]
        await self._together("__init__", [self._pack("__init__", start) for start in starts])

    async def respawn(self, here: Place, store: SharedStore) -> None:
        """End what is left, then start and construct anew. Raises WorkerError."""
        async with self._lock:  # or who watches for the end of a rank would take this one for another
            with anyio.CancelScope(shield=True):
                await self.end()
            self._ranks, self._ended_by, self._life = [], None, self._life + 1
            self.launch(here, store)
        await self.start()

    async def ended(self) -> None:
        """Return when a rank's process has ended, while it was called or not."""
        ranks, dead = self._ranks, list[RemoteRank]()

        async def one(rank: RemoteRank) -> None:
            await rank.exited()
            dead.append(rank)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for rank in ranks:
                tasks.start_soon(one, rank)
        async with self._lock:  # a call that is under way has noticed too, and says what it was
            if self._ended_by is None and ranks is self._ranks:
                await self._give_up(await dead[0].death("wait"), all_answered=True)

    def kill(self) -> None:
        """End all ranks at once."""
        for rank in self._ranks:
            rank.kill()

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run `method` on every rank at once; a second call waits for the first. Raises WorkerError or WorkerDied."""
        body = self._pack(method, (method, args, kwargs))
        async with self._lock:
            return await self._together(method, [body] * self.world_size)

    async def end(self) -> None:
        """End all ranks at once: politely if they are idle, else by signals."""
        await all_at_once(partial(rank.end, self._grace_s) for rank in self._ranks)

    async def _together(self, method: str, bodies: Sequence[bytes]) -> tuple[Any, ...]:
        if self._ended_by:
            cause = f"the group has ended, since {self._ended_by}"
            raise WorkerDied(self.name, self._ended_by.rank, method, cause)
        values: dict[int, Any] = {}
        failures: list[WorkerError] = []

        async def one(rank: RemoteRank, body: bytes) -> None:
            try:
                values[rank.context.rank] = await rank.call(method, body)
            except WorkerDied as died:
                failures.insert(0, died)  # before what the others raised for want of this rank
                tasks.cancel_scope.cancel()
            except WorkerError as error:
                failures.append(error)
                limit = anyio.current_time() + self._grace_s
                tasks.cancel_scope.deadline = min(tasks.cancel_scope.deadline, limit)

        async with anyio.create_task_group() as tasks:
            for rank, body in zip(self._ranks, bodies, strict=True):
                tasks.start_soon(one, rank, body)
        if failures:
            await self._give_up(failures[0], all_answered=len(values) + len(failures) == self.world_size)
            raise failures[0]
        return tuple(values[rank] for rank in range(self.world_size))

    async def _give_up(self, first: WorkerError, *, all_answered: bool) -> None:
        if isinstance(first, WorkerDied) or not all_answered:
            self._ended_by = first
            with anyio.CancelScope(shield=True):
                await self.end()

    def _pack(self, method: str, message: object) -> bytes:
        try:
            return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            cause = f"the arguments do not pickle: {type(error).__name__}: {error}"
            raise WorkerError(self.name, 0, method, cause) from error


def environment(spec: WorkerSpec, threads: int) -> dict[str, str]:
    """All environment variables of a rank. The group's own ones win over everything."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # a group never leaves its host
    counts = dict.fromkeys(THREAD_COUNTS, str(threads))
    return {**loopback, **os.environ, **SLEEPING_THREADS, **counts, **spec.env}
