"""The Ray engine: every rank is a Ray actor process, on any machine of a Ray cluster (`pip install 'digen[ray]'`).

Invariants: room for all ranks of a group is reserved (a placement group) before the first one starts; every node has
the driver's versions and sees the run's folder, or nothing is loaded; the driver sends and gets calls and names of
tensors, never tensors; errors are those of the process engine; leaving the engine's context leaves no process, no
reservation, and no cluster of its own.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import anyio
import anyio.to_thread

from digen.engines.base import TensorStore, WorkerContext, WorkerGroup, WorkerSpec
from digen.engines.placement import check_names, count_cuda_in_child, place
from digen.engines.process import ProcessWorkers
from digen.engines.ray_cluster import START_S, Cluster, Room, connected, is_connected
from digen.engines.ray_placement import need
from digen.engines.ray_rank import Facts, Rank, Setting, versions
from digen.engines.ray_remote import RayRank, Traffic
from digen.engines.ray_store import DriverStore, RayStore
from digen.engines.store import Prefixed
from digen.engines.together import all_at_once
from digen.errors import ConfigError, WorkerDied


class RayEngine:
    """One Ray actor process per rank, on this machine or many."""

    def __init__(self, address: str | None = None, grace_s: float = 10.0) -> None:
        """`address`: `auto` or `host:port` of this machine's cluster, `ray://host:port` of any; None: one of our own.

        `grace_s` bounds each wait for a rank to give up.
        """
        self._address, self._grace_s = address, grace_s
        self._store = DriverStore(f"digen-{secrets.token_hex(8)}")
        self._groups: dict[str, RayWorkers] = {}
        self.traffic = Traffic()
        """What went through the driver, since the engine was made."""

    @property
    def store(self) -> DriverStore:
        return self._store

    @asynccontextmanager
    async def open(self, specs: Sequence[WorkerSpec]) -> AsyncIterator[Mapping[str, WorkerGroup]]:
        """Start all groups at once. ConfigError before a model is loaded; WorkerError when a constructor fails."""
        await anyio.to_thread.run_sync(_check, specs, self._address is None and not is_connected())
        async with connected(self._address, sum(need(spec).cpus * spec.ranks for spec in specs)) as thread:
            cluster = Cluster(thread, self._store)
            self._groups = {spec.name: RayWorkers(spec, self._grace_s, cluster, self.traffic) for spec in specs}
            try:
                await cluster.begin()
                await self._occupy(cluster, specs)
                await all_at_once(group.start for group in self._groups.values() if not group.lost)
                yield self._groups
            finally:
                with anyio.CancelScope(shield=True):
                    await all_at_once(group.leave for group in self._groups.values())
                    await cluster.end()

    async def _occupy(self, cluster: Cluster, specs: Sequence[WorkerSpec]) -> None:
        rooms = await self._rooms(cluster, specs)
        neighbours = Counter(node for room in rooms.values() for node in room.nodes)
        for name, room in rooms.items():
            self._groups[name].occupy(room, neighbours)
        for spec in specs:
            if spec.name in rooms:
                await self._groups[spec.name].join(needed=not spec.optional)

    async def _rooms(self, cluster: Cluster, specs: Sequence[WorkerSpec]) -> dict[str, Room]:
        """Room for all; else for those that are needed, and for as many others as fit beside them."""
        needed = [spec for spec in specs if not spec.optional]
        try:
            return await cluster.reserve(specs)
        except ConfigError:
            if len(needed) == len(specs):
                raise
        rooms = await cluster.reserve(needed)
        for spec in specs:
            if spec.optional:
                try:
                    rooms |= await cluster.reserve([spec], patience_s=0.0)
                except ConfigError as error:
                    self._groups[spec.name].absent(error)
        return rooms

    async def respawn(self, group: WorkerGroup) -> None:
        """Fresh processes for a group, on other nodes if its own are gone. Raises WorkerError."""
        await self._groups[group.name].renew()

    def abandon(self) -> None:
        """Kill all ranks. A cluster of our own ends with this process; its folder goes with the next run."""
        for group in self._groups.values():
            group.kill()


class RayWorkers(ProcessWorkers):
    """A group of ranks; what one does when others fail is as in the process engine."""

    def __init__(self, spec: WorkerSpec, grace_s: float, cluster: Cluster, traffic: Traffic) -> None:
        super().__init__(spec, grace_s)
        self._cluster, self._traffic = cluster, traffic
        self._room: Room | None = None
        self._actors: list[Any] = []

    def occupy(self, room: Room, neighbours: Mapping[str, int]) -> None:
        """Begin to start a process for each rank. `neighbours`: ranks of the run on each node."""
        if self._spec.log_dir:
            self._spec.log_dir.mkdir(parents=True, exist_ok=True)
        self._room = room
        self._actors = [self._actor(rank, room, neighbours[node]) for rank, node in enumerate(room.nodes)]

    async def join(self, *, needed: bool = True) -> None:
        """`meet`; a group that is not needed may fail, and is lost then. Raises ConfigError."""
        try:
            await self.meet()
        except ConfigError as error:
            if needed:
                raise
            self.absent(error)
            await self.leave()

    def absent(self, why: ConfigError) -> WorkerDied:
        """It is lost: this is why its processes could not be started."""
        self._ended_by = died = WorkerDied(self.name, 0, "__init__", str(why))
        return died

    async def meet(self) -> None:
        """Wait for the processes, and see that they can work together. Raises ConfigError."""
        facts = [await self._facts(rank, actor) for rank, actor in enumerate(self._actors)]
        check_facts(self._spec, versions(), facts)
        ranks = [self._rank(rank, actor, facts) for rank, actor in enumerate(self._actors)]
        self._ranks = cast("list[Any]", ranks)

    async def _facts(self, rank: int, actor: Any) -> Facts:
        from ray.exceptions import RayError

        try:
            with anyio.fail_after(START_S):
                return cast("Facts", await self._cluster.thread.get(actor.facts.remote()))
        except (RayError, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}" if str(error) else f"no answer within {START_S:g} s"
            raise ConfigError(f"{self.name} rank {rank} does not start; is digen on all nodes? {why}") from error

    async def renew(self) -> None:
        """End what is left, then start and construct anew, where there is room now. Raises WorkerError."""
        async with self._lock:  # or who watches for the end of a rank would take this one for another
            with anyio.CancelScope(shield=True):
                await self.leave()
            self._ranks, self._ended_by, self._life = [], None, self._life + 1
            try:
                room = (await self._cluster.reserve([self._spec]))[self.name]
                self.occupy(room, Counter(room.nodes))
                await self.meet()
            except ConfigError as error:
                with anyio.CancelScope(shield=True):
                    await self.leave()  # others may want the room
                raise self.absent(error) from error
        await self.start()

    async def leave(self) -> None:
        """End all ranks, and give back what was reserved for them."""
        await self.end()
        if self._room:
            room, self._room = self._room, None
            await self._cluster.give_back(room)  # ends processes that have not met, too

    def _actor(self, rank: int, room: Room, neighbours: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec, needed = self._spec, need(self._spec)
        setting = Setting(dict(spec.env), spec.threads, neighbours, self._log(rank), len(set(room.nodes)) == 1)
        options: dict[str, Any] = {"runtime_env": {"env_vars": dict(spec.env)}} if spec.env else {}
        return (
            ray.remote(Rank)
            .options(
                num_cpus=needed.cpus,
                num_gpus=needed.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(room.placement, rank),
                **options,
            )
            .remote(setting)
        )

    def _rank(self, rank: int, actor: Any, facts: Sequence[Facts]) -> RayRank:
        meeting = facts[0].meeting if self.world_size > 1 else None
        device = "cuda:0" if need(self._spec).gpus else "cpu"  # Ray shows a rank its own GPU alone
        context = WorkerContext(self.name, rank, self.world_size, device, self._store(), meeting)
        cluster = self._cluster
        return RayRank(context, actor, facts[rank], cluster.thread, cluster.store, self._traffic, self._log(rank))

    def _store(self) -> TensorStore:
        store = RayStore(self._cluster.store.run)
        return Prefixed(store, f"{self._life}~") if self._life else store

    def _log(self, rank: int) -> Any:
        return self._spec.log_dir and self._spec.log_dir / f"{self.name}-{rank}.log"


def _check(specs: Sequence[WorkerSpec], alone: bool) -> None:
    """What can be known to be wrong before Ray is asked. `alone`: the ranks will all be on this machine."""
    check_names(specs)
    for spec in specs:
        need(spec)
    if alone:
        place([replace(spec, devices="cpu") for spec in specs], count_cuda_in_child)  # GPUs are Ray's to count


def check_facts(spec: WorkerSpec, here: Mapping[str, str], facts: Sequence[Facts]) -> None:
    """Raises ConfigError where a rank's node has other versions than the driver, or does not see the run's folder."""
    wrong = []
    for rank, there in enumerate(facts):
        who = f"{spec.name} rank {rank} on {there.address}"
        for name in sorted(here.keys() | there.versions.keys()):
            got, wanted = there.versions.get(name, "none"), here.get(name, "none")
            if got != wanted:
                wrong.append(f"{who} has {name} {got}, the driver has {wanted}: install the same on every node")
        if not there.sees_logs:
            wrong.append(
                f"{who} does not see {spec.log_dir}: run_dir must be in a folder that all nodes share, where the "
                "trainer's checkpoints and the logs of all workers go"
            )
    if wrong:
        raise ConfigError("\n".join(wrong))
