"""Dr. GRPO (arXiv 2503.20783) for flow models: a reward's distance from its group's mean, divided by no std.

Prompts on which all samples are nearly as good then weigh little, instead of as much as all others. Advantages keep the
unit of the reward, so they are not clamped, and the clip range is all that bounds a step.
"""

from __future__ import annotations

from typing import Literal

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import ClippedLoss, Loss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import AllButLast, Steps


class DrGRPO(Algorithm):
    """Flow-SDE, all steps but the last, advantages without any std, clipped loss without KL."""

    name: Literal["dr-grpo"] = "dr-grpo"
    noise: Noise = FlowSDE(level=0.7)
    steps: Steps = AllButLast()
    advantage: GroupAdvantage = GroupAdvantage(std="none")
    loss: Loss = ClippedLoss(clip=1e-4, advantage_clip=None)
