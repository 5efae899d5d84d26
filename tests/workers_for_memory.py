"""Workers that say how much memory they took: of all tensors that were alive at the worst moment of a call."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.deepspeed import DeepSpeedTrainer
from digen.backends.training.fsdp import FsdpTrainer
from digen.backends.training.local import LocalTrainer
from digen.types import ScoredRollout


def tensors() -> Iterator[torch.Tensor]:
    """All of this process that have memory."""
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), DTensor) and not found.is_meta:
            yield found


def alive() -> int:
    """Bytes of all that is there now."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors()}.values())


class Watching(TorchDispatchMode):
    """The most bytes that were alive at once while it was entered; storages that FSDP empties count as empty."""

    def __enter__(self) -> Self:
        self.known: dict[int, weakref.ref[Any]] = {}
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in tensors():
            self.note(tensor)
        return super().__enter__()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for value in (*tree_leaves(found), *tree_leaves(args)):
            if isinstance(value, torch.Tensor):
                self.note(value._local_tensor if isinstance(value, DTensor) else value)
        if self.now > self.peak:
            self.weigh_again()
            self.peak = max(self.peak, self.now)
        return found

    def weigh_again(self) -> None:
        """FSDP empties storages without telling anybody."""
        alive = [(key, found) for key, known in self.known.items() if (found := known()) is not None]
        self.sizes |= {key: storage.nbytes() for key, storage in alive}
        self.now = sum(self.sizes.values())

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.now += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        if key not in self.known:
            self.known[key] = weakref.ref(storage, lambda _: self.gone(key))

    def gone(self, key: int) -> None:
        del self.known[key]
        self.now -= self.sizes.pop(key)


class Measuring:
    """Mixed into a trainer."""

    def train(self: Any, scored: ScoredRollout, tsp: int) -> dict[str, int]:
        """Two steps: in the second everything is there that will be."""
        self.accumulate(scored, 0, 8.0, True)
        self.optimizer_step(1.0)
        self.accumulate(scored, 0, 8.0, False)
        with Watching() as update:
            self.accumulate(scored, tsp, 8.0, True)
        with Watching() as step:
            self.optimizer_step(1.0)
        return {"before": self.before, "standing": alive(), "update": update.peak, "step": step.peak}

    def load(self: Any) -> None:
        self.before = alive()
        super().load()  # type: ignore[misc]


class MeasuringLocal(Measuring, LocalTrainer):
    pass


class MeasuringFsdp(Measuring, FsdpTrainer):
    pass


class MeasuringDeepSpeed(Measuring, DeepSpeedTrainer):
    pass


class MeasuringGenerator(DiffusersGenerator):
    def sample(self: Any, *args: Any) -> dict[str, int]:
        with Watching() as peak:
            self.generate(*args)
        return {"before": self.before, "generate": peak.peak}

    def load(self) -> None:
        self.before = alive()
        super().load()
