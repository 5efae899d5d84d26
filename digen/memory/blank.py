"""A model family without weights: the adapter's own code on shapes, from the configuration of its parts alone.

Invariant: configurations are those of the files that a run would load, where these are here; else as published
(`published.json`), so that a plan needs no download. Settings that a configuration leaves out are the classes' own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import torch
from safetensors import safe_open

from digen import plugins
from digen.config import ModelConfig
from digen.errors import ConfigError
from digen.models.base import Conditioning, ModelFamily, quieten
from digen.models.skeleton import without_weights

_PUBLISHED = Path(__file__).with_name("published.json")
_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim")
"""What transformers call the width of a text's embeddings."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model is made of."""

    transformer: Mapping[str, Any]
    """Configuration, as is that of the VAE."""
    vae: Mapping[str, Any]
    encoder_size: int
    """Parameters of all text encoders."""


def parts_of(family: ModelFamily) -> Parts:
    """Raises ConfigError when the files are not here and nothing is known of what they would be."""
    try:
        folder = Path(family.folder)
    except ConfigError:
        folder = None
    if folder is not None and (folder / "transformer" / "config.json").is_file():
        config = {
            part: json.loads((folder / part / "config.json").read_text("utf-8")) for part in ("transformer", "vae")
        }
        encoders = [name for name in family.folders if name.startswith("text_encoder")]
        return Parts(config["transformer"], config["vae"], sum(_num_elements(folder / name) for name in encoders))
    published = json.loads(_PUBLISHED.read_text("utf-8"))
    if family.path not in published:
        raise ConfigError(
            f"model.path: {family.path} is not here, so nothing is known of its sizes; allowed: a folder, a model that "
            f"was downloaded, or one of {', '.join(published)}"
        )
    known = published[family.path]
    return Parts(known["transformer"], known["vae"], sum(known["encoders"].values()))


def _num_elements(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return total


def blank(config: ModelConfig, dtype: torch.dtype) -> tuple[ModelFamily, Parts]:
    """The configured family as a worker loads it in `dtype`, on the meta device and without text encoders."""
    quieten()
    family = cast("type[ModelFamily]", plugins.find("models", config.name))(config)
    parts = parts_of(family)
    family.transformer = (
        without_weights(family.transformer_class, parts.transformer, dtype).requires_grad_(False).eval()
    )
    vae = without_weights(getattr(diffusers, parts.vae["_class_name"]), parts.vae, family.vae_dtype or dtype)
    if config.vae_tiling:
        cast("Any", vae).enable_tiling()
    family.pipeline = SimpleNamespace(vae=vae.requires_grad_(False).eval())
    family.transformer_config = cast("Any", family.transformer).config
    family.vae_config = cast("Any", vae).config
    return family, parts


def longest_text(family: ModelFamily, dtype: torch.dtype) -> Conditioning:
    """Conditioning of the longest prompt that the settings allow, one row: shapes on the meta device, a true mask."""
    config = family.transformer_config
    width = next((config[key] for key in _WIDTHS if key in config), None)
    if width is None:
        raise ConfigError(f"model {family.config.name}: its transformer has none of {', '.join(_WIDTHS)}")
    length = family.config.max_text_tokens + family.further_text_tokens
    found = {"embeds": torch.empty(1, length, width, dtype=dtype, device="meta")}
    if "pooled_projection_dim" in config:
        found["pooled"] = torch.empty(1, config["pooled_projection_dim"], dtype=dtype, device="meta")
    return {**found, "mask": torch.ones(1, length, dtype=torch.bool)}
