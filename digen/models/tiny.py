"""Miniatures of the model families: diffusers' own classes in small sizes with random weights, without a download.

A miniature is a folder in diffusers' format, made the first time that it is asked for and kept in the user's cache.
Invariant: the same files, libraries and seed give the same weights; what the code meets in a real model it meets here:
text encoders, tokenizers with the real templates' lengths, the real schedulers' settings.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch

from digen.config import ModelConfig
from digen.models import tiny_text
from digen.models.base import ModelFamily, quieten
from digen.models.embeddings import cache_dir
from digen.models.tiny_text import WIDTH

SEED = 0


class Tiny(ModelFamily):
    """A family whose weights are made here when the config names no folder."""

    default_path = ""
    recipe: ClassVar[str]
    """Name of a function in this file."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if not self.path:
            self.path = str(folder(self.recipe))


def folder(recipe: str) -> Path:
    """Where a miniature is; it is made now if it is not there. Whole or not at all: processes may ask at once."""
    made_of = [
        *(Path(file).read_bytes() for file in (__file__, tiny_text.__file__)),
        *(version(name).encode() for name in ("torch", "diffusers", "transformers")),
    ]
    key = hashlib.blake2b(b"\0".join(made_of), digest_size=6).hexdigest()
    root = cache_dir()
    made = root / f"tiny-{recipe}-{key}"
    if made.is_dir():
        return made
    aside = root / f".{made.name}.{secrets.token_hex(4)}"
    try:
        build(recipe, aside)
        aside.rename(made)
    except OSError:
        if not made.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def build(recipe: str, path: Path) -> None:
    """Write the miniature into the new folder `path`."""
    known = (sd3, flux, qwen_image, z_image, wan, hunyuan_video)
    recipes: Mapping[str, Callable[[], Any]] = {function.__name__: function for function in known}
    quieten()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        pipeline = recipes[recipe]()
    pipeline.save_pretrained(path)


# One function per family: a pipeline as its authors put it together -------------------------------------------------


def sd3() -> Any:
    """Dual attention in the first block, as in SD3.5-medium."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        _image_vae(scaling_factor=1.5305, shift_factor=0.0609),
        *tiny_text.clip(projected=True),
        *tiny_text.clip(projected=True),
        *tiny_text.t5(),
    )


def flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH // 2,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(
        scheduler,
        _image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        *tiny_text.clip(),
        *tiny_text.t5(),
        transformer,
    )


def qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    transformer = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )
    vae = AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1)
    encoder, tokenizer = tiny_text.qwen(QwenImagePipeline(scheduler, None, None, None, None).prompt_template_encode)
    return QwenImagePipeline(scheduler, vae, encoder, tokenizer, transformer)


def z_image() -> Any:
    """The tokens that fill a row up to a multiple of 32 are learned, so here they are not zero."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    vae = _image_vae(scaling_factor=0.3611, shift_factor=0.1159)
    return ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=6.0), vae, *tiny_text.qwen3(), transformer)


def wan() -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5EncoderModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1)
    encoder, tokenizer = tiny_text.t5(UMT5EncoderModel)
    return WanPipeline(tokenizer, encoder, vae, scheduler, transformer)


def hunyuan_video() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH // 2,
        rope_axes_dim=(4, 6, 6),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    encoder, tokenizer = tiny_text.llama(str(DEFAULT_PROMPT_TEMPLATE["template"]))
    clip, clip_tokenizer = tiny_text.clip()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return HunyuanVideoPipeline(encoder, tokenizer, transformer, vae, scheduler, clip, clip_tokenizer)


# Parts ---------------------------------------------------------------------------------------------------------------


def _image_vae(**scale: float) -> Any:
    """4 latent channels, 8 pixels per latent pixel."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **scale,
    )
