"""What a model family has to tell digen, and nothing about algorithms or backends.

Invariant: latents are float32 of shape (N, *latent_shape) everywhere outside `velocity` and `decode`; one call of
`velocity` may mix timesteps (TSP, paper section 3.2.2). Shape letters: N rows, P prompts, L text tokens, D features, T
steps, F frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Final, cast

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils import logging as transformers_logging

from digen.config import ModelConfig
from digen.errors import ConfigError
from digen.models.skeleton import skeleton
from digen.preflight import cached

Conditioning = dict[str, Tensor]
"""What the transformer is conditioned on, batch first: one row per prompt, or per sample after `rows_of`."""
LOADING: Final = RLock()
"""The libraries patch torch while they load a model, which two threads of one process must not do at once."""


def rows_of(conditioning: Conditioning, index_N: Tensor) -> Conditioning:
    """Row `index_N[i]` of every tensor as row i."""
    return {name: tensor[index_N] for name, tensor in conditioning.items()}


def quieten() -> None:
    """No progress bars, and no line for every cut prompt: they are counted once, by `num_cut`."""
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


def to_uint8(pixels: Tensor) -> Tensor:
    """What a VAE decodes, (N, 3, ...) from -1 to 1, as uint8 (N, ..., 3): the rounding of diffusers' processors."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).contiguous()


class ModelFamily(ABC):
    """Adapter of one family of diffusers models: the transformer is trained, everything else is frozen.

    docs/models.md shows how to add one in a file.
    """

    default_path: ClassVar[str]
    """Hub id or bundled folder used when the config names none."""
    folders: ClassVar[tuple[str, ...]]
    """The pipeline's parts, each a folder of that name in diffusers' format; text encoders and tokenizers by prefix."""
    gated: ClassVar[bool] = False
    """Whether the hub asks for an accepted licence and a token before it hands out the weights."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Suffixes of the linear layers that adapters are put on by default."""
    encoding_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    """What the names of those parts begin with that `encode` needs."""
    further_text_tokens: ClassVar[int] = 0
    """Tokens that the text's embeddings have besides the `max_text_tokens` of the config."""
    frame_rate: ClassVar[float] = 8.0
    """Frames a second at which its videos are shown."""
    embeds_guidance: ClassVar[bool] = False
    """Whether the guidance scale is an input of the transformer (`conditioning["guidance"]`), at no second forward."""

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    """diffusers' pipeline, which loads what `digen export` writes."""
    transformer_class: ClassVar[type[ModelMixin]]
    """diffusers' class of the transformer."""
    vae_dtype: ClassVar[torch.dtype | None] = None
    """Of the VAE, where it must not be that of the transformer."""

    empty: bool = False
    """Whether `load` leaves out the transformer's weights (`digen/models/skeleton.py`), which the worker then reads."""
    transformer: nn.Module
    pipeline: Any = None
    """Encodes and decodes; its transformer is None, so that there is one owner of the weights that are trained."""
    scheduler: Any

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.path = config.path or self.default_path
        self.device = torch.device("cpu")

    @property
    def folder(self) -> str:
        """Where the files are: the path, or where the hub's cache (HF_HOME) has the repository that it names.

        Raises ConfigError when there is neither; nothing is downloaded.
        """
        local = Path(self.path).expanduser()
        found = local if local.is_dir() else cached(self.path)
        if found is None:
            raise ConfigError(f"model.path: {self.path} is no folder and not in the hub's cache")
        return str(found)

    def load(
        self, device: str, dtype: torch.dtype, *, text_encoder: bool, decoder: bool, tokenizer: bool = False
    ) -> None:
        """Load the transformer in `dtype` and, where wanted, what encodes prompts and what decodes latents.

        tokenizer: load it even without the text encoder, for `num_cut`.
        """
        quieten()
        self.device = torch.device(device)
        self.transformer = self._load_transformer(dtype).requires_grad_(False).eval()
        wanted = {"text_encoder": text_encoder, "tokenizer": text_encoder or tokenizer, "vae": decoder}
        left_out = [name for name in self.folders if any(name.startswith(k) and not w for k, w in wanted.items())]
        self.pipeline = self._load_pipeline(dtype, dict.fromkeys(left_out))
        if decoder and self.config.vae_tiling:
            self.pipeline.vae.enable_tiling()
        self.vae_config = self.part_config("vae")
        self.transformer_config = self.part_config("transformer")
        self.scheduler = self.pipeline.scheduler
        if self.config.shift is not None:
            settings = self.static_shift(self.config.shift)
            self.scheduler = type(self.scheduler).from_config(self.scheduler.config, **settings)

    def load_encoders(self, device: str, dtype: torch.dtype) -> None:
        """Have on the device what `encode` needs; nothing else is loaded, and nothing twice."""
        parts = [name for name in self.folders if name.startswith(self.encoding_parts)]
        self.device = torch.device(device)
        here = dict.fromkeys(self.folders) if self.pipeline is None else self.pipeline.components
        if any(here[name] is None for name in parts):
            quieten()
            given = {name: part for name, part in here.items() if part is not None or name not in parts}
            with LOADING:
                self.pipeline = self._load_pipeline(dtype, given)
        self._move_encoders(self.device)

    def rest_encoders(self) -> None:
        """Take the text encoders out of the device's memory into the host's: prompts come rarely."""
        self._move_encoders(torch.device("cpu"))

    def _move_encoders(self, device: torch.device) -> None:
        here = {} if self.pipeline is None else self.pipeline.components
        for name, part in here.items():
            if name.startswith(self.encoding_parts) and isinstance(part, nn.Module):
                part.to(device)

    def _load_pipeline(self, dtype: torch.dtype, given: Mapping[str, Any]) -> Any:
        """The pipeline with these parts (None: without), without a transformer; the others are loaded, frozen."""
        pipeline = self.pipeline_class.from_pretrained(
            self.folder,
            **{**given, "transformer": None},
            dtype={"default": dtype, "vae": self.vae_dtype or dtype},
            local_files_only=True,
        ).to(self.device)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        return pipeline

    def _load_transformer(self, dtype: torch.dtype) -> nn.Module:
        if self.empty:
            return skeleton(self.transformer_class, self.folder, "transformer", dtype)
        loaded: nn.Module = self.transformer_class.from_pretrained(
            self.folder, subfolder="transformer", dtype=dtype, local_files_only=True
        )
        return loaded.to(self.device)

    def part_config(self, folder: str) -> Mapping[str, Any]:
        """The configuration of a part, whether or not its weights are loaded here.

        What its file does not say is as its class has it: published files are older than some keys.
        """
        found: dict[str, Any] = self.transformer_class.load_config(self.folder, subfolder=folder, local_files_only=True)
        known = signature(getattr(diffusers, found["_class_name"])).parameters.values()
        return {**{each.name: each.default for each in known if each.default is not each.empty}, **found}

    def static_shift(self, shift: float) -> Mapping[str, Any]:
        """The scheduler's settings for one shift at every size: s -> shift s / (1 + (shift - 1) s), and no more."""
        return {"shift": shift, "use_dynamic_shifting": False, "shift_terminal": None}

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents, as the transformer takes them."""

    @abstractmethod
    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of a transformer of this family: units of sharding and of activation checkpointing."""

    @abstractmethod
    def encode(self, prompt: str) -> Conditioning:
        """Conditioning of one prompt (one row). A text's padding, if not part of the model, is left out."""

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Stack prompts into one batch; `velocity` must not depend on the padding.

        Where lengths differ, `embeds` (1, L, D) and `mask` (1, L) are padded at the end with zeros.
        """
        longest = max(c["embeds"].shape[1] for c in conditionings)

        def padded(c: Conditioning, name: str) -> Tensor:
            missing = longest - c["embeds"].shape[1]
            if not missing or name not in ("embeds", "mask"):
                return c[name]
            return pad(c[name], (0, 0, 0, missing) if name == "embeds" else (0, missing))

        return {name: torch.cat([padded(c, name) for c in conditionings]) for name in conditionings[0]}

    @abstractmethod
    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many of these prompts are longer than the text encoder's limit."""

    @abstractmethod
    def sigmas(self, num_steps: int) -> Tensor:
        """The sampler's noise levels (T+1,), float32, from about 1 down to 0, as the library's scheduler makes them."""

    def even_sigmas(self, num_steps: int, mu: float | None = None) -> Tensor:
        """A flow-match Euler scheduler's table (T+1,) for levels spaced evenly from 1 to 1/T before they are shifted.

        mu: the exponent of the shift where the scheduler makes it depend on the size.
        """
        self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
        return cast("Tensor", self.scheduler.sigmas).float()

    def size_shift(self) -> float:
        """The exponent of a shift that grows with the number of latent tokens, as the scheduler's config says."""
        config = self.scheduler.config
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        return float(low + (high - low) * (self.latent_shape[0] - few) / (many - few))

    @abstractmethod
    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        """Predicted velocity (noise - data) of latents (N, ...) at noise levels (N,), one row of conditioning each."""

    def combine(self, cond: Tensor, uncond: Tensor, guidance: float) -> Tensor:
        """Classifier-free guidance, as the family's pipeline computes it: u + w (c - u)."""
        return uncond + guidance * (cond - uncond)

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Media of latents (N, ...): uint8 (N, H, W, 3), or (N, F, H, W, 3) for video."""

    def guided_velocity(
        self, latents: Tensor, sigma_N: Tensor, cond: Conditioning, negative: Conditioning | None, guidance: float
    ) -> Tensor:
        """`velocity` with guidance: two forwards, unless the scale is 1 or embedded, or there is no negative."""
        if self.embeds_guidance:
            return self.velocity(latents, sigma_N, {**cond, "guidance": torch.full_like(sigma_N, guidance)})
        v = self.velocity(latents, sigma_N, cond)
        if guidance == 1.0 or negative is None:
            return v
        return self.combine(v, self.velocity(latents, sigma_N, negative), guidance)
