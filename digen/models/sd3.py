"""Stable Diffusion 3.5, true to diffusers' StableDiffusion3Pipeline.

Three text encoders, each padded to a fixed length that the model was trained with and attends to, so every prompt has
the same shape and there is no mask. Latents are (N, C, H/8, W/8). Source of every detail: diffusers
`StableDiffusion3Pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn

from digen.models.base import Conditioning
from digen.models.layouts import KLImages
from digen.models.tiny import Tiny


class SD3(KLImages):
    """Stable Diffusion 3.5: MMDiT with classifier-free guidance (diffusers StableDiffusion3Pipeline)."""

    folders = (
        "scheduler", "text_encoder", "text_encoder_2", "text_encoder_3",
        "tokenizer", "tokenizer_2", "tokenizer_3", "transformer", "vae",
    )  # fmt: skip
    gated = True
    further_text_tokens = 77  # CLIP's, before T5's
    pipeline_class = StableDiffusion3Pipeline
    transformer_class = SD3Transformer2DModel
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip

    @property
    def latent_shape(self) -> tuple[int, ...]:
        channels: int = self.transformer_config["in_channels"]
        return (channels, self.config.height // self.downscale, self.config.width // self.downscale)

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(cast("nn.ModuleList", transformer.transformer_blocks))

    @torch.no_grad()
    def encode(self, prompt: str) -> Conditioning:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            [prompt],
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_text_tokens,
        )
        return {"embeds": embeds, "pooled": pooled}

    def num_cut(self, prompts: Sequence[str]) -> int:
        """By T5; the two CLIP encoders see the first 77 tokens of any prompt."""
        tokens = self.pipeline.tokenizer_3(list(prompts))["input_ids"] if prompts else []
        return sum(len(ids) > self.config.max_text_tokens for ids in tokens)

    def sigmas(self, num_steps: int) -> Tensor:
        """Spaced evenly down to the scheduler's least level, then shifted: the last step is next to nothing."""
        self.scheduler.set_timesteps(num_steps)
        return cast("Tensor", self.scheduler.sigmas).float()

    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = next(self.transformer.parameters()).dtype
        output: tuple[Tensor] = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma_N.float() * 1000,
            encoder_hidden_states=conditioning["embeds"].to(dtype),
            pooled_projections=conditioning["pooled"].to(dtype),
            return_dict=False,
        )
        return output[0]

    def decode(self, latents: Tensor) -> Tensor:
        return self.decode_images(latents)


class SD35Medium(SD3):
    """Stable Diffusion 3.5 medium, 2.2 billion parameters (diffusers StableDiffusion3Pipeline)."""

    default_path = "stabilityai/stable-diffusion-3.5-medium"


class SD35Large(SD3):
    """Stable Diffusion 3.5 large, 8.1 billion parameters (diffusers StableDiffusion3Pipeline)."""

    default_path = "stabilityai/stable-diffusion-3.5-large"


class TinySD3(Tiny, SD3):
    """Stable Diffusion 3.5 in miniature with random weights, made on demand: to try things out on a CPU."""

    recipe = "sd3"
