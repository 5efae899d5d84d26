"""Trainers and a reward for whole runs under test: the run folder gets what was trained on, with which gradient."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.fsdp import FsdpTrainer
from digen.backends.training.local import LocalTrainer
from digen.types import ScoredRollout


class Recorded:
    """Writes the first latents of every trained sample (a hash) and the gradient before every optimizer step."""

    config: Any
    context: Any

    def _file(self, name: str) -> Path:
        folder = Path(self.config.run_dir) / "recorded"
        folder.mkdir(exist_ok=True)
        return folder / name

    def accumulate(self, scored: ScoredRollout, *args: Any, **kwargs: Any) -> Any:
        microbatch = scored.rollout.microbatch
        if self.context.rank == 0:
            with self._file(f"samples-{self.context.group}.txt").open("a") as lines:
                for shard in filter(lambda s: s.rows, scored.rollout.shards):
                    tensors = self.context.store.get(shard.trajectory)
                    for k, row in enumerate(shard.rows):
                        if not scored.keep[row]:
                            continue
                        prompt, sample = microbatch.identity(row)
                        digest = hashlib.sha256(tensors["latents"][k, 0].numpy().tobytes()).hexdigest()
                        lines.write(f"{microbatch.step} {prompt.id} {sample} {scored.rollout.version} {digest}\n")
        return super().accumulate(scored, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, *args: Any) -> Any:
        gradients = self.gradients()  # type: ignore[attr-defined]
        if self.context.rank == 0:
            save_file(gradients, self._file(f"gradient-{self.version}.safetensors"))  # type: ignore[attr-defined]
        return super().optimizer_step(*args)  # type: ignore[misc]


class RecordedLocal(Recorded, LocalTrainer):
    """`local`, recorded."""


class RecordedGenerator(Recorded, DiffusersGenerator):
    """`diffusers`, recorded: what it trains for the trainer."""


class RecordedFsdp(Recorded, FsdpTrainer):
    """`fsdp`, recorded."""


def brightness(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """Mean brightness in steps of 0.01: one pixel that rounds the other way must not change a reward."""
    return [round(float(image.mean()) / 255, 2) for image in media]
