"""Wan2.1 text-to-video in the engine. Imported by the engine alone."""

from __future__ import annotations

from typing import Any

from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline

from digen.backends.generation.vllm_pipeline import Hosting
from digen.models.wan import Wan


class DigenWanPipeline(Hosting, Wan22Pipeline):  # type: ignore[misc]
    """Its transformer takes what diffusers' takes. Of the two that Wan2.2 has, Wan2.1 has one."""

    renamed = {  # noqa: RUF012
        "to_out": "to_out.0",
        "ffn.net_0.proj": "ffn.net.0.proj",
        "ffn.net_2": "ffn.net.2",
        "output_scale_shift_prepare": "",  # diffusers' transformer has this table itself
    }
    adapted = {  # noqa: RUF012
        "to_out.0": "to_out",
        "ffn.net.0.proj": "ffn.net_0.proj",
        "ffn.net.2": "ffn.net_2",
    }

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self.give_up_encoders()
        own: Any = self.transformer.config
        # The engine's own one takes other parts of its table where a head's size is not that of the published models.
        self.transformer.rope = WanRotaryPosEmbed(own.attention_head_dim, own.patch_size, own.rope_max_seq_len)
        if od_config.dtype != Wan.vae_dtype:  # the engine has rounded it
            kind: Any = type(self.vae)
            self.vae = kind.from_pretrained(od_config.model, subfolder="vae", torch_dtype=Wan.vae_dtype).to(self.device)
