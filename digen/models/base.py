"""What a model family has to tell digen, and nothing about algorithms or backends.

Invariant: latents are float32 of shape (N, *latent_shape) everywhere outside `velocity` and `decode`; one call of
`velocity` may mix timesteps (TSP, paper section 3.2.2). Shape letters: N rows, P prompts, L text tokens, D features, T
steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor, nn

from digen.config import ModelConfig

Conditioning = dict[str, Tensor]
"""What the transformer is conditioned on, batch first: one row per prompt, or per sample after `rows_of`."""


def rows_of(conditioning: Conditioning, index_N: Tensor) -> Conditioning:
    """Row `index_N[i]` of every tensor as row i."""
    return {name: tensor[index_N] for name, tensor in conditioning.items()}


class ModelFamily(ABC):
    """Adapter of one family of diffusers models: the transformer is trained, everything else is frozen."""

    default_path: ClassVar[str]
    """Hub id or bundled folder used when the config names none."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Suffixes of the linear layers that adapters are put on by default."""

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    """diffusers' pipeline, which loads what `digen export` writes."""
    transformer_class: ClassVar[type[ModelMixin]]
    """diffusers' class of the transformer."""

    transformer: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.path = config.path or self.default_path
        self.device = torch.device("cpu")

    @abstractmethod
    def load(self, device: str, dtype: torch.dtype, *, text_encoder: bool, decoder: bool) -> None:
        """Load the transformer in `dtype` and, where wanted, what encodes prompts and what decodes latents."""

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents, as the transformer takes them."""

    @abstractmethod
    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of a transformer of this family: units of sharding and of activation checkpointing."""

    @abstractmethod
    def encode(self, prompt: str) -> Conditioning:
        """Conditioning of one prompt (one row, no padding)."""

    @abstractmethod
    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Stack prompts of different lengths into one batch, with masks; `velocity` must not depend on the padding."""

    @abstractmethod
    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many of these prompts are longer than the text encoder's limit."""

    @abstractmethod
    def sigmas(self, num_steps: int) -> Tensor:
        """The sampler's noise levels (T+1,), float32, from about 1 down to 0, as the library's scheduler makes them."""

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
        """`velocity` with guidance; scale 1 (or no negative conditioning) costs one forward, anything else two."""
        v = self.velocity(latents, sigma_N, cond)
        if guidance == 1.0 or negative is None:
            return v
        return self.combine(v, self.velocity(latents, sigma_N, negative), guidance)
