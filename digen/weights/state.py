"""Which tensors travel from trainer to generators, and how a set of them is laid in.

Invariant: exactly the trainable parameters travel (all of them, or the adapters); a missing, extra or wrongly shaped
tensor stops the run before anything is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from digen.errors import SyncError


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def check_fit(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Whether tensors of these names and shapes are those that there are.

    Raises SyncError naming what is missing, extra or of another shape, or when there is nothing to load.
    """
    missing, extra = sorted(own.keys() - shapes.keys()), sorted(shapes.keys() - own.keys())
    wrong = [
        f"{name} is {shapes[name]}, expected {tuple(own[name].shape)}"
        for name in sorted(own.keys() & shapes.keys())
        if tuple(own[name].shape) != shapes[name]
    ]
    if missing or extra or wrong or not own:
        raise SyncError(
            f"cannot load weights: {len(missing)} missing {missing[:3]}, {len(extra)} extra {extra[:3]}, "
            f"wrong shapes {wrong[:3]}, {len(own)} trainable parameters here"
        )


@torch.no_grad()
def load_trainable(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the trainable parameters of the same names.

    Raises SyncError naming the tensors, with nothing copied, when names or shapes differ or there is nothing to load.
    """
    own = trainable(module)
    check_fit(own, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
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
