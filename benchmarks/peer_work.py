"""The work of `peer_workload.py`: its checkpoint and rewards, its floor, and workers that count what they do.

Invariant: floor and digen's workers load the same files and count by the same hooks, on the transformer itself and on
the decoder, so that whoever did less would be seen.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from checkpoints import Sizes, build
from numpy.typing import NDArray

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.backends.worker import TorchWorker
from digen.engines.base import WorkerContext
from digen.rewards.jpeg import JpegCompressibility

PROMPTS, SAMPLES, STEPS, BATCH = 4, 8, 10, 8
"""Prompts of a step, samples of a prompt, denoising steps, samples of one of the floor's passes."""
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
THINGS = ("cat on a hill", "boat in the rain", "house by the sea", "robot at night")
REWARD_S = 0.05
"""What the slow reward waits for each image, as for an answer from elsewhere."""
CALLS = ("generate", "score", "accumulate", "hand_gradients", "add_gradients", "optimizer_step", "push", "pull")
"""What the driver asks of workers in a step."""
CLIP = {"hidden_size": 32, "intermediate_size": 64, "projection_dim": 32}
SIZES: Sizes = {
    "text_encoder": CLIP,
    "text_encoder_2": CLIP,
    "text_encoder_3": {"d_model": 64, "d_kv": 16, "d_ff": 128},
    "transformer": {
        "in_channels": 16,
        "out_channels": 16,
        "attention_head_dim": 32,
        "joint_attention_dim": 64,
        "caption_projection_dim": 128,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 64,
        "dual_attention_layers": (0, 1),
    },
    "vae": {"latent_channels": 16, "block_out_channels": (16, 32, 32, 32), "norm_num_groups": 8},
}
"""Where the model is larger than the miniature of its family."""


def write(folder: Path) -> None:
    """Write the checkpoint and `prompts.txt`."""
    build("sd3", SIZES, folder)
    lines = [f"a {colour} {thing}\n" for colour, thing in product(COLOURS, THINGS)]
    (folder / "prompts.txt").write_text("".join(lines))


def jpeg(media: NDArray[Any], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:
    """Minus the size of each image as a JPEG file, in kB."""
    return [500 * value for value in JpegCompressibility()(media, prompts, metadata)]


def slow_jpeg(media: NDArray[Any], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:
    """The same, from a service that takes its time."""
    time.sleep(REWARD_S * len(media))
    return jpeg(media, prompts, metadata)


class Counting(TorchWorker):
    """Counts what passes through the model, in any worker."""

    def load(self) -> None:
        super().load()
        self.counts: Counter[str] = Counter()
        self.cpu_s: Counter[str] = Counter()
        for name in CALLS:
            if hasattr(self, name):
                setattr(self, name, self.metered(name))
        self.tokens: set[int] = set()
        self.model.transformer.register_forward_pre_hook(self.passing, with_kwargs=True)
        self.model.pipeline.vae.decoder.register_forward_pre_hook(self.decoding)

    def metered(self, name: str) -> Any:
        """The method, whose processor time is added up."""
        method = getattr(self, name)

        def call(*given: Any) -> Any:
            began = time.process_time()
            try:
                return method(*given)
            finally:
                self.cpu_s[name] += time.process_time() - began

        return call

    def passing(self, module: Any, args: Any, given: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Before every forward pass of the transformer."""
        self.counts["trained" if torch.is_grad_enabled() else "generated"] += len(given["hidden_states"])
        self.tokens.add(given["encoder_hidden_states"].shape[1])

    def decoding(self, module: Any, args: tuple[torch.Tensor]) -> None:  # noqa: ARG002
        self.counts["decoded"] += len(args[0])

    def have_encoded(self, prompts: Sequence[str]) -> None:
        """Have the conditioning of these prompts in memory."""
        self.sampler.conditions.of(prompts)

    def totals(self) -> dict[str, Any]:
        """Sample-forwards so far, processor seconds of this process, tokens of a text, peak memory."""
        cpu_s = {**self.cpu_s, "all": time.process_time()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"counts": dict(self.counts), "cpu_s": cpu_s, "tokens": self.tokens, "peak_gib": peak}


class Generator(Counting, DiffusersGenerator):
    """digen's generator."""


class Trainer(Counting, LocalTrainer):
    """digen's trainer."""


class Floor(Trainer):
    """The same model, and nothing but its passes."""

    def __init__(self, given: Mapping[str, Any], context: WorkerContext) -> None:
        super().__init__(given["config"], context)
        self.trained, self.text_tokens = given["trained"], given["text_tokens"]

    def step(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        batches = PROMPTS * SAMPLES // BATCH
        with torch.no_grad():
            for _ in range(batches):
                for _ in range(STEPS):
                    latents = self.forward()
                self.model.pipeline.vae.decode(latents)
        for _ in range(batches * self.trained):
            self.forward().square().mean().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def forward(self) -> torch.Tensor:
        config = self.model.transformer_config
        output: tuple[torch.Tensor] = self.model.transformer(
            hidden_states=torch.randn(BATCH, *self.model.latent_shape),
            timestep=torch.full((BATCH,), 500.0),
            encoder_hidden_states=torch.randn(BATCH, 77 + self.text_tokens, config["joint_attention_dim"]),
            pooled_projections=torch.randn(BATCH, config["pooled_projection_dim"]),
            return_dict=False,
        )
        return output[0]
