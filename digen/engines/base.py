"""Where worker processes run. The driver sees `WorkerGroup`s; a worker sees a `WorkerContext`.

Invariant: one call at a time per group (rule R5); a worker's exception reaches the caller as `WorkerError` with group,
rank, method and remote traceback; leaving the engine's context leaves no thread, process or shared memory behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from digen.errors import WorkerError
from digen.types import Ref

if TYPE_CHECKING:
    import torch


class TensorStore(Protocol):
    """Named dictionaries of tensors, shared by all workers of a run on this host. The driver calls `drop` alone."""

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Ref:
        """Store under a new key (an existing key is an error). Tensors must be treated as immutable afterwards."""
        ...

    def get(self, ref: Ref) -> dict[str, torch.Tensor]:
        """Read back, on the CPU, without a copy where possible. KeyError when dropped or never stored."""
        ...

    def has(self, ref: Ref) -> bool:
        """Whether it is stored and was not dropped."""
        ...

    def drop(self, ref: Ref) -> None:
        """Free the memory. Dropping twice is allowed (a retried piece of work may have dropped it already)."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker object is told about its place: it is the second argument of the worker's constructor."""

    group: str
    rank: int
    world_size: int
    device: str
    """One torch device of this rank: `cpu` or `cuda:3`."""
    store: TensorStore
    rendezvous: str | None = None
    """`init_method` for `torch.distributed.init_process_group` inside this group; None when world_size is 1."""
    shared_dir: Path | None = None
    """Folder of the run that the workers of all groups see, gone when the engine closes; None: they are threads."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A group to start: `ranks` workers, each made by calling `target` with (payload, WorkerContext)."""

    name: str
    target: str
    """`module:Class` or `/absolute/path.py:Class`. Its `close()`, if it has one, is called when the engine closes."""
    payload: Any
    """First argument of the worker's constructor; must pickle. For digen's backends: the resolved config."""
    ranks: int = 1
    devices: str = "cpu"
    """`cpu`, `cuda` (as many as ranks), `cuda:0-3`, `cuda:1,5`; rank r takes the r-th, in order, repeated if fewer."""
    threads: int | None = None
    """CPU threads of each rank (torch, OpenMP, onnxruntime); None: cores / ranks on this host."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables; they win over the engine's own. A ConfigError where the engine cannot set them."""
    node: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that may carry its ranks, for an engine that has several."""
    log_dir: Path | None = None
    """Where `<group>-<rank>.log` is written (stdout, stderr and warnings of the worker); None: not redirected."""
    optional: bool = False
    """Whether the others may begin without it where an engine of several nodes has no room: it is `lost` then."""


class WorkerGroup(Protocol):
    """N ranks that run one call together."""

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run `method` on every rank at once; the ranks' values in rank order.

        A second call waits for the first. Raises WorkerError (an exception in the worker; the first rank that failed),
        after which the group goes on, unless a rank still waits for the one that failed; or WorkerDied: it is lost.
        """
        ...


@runtime_checkable
class Watched(Protocol):
    """A WorkerGroup whose engine knows of the death of an idle rank too. Every engine should, within 5 s."""

    @property
    def lost(self) -> WorkerError | None:
        """Why every further call raises WorkerDied; None while the group is sound. `respawn` makes it so again."""
        ...

    async def ended(self) -> None:
        """Return when a rank has ended, in a call or between two; `lost` is set then. Cancelled when the run ends."""
        ...


class Engine(Protocol):
    """Starts groups. `name`, `store` (made by the engine, visible to every worker it starts)."""

    @property
    def store(self) -> TensorStore: ...

    def open(self, specs: Sequence[WorkerSpec]) -> AbstractAsyncContextManager[Mapping[str, WorkerGroup]]:
        """Start all groups at once (constructors run in the workers). ConfigError when a device does not exist.

        A group whose spec is `optional` may be `lost` from the beginning; `respawn` starts it when there is room.
        """
        ...

    async def respawn(self, group: WorkerGroup) -> None:
        """End what is left of a group that is lost or hangs, and start its ranks anew: constructed, nothing loaded.

        The object is the same and takes calls again. What the group stored before stays readable, and new keys of it
        never equal old ones. Raises WorkerError when a constructor fails: the group is lost then.
        """
        ...

    def abandon(self) -> None:
        """End all ranks at once and free what they share, from any thread, without waiting: the process ends next."""
        ...
