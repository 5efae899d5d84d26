"""FSDP2: parameters, gradients and optimizer state sharded over the group's ranks (gloo on CPU, nccl on GPU).

Invariant: gradients are summed, not averaged, over ranks (each rank already divides by the step's denominator), and
reduced once per step: in the backward pass of the last micro-batch's last forward.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from digen.backends.training.base import TorchTrainer
from digen.backends.training.ranks import join


class FsdpTrainer(TorchTrainer):
    """Fully sharded over 1..N ranks (torch FSDP2 `fully_shard`)."""

    in_lockstep = True

    def distribute(self) -> None:
        join(self.context)
        mesh = init_device_mesh(torch.device(self.context.device).type, (self.context.world_size,))
        for root in filter(None, (self.model.transformer, self.base)):
            for module in (*self.model.blocks(root), root):
                fully_shard(module, mesh=mesh)
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces

    def reduce_gradients(self, now: bool) -> None:
        root = cast("FSDPModule", self.model.transformer)
        root.set_requires_gradient_sync(now)
        root.set_is_last_backward(now)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().part(whole, like)
        whole = whole.to(like.device, like.dtype)
        return distribute_tensor(
            whole, like.device_mesh, like.placements, src_data_rank=None
        )  # all have it: no message

    def _norm(self, tensors: list[Tensor]) -> Tensor:  # type: ignore[override]
        return self.full(super()._norm(tensors))
