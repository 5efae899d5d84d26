"""Qwen-Image (and every model of its architecture, such as the bundled `glyph`), true to diffusers' QwenImagePipeline.

Latents are packed: (N, tokens, 4 C), a token being a 2x2 patch. Source of every detail: diffusers `QwenImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor, nn

from digen.models.base import Conditioning, to_uint8
from digen.models.layouts import Packed
from digen.models.tiny import Tiny

_TEXT_LIMIT = 1024
"""Tokens that the pipeline's tokenizer keeps, whatever is asked for."""


class QwenImage(Packed):
    """Qwen-Image: MMDiT with true classifier-free guidance and norm rescaling (diffusers QwenImagePipeline)."""

    default_path = "Qwen/Qwen-Image"
    folders = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    pipeline_class = QwenImagePipeline
    transformer_class = QwenImageTransformer2DModel
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip

    @property
    def downscale(self) -> int:
        """Pixels per latent pixel."""
        return int(2 ** len(self.vae_config["temperal_downsample"]))

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(cast("nn.ModuleList", transformer.transformer_blocks))

    @torch.no_grad()
    def encode(self, prompt: str) -> Conditioning:
        embeds, _ = self.pipeline.encode_prompt([prompt], self.device, max_sequence_length=self.config.max_text_tokens)
        return {"embeds": embeds, "mask": torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)}

    def num_cut(self, prompts: Sequence[str]) -> int:
        start, template = self.pipeline.prompt_template_encode_start_idx, self.pipeline.prompt_template_encode
        limit = start + min(self.config.max_text_tokens, _TEXT_LIMIT)
        tokens = self.pipeline.tokenizer([template.format(p) for p in prompts])["input_ids"] if prompts else []
        return sum(len(ids) > limit for ids in tokens)

    def sigmas(self, num_steps: int) -> Tensor:
        return self.even_sigmas(num_steps, self.size_shift())

    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        longest = int(conditioning["mask"].sum(1).max())
        mask = conditioning["mask"][:, :longest]
        dtype = next(self.transformer.parameters()).dtype
        # The pipeline feeds scheduler.timesteps / 1000, and timesteps = 1000 sigma: the same two roundings here.
        timestep_N = (sigma_N.float() * 1000).to(dtype) / 1000
        output: tuple[Tensor] = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=timestep_N,
            encoder_hidden_states=conditioning["embeds"][:, :longest].to(dtype),
            encoder_hidden_states_mask=None if bool(mask.all()) else mask,
            img_shapes=[[(1, *self.grid)]] * len(latents),
            return_dict=False,
        )
        return output[0]

    def combine(self, cond: Tensor, uncond: Tensor, guidance: float) -> Tensor:
        """True guidance, rescaled so that each token keeps the norm of its conditional prediction."""
        mixed = super().combine(cond, uncond, guidance)
        norms: tuple[Tensor, Tensor] = (cond.norm(dim=-1, keepdim=True), mixed.norm(dim=-1, keepdim=True))
        return mixed * (norms[0] / norms[1])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        unpacked = QwenImagePipeline._unpack_latents(  # noqa: SLF001 - the layout is the pipeline's own
            latents, self.config.height, self.config.width, self.downscale
        ).to(vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean, std = (
            unpacked.new_tensor(values).view(shape) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return to_uint8(vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0])


class TinyQwenImage(Tiny, QwenImage):
    """Qwen-Image in miniature with random weights, made on demand: to try things out on a CPU."""

    recipe = "qwen_image"
