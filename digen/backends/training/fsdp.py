"""FSDP2: parameters, gradients and optimizer state divided over the group's ranks (gloo on CPU, nccl on GPU).

Invariant: gradients are summed over ranks, not averaged, and once per step where `trainer.sync_gradients` is `step`: in
the backward pass of the last micro-batch's last forward. Paper sections 3.2.2 (TSP divides the number of messages) and
4 (how a sharded trainer generates).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from digen.backends.training import shards
from digen.backends.training.base import TorchTrainer
from digen.backends.training.generation_copy import GenerationCopy
from digen.backends.training.ranks import join
from digen.models.skeleton import weight_files
from digen.types import Version


class FsdpTrainer(TorchTrainer):
    """Sharded over 1..N ranks, wholly or in hybrid (torch FSDP2 `fully_shard`)."""

    in_lockstep = True
    loads_empty = True
    copy: GenerationCopy | None = None

    @property
    def samples_in_lockstep(self) -> bool:
        return self.copy is None

    # Loading ------------------------------------------------------------------------------------------------------

    def _load_model(self) -> None:
        super()._load_model()
        if self.generates_here and self.config.trainer.generate_with == "copy":
            self.copy = GenerationCopy(self._load_copy(), self.model.device)

    def _load_copy(self) -> torch.nn.Module:
        """The model once more, whole, in host memory."""
        twin = self.new_model()
        twin.load("cpu", self.kept_dtype, text_encoder=False, decoder=False)
        self.set_attention(twin.transformer)
        self.make_trainable(twin)
        return twin.transformer

    def distribute(self) -> None:
        c, device = self.config.trainer, torch.device(self.context.device)
        join(self.context, host=c.cpu_offload)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)  # nobody writes to it
        mesh = shards.mesh_of(c, device)
        for root in filter(None, (self.model.transformer, self.base)):
            empty = any(p.is_meta for p in root.parameters())
            kept = shards.set_aside(root) if empty else {}
            shards.divide(root, self.model.blocks(root), c, mesh)
            if empty:
                place = torch.device("cpu") if c.cpu_offload else device
                shards.fill(root, place, weight_files(self.model.folder, "transformer"), kept)

    # Gradients ----------------------------------------------------------------------------------------------------

    def reduce_gradients(self, now: bool) -> None:
        root = cast("FSDPModule", self.model.transformer)
        root.set_requires_gradient_sync(now or self.config.trainer.sync_gradients == "pass")
        root.set_requires_all_reduce(now)  # hybrid: parts are summed over the copies once a step in any case

    def full(self, tensor: Tensor) -> Tensor:
        return shards.whole_of(tensor)

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        return shards.part_of(whole, like)

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathered one after the other and kept by rank 0, in host memory: no rank's device has the whole model."""
        gathered = ((name, self.full(part)) for name, part in parts.items())
        return {name: tensor.cpu() for name, tensor in gathered if self.context.rank == 0}

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.full(super()._norm(tensors))

    # Generation: the context switch is part of the call that generates, and so of what an assist is known to cost ----

    @contextmanager
    def on_device(self) -> Iterator[None]:
        ways: Mapping[str, Callable[[], AbstractContextManager[None]]]
        ways = {"sharded": nullcontext, "gathered": self._gathered, "copy": self._instead}
        with super().on_device(), ways[self.config.trainer.generate_with]():
            yield

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """The first pass gathers each unit's parameters, which then stay until the end. Raises MemoryError, on CUDA."""
        root = cast("Any", self.model.transformer)
        self._check_memory(root)
        # Families ask the root's parameters for their dtype between passes: where that is another, only blocks stay.
        for shard in (s for s in shards.shards(root) if s is not root or not self.config.trainer.gather_dtype):
            shard.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            root.set_reshard_after_forward(True)
            for shard in shards.shards(root):
                shard.reshard()

    def _check_memory(self, root: torch.nn.Module) -> None:
        memory = self.stacking.memory
        needed = shards.gather_size(root, self.config.trainer)
        if memory is not None and memory.free() < needed:
            raise MemoryError(
                f"trainer.generate_with=gathered needs {needed / 1e9:.1f} GB on {self.context.device}, "
                f"{memory.free() / 1e9:.1f} GB are free; use trainer.generate_with=sharded"
            )

    @contextmanager
    def _instead(self) -> Iterator[None]:
        """The copy generates; the sharded model is left alone."""
        assert self.copy is not None
        live = self.model.transformer
        self.copy.refresh(self.version, ((name, self.full(part)) for name, part in self.parts().items()))
        with self.copy.offloaded.loaded():
            self.model.transformer = self.copy.module
            try:
                yield
            finally:
                self.model.transformer = live

    def begin_at(self, version: Version) -> None:
        if self.copy is not None:
            self.copy.version = None
        super().begin_at(version)
