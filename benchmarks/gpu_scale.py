"""How large everything is that `gpu_kit.py` measures: on a GPU, and in miniature on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpoints import Sizes


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: its recipe, its miniature's plugin, and what its pipeline calls guidance."""

    recipe: str
    model: str
    guidance: str


FAMILIES = (Family("sd3", "tiny-sd3", "guidance_scale"), Family("qwen_image", "tiny-qwen-image", "true_cfg_scale"))


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is."""

    sizes: Mapping[str, Sizes]
    """Recipe -> sizes of its parts."""
    side: int
    """Pixels of an image, but where two processes share the device: half of it."""
    tokens: int
    num_steps: int
    samples: int
    batches: tuple[int, ...]
    widths: tuple[int, ...]
    """Of TSP; 0: all trained steps."""
    update_batch: int
    steps: int
    blocks: int
    width: int
    """Of the matrices that transports send."""
    rounds: int
    transports: tuple[str, ...]


TINY = Scale(
    sizes={
        "sd3": {"transformer": {"num_layers": 3}},
        "qwen_image": {"transformer": {"num_layers": 3}, "vae": {"num_res_blocks": 2}},
    },
    side=32,
    tokens=16,
    num_steps=3,
    samples=2,
    batches=(1, 2),
    widths=(1, 0),
    update_batch=1,
    steps=3,
    blocks=1,
    width=64,
    rounds=2,
    transports=("inline", "shared_memory"),
)
LARGE = Scale(
    sizes={
        "sd3": {  # Stable Diffusion 3.5 medium, 13 of its 24 layers: those with a second attention
            "transformer": {
                "sample_size": 128, "in_channels": 16, "out_channels": 16, "num_layers": 13,
                "num_attention_heads": 24, "attention_head_dim": 64, "joint_attention_dim": 4096,
                "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
            },
            "vae": {
                "latent_channels": 16, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
                "norm_num_groups": 32,
            },
            "text_encoder": {
                "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768, "num_attention_heads": 12,
            },
            "text_encoder_2": {
                "hidden_size": 1280, "intermediate_size": 5120, "projection_dim": 1280, "num_attention_heads": 20,
            },
            "text_encoder_3": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64},
        },
        "qwen_image": {  # 4 of its 60 layers
            "transformer": {
                "num_layers": 4, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584,
                "axes_dims_rope": (16, 56, 56),
            },
            "vae": {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
            "text_encoder": {
                "text_config": {
                    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
                },
                "vision_config": {"out_hidden_size": 3584},
            },
        },
    },
    side=512,
    tokens=256,
    num_steps=10,
    samples=16,
    batches=(4, 16),
    widths=(1, 2, 4, 0),
    update_batch=2,
    steps=4,
    blocks=5,
    width=2048,
    rounds=6,
    transports=("inline", "shared_memory", "safetensors", "collective"),
)  # fmt: skip
