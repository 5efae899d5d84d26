"""An engine for tests whose processes outlive a run: starting one takes longer than most runs that tests make.

Workers are made anew for every run, with a tensor store of its own; what a run finds of the ones before it are imported
modules and the process group of its ranks. What must hold for fresh processes is tested with `engine.name=process`.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import anyio.to_thread
from anyio.from_thread import start_blocking_portal

from digen.engines.base import WorkerContext, WorkerGroup, WorkerSpec
from digen.engines.process import ProcessEngine
from digen.engines.rank import close, make_worker
from digen.engines.store import SharedStore, new_folder, shared_folder
from digen.engines.together import all_at_once


class Host:
    """A rank that is one worker after the other."""

    def __init__(self, _: object, context: WorkerContext) -> None:
        self.context = context
        self.worker: Any = None

    def begin(self, target: str, payload: Any, group: str, store: SharedStore) -> None:
        here = replace(self.context, group=group, store=store, shared_dir=store.folder)
        self.worker = make_worker(target, payload, here)

    def ask(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)

    def end(self) -> None:
        close(self.worker)
        self.worker = None


class Processes:
    """Those of this test session: a group for each name and number of ranks, started where it is not there."""

    def __init__(self) -> None:
        self.lock, self.exits = Lock(), ExitStack()
        self.portal = self.exits.enter_context(start_blocking_portal())
        self.groups: dict[tuple[str, int], Any] = {}

    def of(self, specs: Sequence[WorkerSpec]) -> list[WorkerGroup]:
        keys = [(spec.name, spec.ranks) for spec in specs]
        with self.lock:
            self.groups = {key: group for key, group in self.groups.items() if group._ended_by is None}
            new = {f"{n}-of-{ranks}": (n, ranks) for n, ranks in keys if (n, ranks) not in self.groups}
            hosts = [WorkerSpec(name, f"{__file__}:Host", None, ranks=new[name][1], threads=1) for name in new]
            if hosts:
                opened = self.portal.wrap_async_context_manager(ProcessEngine().open(hosts))
                self.groups |= {new[name]: group for name, group in self.exits.enter_context(opened).items()}
            return [self.groups[key] for key in keys]


class WarmEngine:
    """`engine.name=<this file>:WarmEngine`. Settings of processes (threads, environment, logs) do not reach them."""

    processes: Processes | None = None

    def __init__(self) -> None:
        self._store = SharedStore(new_folder())

    @property
    def store(self) -> SharedStore:
        return self._store

    @asynccontextmanager
    async def open(self, specs: Sequence[WorkerSpec]) -> AsyncIterator[Mapping[str, WorkerGroup]]:
        processes = self.shared()
        found = await anyio.to_thread.run_sync(processes.of, specs)
        groups = {spec.name: WarmGroup(spec, processes, group) for spec, group in zip(specs, found, strict=True)}
        with shared_folder(self._store.folder):
            try:
                await all_at_once(lambda g=group: g.begin(self._store) for group in groups.values())
                yield groups
            finally:
                with anyio.CancelScope(shield=True):
                    await all_at_once(group.end for group in groups.values())

    async def respawn(self, group: WorkerGroup) -> None:
        """No test loses one of these: they are shared."""
        raise NotImplementedError(group.name)

    def abandon(self) -> None:
        """They outlive the run."""

    def begin(self, spec: WorkerSpec, group: str) -> Callable[..., tuple[Any, ...]]:
        """Make the workers of a group outside of any run, under this name; what is returned asks all of them."""
        processes = self.shared()
        (host,) = processes.of([spec])
        ask = partial(processes.portal.call, host.call)
        ask("begin", spec.target, spec.payload, group, self._store)
        return lambda method, *args: ask("ask", method, args, {})

    @classmethod
    def shared(cls) -> Processes:
        cls.processes = cls.processes or Processes()
        return cls.processes

    @classmethod
    def close(cls) -> None:
        """End the processes."""
        if cls.processes:
            cls.processes.exits.close()
            cls.processes = None


class WarmGroup:
    """A worker group of one run, in processes of the session."""

    def __init__(self, spec: WorkerSpec, processes: Processes, group: WorkerGroup) -> None:
        self.name, self.world_size = spec.name, spec.ranks
        self._spec, self._portal, self._group = spec, processes.portal, group

    async def begin(self, store: SharedStore) -> None:
        await self._ask("begin", self._spec.target, self._spec.payload, self.name, store)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return await self._ask("ask", method, args, kwargs)

    async def end(self) -> None:
        await self._ask("end")

    async def _ask(self, *words: Any) -> tuple[Any, ...]:
        return await anyio.to_thread.run_sync(self._portal.call, self._group.call, *words)
