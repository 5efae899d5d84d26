"""A model without its weights, and where they are: what a sharded trainer starts from.

Invariant: parameters are on the meta device and take no memory; names, shapes and dtypes, and buffers that are in no
file, are those that diffusers' `from_pretrained` gives. So each rank reads its parts of the files, and none the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from torch import nn

from digen.errors import ConfigError


def skeleton(kind: type[ModelMixin], path: str, subfolder: str, dtype: torch.dtype) -> nn.Module:
    """A diffusers model of a folder or hub id, as `from_pretrained(torch_dtype=dtype)` makes it but for the weights."""
    return without_weights(kind, kind.load_config(path, subfolder=subfolder, local_files_only=True), dtype)


def without_weights(kind: type[ModelMixin], config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The same of a configuration that is known already."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights():
            module: nn.Module = kind.from_config(config)
    finally:
        torch.set_default_dtype(usual)
    kept = getattr(kind, "_keep_in_fp32_modules", None) or ()
    for name, tensor in module.state_dict(keep_vars=True).items():  # what is in files
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if any(k in name.split(".") for k in kept) else dtype)
    return module


def weight_files(path: str, subfolder: str) -> list[Path]:
    """The safetensors files of a part of a diffusers folder or hub id (in the hub's cache). ConfigError: none there."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=f"{subfolder}/*", local_files_only=True))
    files = sorted((folder / subfolder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {folder / subfolder} has no .safetensors file")
    return files
