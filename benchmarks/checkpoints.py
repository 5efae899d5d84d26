"""Checkpoints in diffusers' format with random weights, in any size: the families' miniatures made larger.

Invariant: the parts are of diffusers' and transformers' own classes, so all code that loads, encodes, samples and
decodes is what real weights meet. Weights are drawn on the device that is named, so that billions take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from torch import nn

from digen.models import tiny
from digen.models.base import quieten

Sizes = Mapping[str, Mapping[str, Any]]
"""Part of the pipeline -> settings of its configuration that differ from the miniature's."""


def build(recipe: str, sizes: Sizes, path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> int:
    """Write the family `recipe` in these sizes to the folder `path`; parameters of its transformer."""
    quieten()
    made = DiffusionPipeline.from_pretrained(tiny.folder(recipe))
    for name, settings in sizes.items():
        made.register_modules(**{name: enlarged(made.components[name], settings, device, dtype)})
    made.save_pretrained(path)
    return sum(p.numel() for p in made.transformer.parameters())


def enlarged(part: Any, settings: Mapping[str, Any], device: str, dtype: torch.dtype) -> nn.Module:
    """A model of the same class with these settings, nested ones joined; its weights drawn anew."""
    kind, config = type(part), part.config
    with init_empty_weights(include_buffers=False):
        if hasattr(kind, "from_config"):
            module: nn.Module = kind.from_config(joined(dict(config), settings))
        else:
            module = kind(type(config).from_dict(joined(config.to_dict(), settings)))
    draw(module, device, dtype)
    return module.eval()


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: joined(old[key], new[key]) for key in new if isinstance(new[key], Mapping)}
    return {**old, **new, **both}


def draw(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Random weights that keep the scale of what passes: 1 over the root of the inputs; scales 1, shifts 0."""
    source = torch.Generator(device).manual_seed(0)
    drawn: dict[int, nn.Parameter] = {}  # a parameter may have several owners
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in drawn:
                values = torch.ones(parameter.shape, device=device, dtype=dtype)
                if parameter.ndim > 1:
                    values.normal_(generator=source).mul_(parameter[0].numel() ** -0.5)
                elif "bias" in name:
                    values.zero_()
                drawn[id(parameter)] = nn.Parameter(values, requires_grad=False)
            setattr(owner, name, drawn[id(parameter)])
