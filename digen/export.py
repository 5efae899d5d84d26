"""`digen export`: trained weights in the form that diffusers loads without digen, with a model card.

Invariant: the folder is there whole or not at all (rule R20); tensors that the model does not have, or lacks, are an
error (rule R15). docs/export.md lists the files.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from accelerate import init_empty_weights
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

import digen
from digen import plugins, presets
from digen.backends.worker import add_adapters
from digen.config import LoraConfig
from digen.errors import ConfigError
from digen.models.base import ModelFamily
from digen.observe.files import ABOUT, synced, write_atomic
from digen.trained import Kind, Trained, find
from digen.types import Version
from digen.weights.state import load_trainable

LORA_FILE: Final = "pytorch_lora_weights.safetensors"
"""diffusers' own name."""


@dataclass(frozen=True, slots=True)
class Export:
    """What was written where."""

    path: Path
    format: Literal["lora", "transformer"]
    weights: Kind
    version: Version
    checkpoint: Path

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values (docs/metrics.md)."""
        return {
            "path": str(self.path),
            "format": self.format,
            "weights": self.weights,
            "version": self.version,
            "checkpoint": str(self.checkpoint),
        }


def export(run_dir: Path, to: Path, weights: Kind | None = None, version: Version | None = None) -> Export:
    """Write a run's trained weights into the new or empty folder `to`; `weights` and `version` as for `find`.

    Adapters become one file, full weights the transformer's folder. Raises ConfigError when there are no such weights
    or the folder cannot be used, SyncError when they do not fit the model.
    """
    trained = find(run_dir, weights, version)
    if trained.path.is_dir():
        raise ConfigError(f"{run_dir} is an export already; allowed: the folder of a run")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to: {to} is there and not empty; allowed: a new or an empty folder")
    config = trained.config
    family = cast("type[ModelFamily]", plugins.find("models", config.model.name))(config.model)
    tensors, lora = load_file(trained.path), config.trainer.lora
    made = Export(to, "lora" if lora else "transformer", trained.weights, trained.version, trained.checkpoint)
    aside = to.with_name(f".{to.name}.{secrets.token_hex(4)}.partial")
    try:
        aside.mkdir(parents=True)
        if lora:
            _write_adapters(family, lora, tensors, aside)
        else:
            _write_transformer(family, tensors, aside)
        write_atomic(aside / "README.md", card(trained, family))
        about = {"digen": digen.__version__, "format": made.format, "weights": made.weights, "version": made.version}
        write_atomic(aside / ABOUT, json.dumps({**about, "config": presets.payload(config)}, indent=2) + "\n")
        for file in aside.iterdir():
            synced(file)
        aside.rename(to)
    except OSError as error:
        raise ConfigError(f"--to: {to} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def _write_adapters(family: ModelFamily, lora: LoraConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """The base is needed for its names and shapes alone, so none of its weights is read."""
    kind = family.transformer_class
    with init_empty_weights():
        family.transformer = kind.from_config(family.part_config("transformer")).requires_grad_(False)
    add_adapters(family, lora.rank, lora.alpha, lora.target_modules)
    load_trainable(family.transformer, tensors)
    layers = get_peft_model_state_dict(family.transformer, state_dict=dict(tensors), save_embedding_layers=False)
    metadata = cast("Any", family.transformer).peft_config["default"].to_dict()
    family.pipeline_class.save_lora_weights(
        folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata
    )


def _write_transformer(family: ModelFamily, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """In float32, as it was trained."""
    transformer = family.transformer_class.from_pretrained(
        family.folder, subfolder="transformer", torch_dtype=torch.float32
    )
    load_trainable(transformer.requires_grad_(True), tensors)
    transformer.save_pretrained(folder)


# The model card ------------------------------------------------------------------------------------------------------


def card(trained: Trained, family: ModelFamily) -> str:
    """README.md of an export: what it is, how it was made, how to load it."""
    config = trained.config
    facts = {
        "base model": f"{config.model.name} (`{_base(trained, family)}`)",
        "algorithm": config.algorithm.name,
        "rewards": ", ".join(f"{name} x {term.weight:g}" for name, term in config.reward.items()),
        "optimizer steps": trained.version,
        "prompts": f"{config.data.prompts or 'those bundled with the model'}, {config.data.prompts_per_step} a step",
        "samples per prompt": config.algorithm.samples_per_prompt,
        "guidance while training": config.sampling.guidance,
        "trained": _what(config.trainer.lora),
        "weights": "exponential moving average over steps"
        if trained.weights == "ema"
        else "as the last step left them",
        "seed": config.seed,
        "made with": f"digen {digen.__version__}",
    }
    rows = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    head = [f"base_model: {family.path}"] if not Path(family.path).is_dir() else []
    head += [
        "library_name: diffusers",
        f"tags: [{'lora, ' if config.trainer.lora else ''}reinforcement-learning, digen]",
    ]
    return CARD.format(head="\n".join(head), name=config.model.name, rows=rows, code=_code(trained, family))


CARD: Final = """---
{head}
---

# {name}, post-trained with reinforcement learning

| | |
|---|---|
{rows}

Every setting is in `digen.json`. Load it with diffusers:

```python
{code}
```
"""


def _what(lora: LoraConfig | None) -> str:
    return f"LoRA adapters, rank {lora.rank}, alpha {lora.alpha:g}" if lora else "all weights of the transformer"


def _base(trained: Trained, family: ModelFamily) -> str:
    """The base model for a reader."""
    return "bundled with digen" if _is_bundled(trained, family) else family.path


def _is_bundled(trained: Trained, family: ModelFamily) -> bool:
    """Whether the base came with its plugin, in a folder that means something on this machine only."""
    return Path(family.path) == plugins.folder("models", trained.config.model.name)


def _code(trained: Trained, family: ModelFamily) -> str:
    pipeline, transformer = family.pipeline_class.__name__, family.transformer_class.__name__
    model, lora = json.dumps(trained.config.model.name), trained.config.trainer.lora
    bundled = _is_bundled(trained, family)
    base = f'plugins.folder("models", {model})' if bundled else json.dumps(family.path)
    imports = ["from digen import plugins"] if bundled else []
    if lora:
        load = [f"pipe = {pipeline}.from_pretrained({base})", f'pipe.load_lora_weights(".", weight_name="{LORA_FILE}")']
        return "\n".join([f"from diffusers import {pipeline}", *imports, "", *load])
    load = [f'transformer = {transformer}.from_pretrained(".")']
    load += [f"pipe = {pipeline}.from_pretrained({base}, transformer=transformer)"]
    return "\n".join([f"from diffusers import {pipeline}, {transformer}", *imports, "", *load])
