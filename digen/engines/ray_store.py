"""Where tensors wait between two workers of a Ray cluster: in the shared memory of the node where they were made.

Invariant: tensors go from the process that made them to the one that reads them, through Ray's object store, never
through the driver, which has names alone. What was stored is owned by a keeper on the node and outlives the worker that
stored it; the first keeper has the list of all keys, so a key is written once, and what is dropped is gone for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from digen.engines.ray_placement import Node
from digen.errors import DigenError
from digen.types import Ref

if TYPE_CHECKING:
    import torch

NAMESPACE = "digen"
"""In which Ray keeps the names of our keepers; a run's own name is part of each."""
Packed = Mapping[str, tuple[str, tuple[int, ...], Any]]
"""Tensors as Ray takes them without a copy: name -> dtype, shape, bytes as a uint8 array."""


@dataclass(frozen=True, slots=True)
class RayStore:
    """The store of the run with this name; pickles, and means the same in every process of the cluster."""

    run: str

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Ref:
        """Store under a new key. ValueError when the key is taken, DigenError when there is no space left."""
        import ray
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        packed = pack(tensors)
        nbytes = sum(array.nbytes for _, _, array in packed.values())
        try:
            kept = ray.get(nearest_keeper(self.run).keep.remote(key, packed))
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise DigenError(
                f"Ray's object store is full: {key!r} needs {nbytes} bytes. Use smaller micro-batches, or start Ray "
                "with more (object_store_memory; in a container: its shared memory size)"
            ) from error
        if not kept:
            raise ValueError(f"the tensor store has {key!r} already; every put needs a new key")
        return Ref(key, nbytes)

    def get(self, ref: Ref) -> dict[str, torch.Tensor]:
        """The tensors of `ref`, copied. KeyError when dropped or never stored, TensorsLost with its node."""
        import ray
        from ray.exceptions import ObjectLostError

        found = ray.get(keeper(self.run).find.remote(ref.key))
        if not found:
            raise KeyError(f"the tensor store has no {ref.key!r}: it was dropped, or never stored")
        try:
            return unpack(ray.get(found[0]))
        except ObjectLostError as error:
            raise TensorsLost(f"{ref.key!r} is lost with the node that had it") from error

    def has(self, ref: Ref) -> bool:
        """Whether it is stored and was not dropped."""
        import ray

        return bool(ray.get(keeper(self.run).has.remote(ref.key)))

    def drop(self, ref: Ref) -> None:
        """Free the memory, once nobody reads it any more."""
        import ray

        ray.get(keeper(self.run).drop.remote(ref.key))


class TensorsLost(DigenError):  # noqa: N818 (what happened to them)
    """What was stored on a node that is gone."""


class DriverStore:
    """The driver's end: it never waits when it drops, and counts the tensor bytes that come here (`digen eval`).

    Every call to a worker that follows a drop depends on `dropped`, so no worker sees what was dropped before it.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.first: Any = None
        """The first keeper; None while the engine is closed."""
        self.dropped: Any = None
        self.tensor_bytes = 0

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Ref:
        ref = RayStore(self.run).put(key, tensors)
        self.tensor_bytes += ref.nbytes
        return ref

    def get(self, ref: Ref) -> dict[str, torch.Tensor]:
        found = RayStore(self.run).get(ref)
        self.tensor_bytes += sum(tensor.numel() * tensor.element_size() for tensor in found.values())
        return found

    def has(self, ref: Ref) -> bool:
        return self.first is not None and RayStore(self.run).has(ref)

    def drop(self, ref: Ref) -> None:
        if self.first is not None:
            self.dropped = self.first.drop.remote(ref.key)


class Keeper:
    """A Ray actor on every node that has workers. `first`: the one that has the list of keys; None: this one."""

    def __init__(self, first: Any = None) -> None:
        self.first = first
        self.held: dict[str, list[Any]] = {}

    def keep(self, key: str, packed: Packed) -> bool:
        """Own a copy of these tensors, here on the node where they are. False when the key is taken."""
        import ray

        mine = [ray.put(packed)]  # in a list, or Ray would hand over the tensors in its place
        return self.enter(key, mine) if self.first is None else bool(ray.get(self.first.enter.remote(key, mine)))

    def enter(self, key: str, refs: list[Any]) -> bool:
        """Put it on the list; what is on the list stays in memory."""
        return self.held.setdefault(key, refs) is refs

    def find(self, key: str) -> list[Any]:
        """What stands for the tensors, in a list; an empty one when there is no such key."""
        return self.held.get(key, [])

    def has(self, key: str) -> bool:
        return key in self.held

    def drop(self, key: str) -> None:
        self.held.pop(key, None)

    def nodes(self) -> list[Node]:
        """All living nodes with what is free on each: asked from inside the cluster, wherever the driver is."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                free[node["NodeID"]].get("CPU", 0.0),
                free[node["NodeID"]].get("GPU", 0.0),
                dict(node.get("Labels", {})),
            )
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] in free
        ]

    def here(self) -> str:
        """The id of its node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


def keeper_name(run: str, node: str | None = None) -> str:
    """Of the keeper on a node; None: of the first one."""
    return f"{run}/{node}" if node else run


@lru_cache(maxsize=8)
def keeper(run: str, node: str | None = None) -> Any:
    """The keeper on a node, or the first one. Raises ValueError when there is none."""
    import ray

    return ray.get_actor(keeper_name(run, node), namespace=NAMESPACE)


@lru_cache(maxsize=8)
def nearest_keeper(run: str) -> Any:
    """The keeper on this process's node; the first one where no other is."""
    import ray

    try:
        return keeper(run, ray.get_runtime_context().get_node_id())
    except ValueError:
        return keeper(run)


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Bytes of dense CPU tensors, copied only where they are not that."""
    import torch

    def flat(tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), flat(t)) for name, t in tensors.items()}


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    """Tensors of their own: Ray's memory is shared and cannot be written to, and is freed when they were copied."""
    import torch

    made = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape, _) in packed.items()}
    for name, tensor in made.items():
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = packed[name][2]
    return made
