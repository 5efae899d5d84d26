"""The driver's side of a Ray cluster: the connection, reservations, keepers. Silent, and nothing is left behind.

Invariant: the event loop never waits for Ray, nor one of Ray's own threads for the event loop: between them is one
thread. It also begins and ends the connection: the kernel ends a cluster of our own with the thread that started it,
and Ray leaves the signals of a process alone if it is not started in its main thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from digen.engines.base import WorkerSpec
from digen.engines.ray_placement import Node, arrange, need
from digen.engines.ray_store import NAMESPACE, DriverStore, Keeper, keeper_name
from digen.engines.store import new_folder, shared_folder
from digen.engines.together import all_at_once
from digen.errors import ConfigError

T = TypeVar("T")
QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
"""Nothing is reported to Ray's makers; no cluster is started by accident."""
TOKEN: Final = secrets.token_hex(32)
"""Of all clusters of this process: Ray reads it once."""
TIDY: Final = {"RAY_process_group_cleanup_enabled": "true"}
"""For a cluster of our own: what a worker has started ends with it, however that ends."""
NODE_ID: Final = "ray.io/node-id"
"""A label that Ray gives every node."""
PATIENCE_S: Final = 5.0
"""How long the cluster may have no room: what another run has just left is free a moment later."""
RESERVE_S: Final = 5.0
"""Longest wait for a reservation; then its nodes are taken for dead (Ray notices that later) and others are tried."""
START_S: Final = 120.0
"""Longest wait for a process to start in the room that is reserved for it: by then its node may be gone."""
RETRY_S: Final = 0.2
CLIENT: Final = "ray://"
"""Begins the address of a cluster that this machine does not belong to (Ray Client)."""
JOINS: Final = 3
ANSWER_S: Final = 5.0
"""Longest wait for whoever is at an address."""


class RayThread:
    """The thread between the event loop and Ray."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="digen-ray", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], T]) -> T:
        """Run it in this thread; to the end, even if nobody waits for it any more."""
        future: Future[T] = Future()
        self._jobs.put(partial(_fulfil, future, job))
        return await self._result(future)

    async def get(self, ref: Any) -> Any:
        """What a reference stands for, when it is there. Raises RayError."""
        return await self._result(ref.future())

    async def end(self) -> None:
        """End the thread; no call follows."""
        self._jobs.put(None)
        await anyio.to_thread.run_sync(self._thread.join)

    async def _result(self, future: Future[T]) -> T:
        done, token = anyio.Event(), anyio.lowlevel.current_token()

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop has ended: nobody waits any more
                anyio.from_thread.run_sync(done.set, token=token)

        future.add_done_callback(lambda _: self._jobs.put(wake))
        await done.wait()
        return future.result()

    def _serve(self) -> None:
        while job := self._jobs.get():
            job()


def _fulfil(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
        future.set_exception(error)


@asynccontextmanager
async def connected(address: str | None, cpus: int) -> AsyncIterator[RayThread]:
    """Ray, through its thread: the cluster at this address, or one of our own on this machine with so many CPUs.

    A process that is connected already stays so, whatever the address. Raises ConfigError when nobody answers there.
    """
    thread = RayThread()
    try:
        with _settings(address), _folder(address) as folder:
            with anyio.CancelScope(shield=True):
                disconnect = await thread.run(partial(_connect, address, cpus, folder))
            try:
                yield thread
            finally:
                with anyio.CancelScope(shield=True):
                    await thread.run(disconnect)
    finally:
        with anyio.CancelScope(shield=True):
            await thread.end()


def is_connected() -> bool:
    """Whether this process uses a Ray cluster already; then engines stay with that."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _connect(address: str | None, cpus: int, folder: Path | None) -> Callable[[], None]:
    """The way back, which is none where the process was connected before."""
    if is_connected():
        return lambda: None
    address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    _look_for(address)
    import ray
    from ray._private import worker as ray_worker

    quiet: Mapping[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=str(folder), **quiet)
        else:
            _join(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        got = "a cluster on this machine could not be started" if address is None else f"got {address!r}"
        raise ConfigError(f"engine.address: {got}: {type(error).__name__}: {error}") from error
    show, ray_worker.print_to_stdstream = ray_worker.print_to_stdstream, _silence

    def disconnect() -> None:
        ray.shutdown(wait_for_processes=True)
        ray_worker.print_to_stdstream = show

    return disconnect


def _join(address: str, **quiet: Any) -> None:
    """Connect; to a cluster that this machine is not in, up to `JOINS` times.

    There Ray starts a process for every driver, by a fork among running threads: now and then it hangs, and Ray says so
    after half a minute.
    """
    import ray

    for _ in range(JOINS - 1 if address.startswith(CLIENT) else 0):
        with suppress(ConnectionError):
            ray.init(address, **quiet)
            return
    ray.init(address, **quiet)


def _look_for(address: str | None) -> None:
    """Raises ConfigError when nobody answers there: Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix(CLIENT).rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.address: got {address!r}, where no Ray cluster answers: {error}") from error


def _silence(*_: object, **__: object) -> None:
    """Ray prints what it knows of a dead worker, and has no setting for that; our error says the same once."""


@contextmanager
def _settings(address: str | None) -> Iterator[None]:
    """Environment variables that Ray reads; a token for a cluster of our own, or Ray keeps one in the home folder."""
    before = set(os.environ)
    own = {"RAY_AUTH_TOKEN": TOKEN, **TIDY}
    for name, value in {**QUIET, **({} if address else own)}.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_") and name not in before]:
            del os.environ[name]


@contextmanager
def _folder(address: str | None) -> Iterator[Path | None]:
    """For what a cluster of our own writes; None where it is not ours."""
    if address is not None:
        yield None
        return
    folder = new_folder(Path(tempfile.gettempdir()))
    with shared_folder(folder):
        yield folder


@dataclass(frozen=True, slots=True)
class Room:
    """What is reserved for a group: the id of the node of each rank, and Ray's placement group."""

    nodes: tuple[str, ...]
    placement: Any


class Cluster:
    """What all groups of a run share: the connection, the keepers of tensors, and the reservations."""

    def __init__(self, thread: RayThread, store: DriverStore) -> None:
        self.thread, self.store = thread, store
        self.keepers: dict[str, Any] = {}
        """By the id of their node."""

    async def begin(self) -> None:
        """Start the first keeper, on the head node: without that there is no cluster anyway."""
        head = {"node:__internal_head__": 0.001}
        first = self._keeper(keeper_name(self.store.run), None, resources=head)
        self.keepers[await self.thread.get(first.here.remote())] = first
        self.store.first = first

    async def reserve(self, specs: Sequence[WorkerSpec], patience_s: float = PATIENCE_S) -> dict[str, Room]:
        """Room for all ranks of these groups, and a keeper near each. Raises ConfigError with wanted and available.

        A node that does not give what it seems to have is taken for dead, and others are tried.
        """
        limit, gone = anyio.current_time() + patience_s, set[str]()
        while True:
            nodes: list[Node] = await self.thread.get(self.store.first.nodes.remote())
            try:
                where = arrange(specs, [node for node in nodes if node.id not in gone])
            except ConfigError:
                if anyio.current_time() >= limit:
                    raise
                await anyio.sleep(RETRY_S)
                continue
            rooms = {spec.name: Room(where[spec.name], _placement(spec, where[spec.name])) for spec in specs}
            taken = False
            try:
                silent = await self._silent(rooms.values())
                taken = not silent
            finally:
                if not taken:
                    with anyio.CancelScope(shield=True):
                        await all_at_once(partial(self.give_back, room) for room in rooms.values())
            if taken:
                return rooms
            gone |= silent

    async def _silent(self, rooms: Collection[Room]) -> set[str]:
        """Nodes that do not give these rooms, or no keeper; when there are none, the rooms can be used."""
        late = [room for room in rooms if not await anyio.to_thread.run_sync(_given, room)]
        return {node for room in late for node in room.nodes} or await self._keep_on(
            node for room in rooms for node in room.nodes
        )

    async def give_back(self, room: Room) -> None:
        """End a reservation."""
        from ray.util.placement_group import remove_placement_group

        await anyio.to_thread.run_sync(remove_placement_group, room.placement)

    async def _keep_on(self, nodes: Iterable[str]) -> set[str]:
        """Have a keeper on all of these nodes; those where none starts."""
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        new = [node for node in dict.fromkeys(nodes) if node not in self.keepers]
        for node in new:
            pinned = NodeAffinitySchedulingStrategy(node, soft=False)
            name = keeper_name(self.store.run, node)
            self.keepers[node] = self._keeper(name, self.store.first, scheduling_strategy=pinned)
        silent = set()
        for node in new:
            try:
                with anyio.fail_after(START_S):
                    await self.thread.get(self.keepers[node].here.remote())
            except (RayError, TimeoutError):
                del self.keepers[node]
                silent.add(node)
        return silent

    def _keeper(self, name: str, first: Any, **options: Any) -> Any:
        import ray

        made = ray.remote(Keeper).options(name=name, namespace=NAMESPACE, num_cpus=0, **options)
        return made.remote(first)

    async def end(self) -> None:
        """End the keepers, and with them free all that is stored."""
        import ray

        self.store.first = None
        for one in self.keepers.values():
            await anyio.to_thread.run_sync(ray.kill, one)
        self.keepers.clear()


def _placement(spec: WorkerSpec, nodes: Sequence[str]) -> Any:
    """Ask Ray for a bundle on each of these nodes, all or nothing."""
    from ray.util.placement_group import placement_group

    each = need(spec).resources
    pinned = [{NODE_ID: node} for node in nodes]
    return placement_group([each] * spec.ranks, strategy="PACK", bundle_label_selector=pinned)


def _given(room: Room) -> bool:
    return bool(room.placement.wait(RESERVE_S))
