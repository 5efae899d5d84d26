"""Stable Diffusion 3.5 in the engine. Imported by the engine alone."""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline

from digen.backends.generation.vllm_pipeline import Hosting


class DigenSD3Pipeline(Hosting, StableDiffusion3Pipeline):  # type: ignore[misc]
    """Its transformer takes what diffusers' takes."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self.give_up_encoders()
