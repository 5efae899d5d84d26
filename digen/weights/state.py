"""Which tensors travel from trainer to generators, how they are laid in, and how both sides prove they are equal (R15).

Invariant: exactly the trainable parameters travel (all of them, or the adapters); a missing, extra or wrongly shaped
tensor stops the run before anything is copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from digen.errors import SyncError

_SLICE = 1 << 22


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trainable(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the trainable parameters of the same names.

    Raises SyncError naming the tensors, with nothing copied, when names or shapes differ or there is nothing to load.
    """
    own = trainable(module)
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    if missing or extra or wrong or not own:
        raise SyncError(
            f"cannot load weights: {len(missing)} missing {missing[:3]}, {len(extra)} extra {extra[:3]}, "
            f"wrong shapes {wrong[:3]}, {len(own)} trainable parameters here"
        )
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def read_export(folder: Path, module: nn.Module) -> dict[str, Tensor]:
    """Trained tensors of a folder that `digen export` wrote, under the names that they have in `module`.

    In such a folder adapters are named as diffusers' pipelines name them, and a transformer also has its buffers.
    """
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    names = {f"transformer.{name.replace('.default.', '.')}": name for name in trainable(module)}
    buffers = {name for name, _ in module.named_buffers()}
    return {names.get(name, name): tensor for name, tensor in tensors.items() if name not in buffers}


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes, dtypes and bits, computed where the tensors are; equal on every device.

    The bits of each tensor, read as integers, are summed with weights that depend on their position (64-bit
    wrap-around): any single changed bit, and nearly any other change, changes the sum. One pass over memory.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_weighted_bits(tensor)};".encode())
    return digest.hexdigest()


def _weighted_bits(tensor: Tensor) -> int:
    bits = tensor.reshape(-1).view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    # Odd weights: multiplication by an odd number loses no bit modulo 2^64.
    weights = (
        torch.arange(min(_SLICE, bits.numel()), dtype=torch.int64, device=bits.device).mul_(2654435761).bitwise_or_(1)
    )
    for start in range(0, bits.numel(), _SLICE):
        piece = bits[start : start + _SLICE].long()
        total = total * 1000003 + (piece * weights[: piece.numel()]).sum()
    return int(total)
