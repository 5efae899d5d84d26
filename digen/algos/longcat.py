"""LongCat-Video's GRPO (arXiv 2510.22200), for videos: one capped noisy step, steps of one weight, one std for all.

Without further keys this is GenRL's recipe for Wan2.1-1.3B but for its KL of weight 3e-4: the std, the largest of a
group's in the step, is known at its end and then scales the gradient, of which a KL would be a part. With
`advantage.scale=group` it can be had (`loss.kl=3e-4 loss.kl_kind=gaussian`). The clamp at 5 is no loss: by that std no
advantage is above sqrt(n - 1) in a group of n.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import ClippedLoss, Loss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import Steps, Window


class LongCat(Algorithm):
    """Flow-SDE capped at std 0.45 on one drawn step, advantages by the largest std of the step's groups, reweighted."""

    name: Literal["longcat"] = "longcat"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    same_initial_noise: bool = True
    noise: Noise = FlowSDE(level=1.0, max_std=0.45)
    steps: Steps = Window(size=1, low=0, high=6)
    advantage: GroupAdvantage = GroupAdvantage(std="biased", eps=1e-4, scale="max-group")
    loss: Loss = ClippedLoss(clip=1e-3, advantage_clip=None, reweight="step")
