"""Z-Image, true to diffusers' ZImagePipeline; docs/models.md goes through this file line by line.

One stream of image and text tokens. The transformer takes lists, a text of its own length for each row, so nothing is
padded; it is fed 1 - s instead of the noise level s, and what it predicts points from noise to data. Latents are
(N, C, H/8, W/8). Source of every detail: diffusers `ZImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn

from digen.models.base import Conditioning
from digen.models.layouts import KLImages
from digen.models.tiny import Tiny


class ZImage(KLImages):
    """Z-Image, 6 billion parameters, with classifier-free guidance (diffusers ZImagePipeline)."""

    default_path = "Tongyi-MAI/Z-Image"
    folders = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    pipeline_class = ZImagePipeline
    transformer_class = ZImageTransformer2DModel
    lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")

    @property
    def latent_shape(self) -> tuple[int, ...]:
        patch = 2 * self.downscale
        size = (2 * (self.config.height // patch), 2 * (self.config.width // patch))
        return (self.transformer_config["in_channels"], *size)

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        root = cast("Any", transformer)
        return [*root.noise_refiner, *root.context_refiner, *root.layers]

    @torch.no_grad()
    def encode(self, prompt: str) -> Conditioning:
        (embeds,), _ = self.pipeline.encode_prompt(
            [prompt],
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_text_tokens,
        )
        return {"embeds": embeds[None], "mask": torch.ones(1, len(embeds), dtype=torch.bool, device=embeds.device)}

    def num_cut(self, prompts: Sequence[str]) -> int:
        """With the words that the chat template puts around a prompt; the end is cut."""
        tokenizer, how = self.pipeline.tokenizer, {"add_generation_prompt": True, "enable_thinking": True}
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, **how) for chat in chats]
        tokens = tokenizer(texts)["input_ids"] if texts else []
        return sum(len(ids) > self.config.max_text_tokens for ids in tokens)

    def sigmas(self, num_steps: int) -> Tensor:
        return self.even_sigmas(num_steps)

    def velocity(self, latents: Tensor, sigma_N: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = next(self.transformer.parameters()).dtype
        lengths = conditioning["mask"].sum(1).tolist()
        texts = zip(conditioning["embeds"].to(dtype), lengths, strict=True)
        images: tuple[list[Tensor]] = self.transformer(
            list(latents.to(dtype).unsqueeze(2)),  # an image is a video of one frame
            (1000 - sigma_N.float() * 1000) / 1000,
            [embeds[:length] for embeds, length in texts],
            return_dict=False,
        )
        return -torch.stack(images[0]).squeeze(2)

    def combine(self, cond: Tensor, uncond: Tensor, guidance: float) -> Tensor:
        """The pipeline's `guidance_scale` is ours less one: there 0 is off, here 1, as for every family."""
        return cond + (guidance - 1) * (cond - uncond)

    def decode(self, latents: Tensor) -> Tensor:
        return self.decode_images(latents)


class TinyZImage(Tiny, ZImage):
    """Z-Image in miniature with random weights, made on demand: to try things out on a CPU."""

    recipe = "z_image"
