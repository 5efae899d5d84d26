"""Wan2.1 text-to-video, true to diffusers' WanPipeline.

The noise levels are those of the model's UniPC scheduler: the first is 0.999999, not 1, and the transformer is fed
whole timesteps, int(1000 s). A denoising step is Euler's on that table (UniPC of order 1): a step of higher order looks
back at others, so it is no Markov chain and has no log-probability. Latents are (N, C, F', H/8, W/8). Text is padded
with zeros that the model attends to. Source of every detail: diffusers `WanPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor, nn

from digen.models.base import Conditioning
from digen.models.layouts import Videos
from digen.models.tiny import Tiny


class Wan(Videos):
    """Wan2.1 text-to-video with classifier-free guidance (diffusers WanPipeline)."""

    folders = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    pipeline_class = WanPipeline
    transformer_class = WanTransformer3DModel
    frame_rate = 16.0
    vae_dtype = torch.float32  # bfloat16 shows in the video
    lora_targets = (
        "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
        "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
    )  # fmt: skip

    def static_shift(self, shift: float) -> Mapping[str, Any]:
        return {"flow_shift": shift}

    @property
    def strides(self) -> tuple[int, int]:
        return self.vae_config["scale_factor_temporal"], self.vae_config["scale_factor_spatial"]

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(cast("nn.ModuleList", transformer.blocks))

    @torch.no_grad()
    def encode(self, prompt: str) -> Conditioning:
        embeds, _ = self.pipeline.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_text_tokens,
            device=self.device,
        )
        return {"embeds": embeds}

    def num_cut(self, prompts: Sequence[str]) -> int:
        tokens = self.pipeline.tokenizer(list(prompts))["input_ids"] if prompts else []
        return sum(len(ids) > self.config.max_text_tokens for ids in tokens)

    def sigmas(self, num_steps: int) -> Tensor:
        self.scheduler.set_timesteps(num_steps)
        return cast("Tensor", self.scheduler.sigmas).float()

    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = cast("Any", self.transformer).patch_embedding.weight.dtype  # others are kept in float32
        output: tuple[Tensor] = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=(sigma_N.double() * 1000).long(),  # cut, not rounded, as the scheduler's
            encoder_hidden_states=conditioning["embeds"].to(dtype),
            return_dict=False,
        )
        return output[0]

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        z = latents.to(vae.dtype)
        mean, std = (z.new_tensor(values).view(shape) for values in (vae.config.latents_mean, vae.config.latents_std))
        return self.decode_videos(z / (1 / std) + mean)


class Wan1B(Wan):
    """Wan2.1 text-to-video, 1.4 billion parameters (diffusers WanPipeline)."""

    default_path = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


class Wan14B(Wan):
    """Wan2.1 text-to-video, 14.3 billion parameters (diffusers WanPipeline)."""

    default_path = "Wan-AI/Wan2.1-T2V-14B-Diffusers"


class TinyWan(Tiny, Wan):
    """Wan2.1 in miniature with random weights, made on demand: to try things out on a CPU."""

    recipe = "wan"
