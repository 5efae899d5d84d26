"""DanceGRPO (arXiv 2505.07818): constant noise, shared initial latents, a random share of the steps trained per sample.

Without further keys this is the recipe for FLUX.1-dev; the one for HunyuanVideo is
`samples_per_prompt=24 noise.level=0.25 best_of_n.best=4 best_of_n.worst=4`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import ClippedLoss, Loss
from digen.algos.sde import DanceSDE, Noise
from digen.algos.steps import RandomFraction, Steps


class DanceGRPO(Algorithm):
    """Dance-SDE, 60 % of the steps but the last, advantages by the group's unbiased std, clipped loss without KL."""

    name: Literal["dancegrpo"] = "dancegrpo"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 12
    same_initial_noise: bool = True
    decode: Literal["sample", "clean"] = "clean"
    noise: Noise = DanceSDE(level=0.3)
    steps: Steps = RandomFraction(fraction=0.6, of="all-but-last")
    advantage: GroupAdvantage = GroupAdvantage(std="unbiased", eps=1e-8)
    loss: Loss = ClippedLoss(clip=1e-4)
