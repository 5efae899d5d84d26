"""Pipelines that the engine's workers run: the engine's transformer and decoder inside digen's own loop.

Invariant: a pipeline computes no step, noise or log-prob itself; it hands the batch that the engine made to
`vllm_host.Host`. A family is a few lines: the engine's own pipeline with `Hosting` before it. Imported by the engine
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

from digen.backends.generation.vllm_host import AsDiffusers, Host


class Hosting:
    """Makes digen's samples with the parts that the pipeline beside it has loaded."""

    supports_request_batch = True
    supports_step_execution = False
    """A batch is one trajectory's weights from beginning to end; between steps other weights could come in."""
    packed: ClassVar[Mapping[str, Sequence[str]]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    }
    """The engine's module -> diffusers' modules that it is made of, in order."""
    renamed: ClassVar[Mapping[str, str]] = {"attn.to_out": "attn.to_out.0"}
    """Ends of the engine's module names, and what diffusers calls them."""
    adapted: ClassVar[Mapping[str, str]] = {}
    """Ends of diffusers' module names, and what adapters must call them in the engine."""

    transformer: nn.Module
    vae: nn.Module
    device: torch.device
    host: Host | None = None

    def give_up_encoders(self) -> None:
        """Conditioning comes with the requests: text encoders are neither filled nor moved to the device."""
        pipeline: Any = self
        for name in pipeline._encoder_modules:  # noqa: SLF001 - the engine's own list
            setattr(pipeline, name, None)
        pipeline.transformer.stacked_params_mapping = [  # else adapters do not find parts of packed modules
            (f".{whole}", f".{part}", letter)
            for whole, parts in self.packed.items()
            for part, letter in zip(parts, "qkv", strict=True)
        ]
        pipeline.weights_sources = [s for s in pipeline.weights_sources if s.subfolder == "transformer"]

    def begin(self, payload: Mapping[str, Any]) -> None:
        """What run the samples are for."""
        self.host = Host(payload, AsDiffusers(self.transformer, self.call), self.vae, str(self.device))

    def call(self, transformer: nn.Module, **inputs: Any) -> Any:
        """How the engine's transformer is called with what diffusers' would be called with."""
        return transformer(**inputs)

    def forward(self, req: Any) -> list[Any]:
        """One sample for each request of the batch; nothing for the engine's warm-up, which asks for none of ours."""
        wanted = [(params.extra_args or {}).get("digen") for params in req.sampling_params_list]
        ours = [each for each in wanted if each is not None]
        if self.host is None or len(ours) < len(wanted):
            return [DiffusionOutput(output=torch.zeros(1, 3, 8, 8)) for _ in wanted]
        return [_output(answer) for answer in self.host.serve(ours)]


def _output(answer: Mapping[str, Tensor]) -> Any:
    """As the engine passes it on: it makes pictures of `output`, and leaves the rest alone.

    Nobody looks at its pictures, so of an image it gets a row, and of a video a frame.
    """
    pixels = answer["media"].movedim(-1, 1)[:, :, :1].float() / 127.5 - 1
    on_cpu = {name: tensor.detach().cpu().clone() for name, tensor in answer.items()}  # views travel with all rows
    return DiffusionOutput(output=pixels.cpu(), trajectory_latents=on_cpu)


class DigenQwenImagePipeline(Hosting, QwenImagePipeline):  # type: ignore[misc]
    """Qwen-Image and models of its architecture."""

    adapted = {"attn.to_out.0": "attn.to_out"}  # noqa: RUF012

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self.give_up_encoders()

    def call(self, transformer: nn.Module, **inputs: Any) -> Any:
        """It wants to be told how long texts are, padding included."""
        rows, length = inputs["encoder_hidden_states"].shape[:2]
        return transformer(**inputs, txt_seq_lens=[length] * rows)
