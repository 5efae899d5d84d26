"""LoRA adapters for the engine: a folder as peft writes it, with the names that the engine's modules have.

Invariant: every module of the trainer's adapters is bound in the engine, on every rank to the very numbers that were
given or to its part of them, or it is an error: the engine takes adapters that fit nowhere without a word (rule R15).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from digen.backends.generation.vllm_weights import shard
from digen.errors import SyncError
from digen.types import Version

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(
    folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, names: Mapping[str, str]
) -> list[str]:
    """Write peft's two files; the modules, by the engine's names.

    names: ends of diffusers' module names -> what the engine calls them. tensors: `MODULE.lora_A.default.weight` (rank,
    in) and `MODULE.lora_B.default.weight` (out, rank).
    """
    given, modules = {}, []
    for name, tensor in tensors.items():
        module, _, which = name.partition(".lora_")
        for theirs, ours in names.items():
            module = module.removesuffix(theirs) + ours if module.endswith(theirs) else module
        given[f"base_model.model.{module}.lora_{which.replace('.default.', '.')}"] = tensor.detach().clone()
        modules.append(module)
    modules = list(dict.fromkeys(modules))
    save_file(given, folder / FILE)
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": kinds, "bias": "none"}
    (folder / SETTINGS).write_text(json.dumps(settings))
    return modules


def bind_adapters(
    manager: Any,
    folder: str,
    version: Version,
    modules: Sequence[str],
    packed: Mapping[str, Sequence[str]],
    rank: int = 0,
    num_ranks: int = 1,
) -> Any:
    """Have a rank's manager of adapters load and bind them; what requests name for them from now on.

    packed: the engine's module name -> names of its parts, in order. Raises SyncError naming modules that were not
    bound, or hold other numbers than the files.
    """
    from vllm_omni.lora.request import LoRARequest

    if manager is None:
        raise SyncError("the engine was started without adapters")
    request = LoRARequest(f"digen-{version}", version + 1, folder)
    manager.set_active_adapter(None)
    if version + 1 in manager.list_adapters():
        manager.remove_adapter(version + 1)  # the same version again is not the same numbers for certain
    manager.add_adapter(request)
    manager.set_active_adapter(request)
    loaded = manager._registered_adapters[version + 1].loras  # noqa: SLF001 - the manager does not show what it loaded
    if loaded.keys() != set(modules):
        raise SyncError(f"version {version}: {len(loaded)} of {len(modules)} adapted modules were bound")
    given, scale = load_file(Path(folder) / FILE), _scale(Path(folder))
    for module in modules:
        layer, place = _layer(manager._lora_modules, module, packed)  # noqa: SLF001 - nor what computes with it
        first, second = (given[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
        a, b = layer.lora_a_stacked[place][0, 0], layer.lora_b_stacked[place][0, 0]
        num = len(first)  # the layers have room for larger ranks
        second = second.to(b.dtype) * scale
        mine = (shard(first, (num, a.shape[1]), rank, num_ranks), shard(second, (len(b), num), rank, num_ranks))
        if not all(map(_same, (a[:num], b[:, :num]), mine)) or a[num:].any() or b[:, num:].any():
            raise SyncError(f"version {version}: the adapter of {module} is not what was given")
    return request


def _layer(layers: Mapping[str, Any], module: str, packed: Mapping[str, Sequence[str]]) -> tuple[Any, int]:
    """What computes with a module's adapter, and the number of its slice in there."""
    parent, _, leaf = module.rpartition(".")
    found = [(f"{parent}.{whole}", parts.index(leaf)) for whole, parts in packed.items() if leaf in parts]
    for name, place in [*found, (module, 0)]:
        if layer := layers.get(f"transformer.{name}"):
            return layer, place
    raise SyncError(f"no layer of the engine computes with the adapter of {module}")


def _scale(folder: Path) -> float:
    settings = json.loads((folder / SETTINGS).read_text())
    return float(settings["lora_alpha"] / settings["r"])


def _same(found: Tensor, given: Tensor | None) -> bool:
    return given is not None and torch.equal(found.cpu(), given.to(found.dtype).cpu())
