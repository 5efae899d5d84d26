"""How latents lie, for what several families have in common.

Invariant: shapes are those that the families' own pipelines give their transformers. Legend: N samples, C channels, F'
latent frames, h w latent pixels.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from digen.models.base import ModelFamily, to_uint8


class KLImages(ModelFamily):
    """Images of diffusers' AutoencoderKL."""

    @property
    def downscale(self) -> int:
        """Pixels per latent pixel."""
        return int(2 ** (len(self.vae_config["block_out_channels"]) - 1))

    @torch.no_grad()
    def decode_images(self, latents_NChw: Tensor) -> Tensor:
        """uint8 images (N, H, W, 3)."""
        vae = self.pipeline.vae
        scaled = latents_NChw.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return to_uint8(vae.decode(scaled, return_dict=False)[0])


class Packed(ModelFamily):
    """Latents of an image as a row of tokens, each a patch of 2x2 latent pixels: (N, tokens, 4 C)."""

    @property
    @abstractmethod
    def downscale(self) -> int:
        """Pixels per latent pixel."""

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width in tokens."""
        return self.config.height // (2 * self.downscale), self.config.width // (2 * self.downscale)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.grid[0] * self.grid[1], self.transformer_config["in_channels"])


class Videos(ModelFamily):
    """Latents of a video: (N, C, F', h, w)."""

    @property
    @abstractmethod
    def strides(self) -> tuple[int, int]:
        """Frames per latent frame, after the first, and pixels per latent pixel."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        time, space = self.strides
        frames = (self.config.num_frames - 1) // time + 1
        size = (self.config.height // space, self.config.width // space)
        return (self.transformer_config["in_channels"], frames, *size)

    @torch.no_grad()
    def decode_videos(self, scaled: Tensor) -> Tensor:
        """uint8 (N, F, H, W, 3), one video at a time: the decoder's memory grows with what it is given."""
        vae = self.pipeline.vae
        return torch.cat([to_uint8(vae.decode(one, return_dict=False)[0]) for one in torch.split(scaled, 1)])
