"""FLUX.1-dev, true to diffusers' FluxPipeline.

The guidance scale is an input of the transformer, so guidance costs no second forward. T5's padding is part of the
model and attended to; latents are packed: (N, tokens, 4 C), a token being a 2x2 patch. Source of every detail:
diffusers `FluxPipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from digen.models.base import Conditioning
from digen.models.layouts import KLImages, Packed
from digen.models.tiny import Tiny


class Flux(KLImages, Packed):
    """FLUX.1-dev, 12 billion parameters, guidance embedded (diffusers FluxPipeline)."""

    default_path = "black-forest-labs/FLUX.1-dev"
    folders = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
    gated = True
    embeds_guidance = True
    pipeline_class = FluxPipeline
    transformer_class = FluxTransformer2DModel
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return [
            *cast("nn.ModuleList", transformer.transformer_blocks),
            *cast("nn.ModuleList", transformer.single_transformer_blocks),
        ]

    @torch.no_grad()
    def encode(self, prompt: str) -> Conditioning:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            [prompt], None, device=self.device, max_sequence_length=self.config.max_text_tokens
        )
        return {"embeds": embeds, "pooled": pooled}

    def num_cut(self, prompts: Sequence[str]) -> int:
        """By T5; CLIP sees the first 77 tokens of any prompt."""
        tokens = self.pipeline.tokenizer_2(list(prompts))["input_ids"] if prompts else []
        return sum(len(ids) > self.config.max_text_tokens for ids in tokens)

    def sigmas(self, num_steps: int) -> Tensor:
        return self.even_sigmas(num_steps, self.size_shift())

    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        """`conditioning["guidance"]` (N,) is the embedded scale."""
        dtype = next(self.transformer.parameters()).dtype
        embeds = conditioning["embeds"].to(dtype)
        places = FluxPipeline._prepare_latent_image_ids(  # noqa: SLF001 - the layout is the pipeline's own
            len(latents), *self.grid, latents.device, dtype
        )
        output: tuple[Tensor] = self.transformer(
            hidden_states=latents.to(dtype),
            # The pipeline feeds scheduler.timesteps / 1000, and timesteps = 1000 sigma: the same two roundings here.
            timestep=(sigma_N.float() * 1000).to(dtype) / 1000,
            guidance=conditioning["guidance"].float() if self.transformer_config["guidance_embeds"] else None,
            pooled_projections=conditioning["pooled"].to(dtype),
            encoder_hidden_states=embeds,
            txt_ids=embeds.new_zeros(embeds.shape[1], 3),
            img_ids=places,
            return_dict=False,
        )
        return output[0]

    def decode(self, latents: Tensor) -> Tensor:
        unpacked = FluxPipeline._unpack_latents(  # noqa: SLF001 - the layout is the pipeline's own
            latents, self.config.height, self.config.width, self.downscale
        )
        return self.decode_images(unpacked)


class TinyFlux(Tiny, Flux):
    """FLUX.1-dev in miniature with random weights, made on demand: to try things out on a CPU."""

    recipe = "flux"
