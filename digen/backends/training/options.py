"""What the torch trainers have in common besides gradients: learning rate, optimizer, average of the weights.

Invariant: learning rate and average follow the number of the global step alone, whether or not the step's gradient was
applied; so a resumed run needs no state of theirs but the averaged tensors. The average never touches the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import cos, pi

import torch
from torch import Tensor

from digen.config import EmaConfig, TrainerConfig


def learning_rate(trainer: TrainerConfig, step: int, num_steps: int | None) -> float:
    """The learning rate of global step `step` (from 0) of a run of `num_steps`.

    (step + 1) / warmup_steps of the highest while it rises. Then, d being the share of the remaining steps that is
    done, 1 - d (linear) or (1 + cos(pi d)) / 2 (cosine): the full rate first, and more than 0 at the last step too.
    Raises ValueError when it must fall and nobody knows until when.
    """
    warm, highest = trainer.warmup_steps, trainer.learning_rate
    if step < warm:
        return highest * ((step + 1) / warm)
    if trainer.lr_schedule == "constant":
        return highest
    if num_steps is None:
        raise ValueError(f"trainer.lr_schedule={trainer.lr_schedule} needs the number of global steps of the run")
    done = min((step - warm) / max(num_steps - warm, 1), 1.0)
    return highest * (1 - done if trainer.lr_schedule == "linear" else (1 + cos(pi * done)) / 2)


def make_optimizer(trainer: TrainerConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the config names; what it needs has been looked for before any model was loaded."""
    c = trainer
    if c.optimizer == "sgd":
        return torch.optim.SGD(parameters, c.learning_rate, weight_decay=c.weight_decay)
    kind = import_module(f"{c.needs_package}.optim").AdamW8bit if c.needs_package else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(
        parameters, lr=c.learning_rate, betas=c.adam_betas, eps=c.adam_eps, weight_decay=c.weight_decay
    )
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For the coming step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao compiles its step for the tensor that is there
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Ema:
    """Exponential moving average of the trained weights, or of this rank's parts of them, in float32 at least.

    Starts as the weights are. After global step t it keeps min(decay, (1 + t) / (warmup_steps + t)) of itself and takes
    the rest from the weights (the warm-up of Flow-GRPO's and TensorFlow's averages, where warmup_steps is 10).
    """

    def __init__(self, config: EmaConfig, parts: Mapping[str, Tensor]) -> None:
        self.config = config
        self.parts = {
            name: part.detach().to(torch.promote_types(part.dtype, torch.float32), copy=True)
            for name, part in parts.items()
        }

    @torch.no_grad()
    def update(self, parts: Mapping[str, Tensor], step: int) -> None:
        """Follow the weights as they are after global step `step` (from 0)."""
        keep = min(self.config.decay, (1 + step) / (self.config.warmup_steps + step))
        for name, average in self.parts.items():
            average.lerp_(parts[name].to(average.dtype), 1 - keep)

    @torch.no_grad()
    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Go on from an average that was saved: this rank's parts of it."""
        for name, average in self.parts.items():
            average.copy_(parts[name])
