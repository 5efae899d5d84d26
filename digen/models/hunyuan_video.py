"""HunyuanVideo, true to diffusers' HunyuanVideoPipeline.

The guidance scale is an input of the transformer, times 1000, so guidance costs no second forward. Latents are
(N, C, F', H/8, W/8). Source of every detail: diffusers `HunyuanVideoPipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from torch import Tensor, nn

from digen.models.base import Conditioning
from digen.models.layouts import Videos
from digen.models.tiny import Tiny


class HunyuanVideo(Videos):
    """HunyuanVideo text-to-video, 13 billion parameters, guidance embedded (diffusers HunyuanVideoPipeline)."""

    default_path = "hunyuanvideo-community/HunyuanVideo"
    folders = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
    frame_rate = 24.0
    embeds_guidance = True
    pipeline_class = HunyuanVideoPipeline
    transformer_class = HunyuanVideoTransformer3DModel
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip

    @property
    def strides(self) -> tuple[int, int]:
        return self.vae_config["temporal_compression_ratio"], self.vae_config["spatial_compression_ratio"]

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """Those of the text refiner too."""
        root = cast("Any", transformer)
        return [
            *root.context_embedder.token_refiner.refiner_blocks,
            *root.transformer_blocks,
            *root.single_transformer_blocks,
        ]

    @torch.no_grad()
    def encode(self, prompt: str) -> Conditioning:
        embeds, pooled, mask = self.pipeline.encode_prompt(
            [prompt], device=self.device, max_sequence_length=self.config.max_text_tokens
        )
        length = int(mask.sum())  # padding is at the end, and masked
        return {"embeds": embeds[:, :length], "mask": mask[:, :length].bool(), "pooled": pooled}

    def num_cut(self, prompts: Sequence[str]) -> int:
        """By Llama; CLIP sees the first 77 tokens of any prompt."""
        template, start = DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"]
        tokens = self.pipeline.tokenizer([template.format(p) for p in prompts])["input_ids"] if prompts else []
        return sum(len(ids) > start + self.config.max_text_tokens for ids in tokens)

    def sigmas(self, num_steps: int) -> Tensor:
        return self.even_sigmas(num_steps)

    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        """`conditioning["guidance"]` (N,) is the embedded scale."""
        dtype = next(self.transformer.parameters()).dtype
        longest = int(conditioning["mask"].sum(1).max())
        output: tuple[Tensor] = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma_N.float() * 1000,
            encoder_hidden_states=conditioning["embeds"][:, :longest].to(dtype),
            encoder_attention_mask=conditioning["mask"][:, :longest].to(dtype),
            pooled_projections=conditioning["pooled"].to(dtype),
            guidance=conditioning["guidance"].to(dtype) * 1000.0,
            return_dict=False,
        )
        return output[0]

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return self.decode_videos(latents.to(vae.dtype) / vae.config.scaling_factor)


class TinyHunyuanVideo(Tiny, HunyuanVideo):
    """HunyuanVideo in miniature with random weights, made on demand: to try things out on a CPU."""

    recipe = "hunyuan_video"
