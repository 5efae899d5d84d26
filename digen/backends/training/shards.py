"""A module divided over ranks by torch's `fully_shard`, and its weights, of which each rank reads its own parts.

Invariant: no rank has more than its parts of the module, and one tensor of it on the way. Outside of a forward or
backward pass the registered parameters are these parts, the root's too: nobody can step or send stale whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from digen.checkpoint.tensors import Pieces
from digen.config import TrainerConfig
from digen.errors import ConfigError


def mesh_of(trainer: TrainerConfig, device: torch.device) -> DeviceMesh:
    """All ranks in a row; hybrid: rows of `shard_ranks` neighbours that share the parts, each row a copy of the others.

    Neighbours should be those with the fast connection: parameters are gathered within a row in every pass, gradients
    are summed over rows once they are summed within them.
    """
    size = trainer.shard_ranks
    if size is None or size == trainer.ranks:
        return init_device_mesh(device.type, (trainer.ranks,))
    return init_device_mesh(device.type, (trainer.ranks // size, size), mesh_dim_names=("replicate", "shard"))


def divide(root: nn.Module, blocks: Sequence[nn.Module], trainer: TrainerConfig, mesh: DeviceMesh) -> None:
    """Divide a module, in place. Gradients are summed, not averaged: each rank divides by the step's denominator."""
    small = getattr(torch, trainer.gather_dtype) if trainer.gather_dtype else None
    # Inputs are cast by autocast alone, as in every other worker. Gradients are kept and summed in float32.
    policy = MixedPrecisionPolicy(small, torch.float32 if small else None, cast_forward_inputs=False)
    host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if trainer.cpu_offload else OffloadPolicy()
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=host)
    for shard in shards(root):
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces


def shards(root: nn.Module) -> Iterator[FSDPModule]:
    """The units of a divided module: its parameters are gathered, and their gradients summed, unit by unit."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def set_aside(root: nn.Module) -> dict[str, Tensor]:
    """Take what a module without weights has nevertheless, its buffers and adapters, and leave it wholly empty."""
    named = chain(root.named_parameters(), root.named_buffers())
    kept = {name: tensor.detach() for name, tensor in named if not tensor.is_meta}
    root.to("meta")
    return kept


@torch.no_grad()
def fill(root: nn.Module, device: torch.device, files: Sequence[Path], kept: Mapping[str, Tensor]) -> None:
    """Give an empty divided module its values: each rank its parts of what is in the files, or was set aside."""
    root.to_empty(device=device)
    pieces = Pieces(files)
    for name, tensor in chain(root.named_parameters(), root.named_buffers()):
        stored = name.replace(".base_layer.", ".")  # as the layer was called before it got an adapter
        if pieces.shapes.get(stored) == tuple(tensor.shape):
            tensor.copy_(pieces.like(stored, tensor))
        elif name in kept:
            tensor.copy_(part_of(kept[name], tensor))
        else:
            got = pieces.shapes.get(stored, "no such tensor")
            raise ConfigError(f"model.path: {stored} is {got} in {files[0].parent}, expected {tuple(tensor.shape)}")


def gather_size(root: nn.Module, trainer: TrainerConfig) -> int:
    """Bytes of all parameters of a divided module, gathered."""
    width = 2 if trainer.gather_dtype else None
    return sum(p.numel() * (width or p.element_size()) for p in root.parameters())


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that all ranks have, divided as `like` is and where that is; no message."""
    if not isinstance(like, DTensor):
        return whole.to(like)
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = torch.zeros_like(like)
    where = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    cast("DTensor", part).to_local().copy_(whole[where])
    return part


def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a parameter or gradient; called on all ranks."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
