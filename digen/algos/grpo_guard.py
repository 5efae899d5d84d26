"""GRPO-Guard (arXiv 2510.22319): ratios that are centred at 1 and of one scale at all steps, so that the clip works.

Without further keys these are the numbers of verl-omni's recipe for Qwen-Image. For Flow-SDE alone. The rollout records
the mean of each trained step: half as much again in a trajectory.
"""

from __future__ import annotations

from typing import Literal

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import GuardLoss, Loss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import Steps, Window


class GRPOGuard(Algorithm):
    """Flow-SDE within a drawn window, advantages by the group's unbiased std, clip on normalised ratios."""

    name: Literal["grpo-guard"] = "grpo-guard"
    records: tuple[Literal["mean"], ...] = ("mean",)
    noise: Noise = FlowSDE(level=1.2)
    steps: Steps = Window(size=2)
    advantage: GroupAdvantage = GroupAdvantage(std="unbiased", eps=1e-4)
    loss: Loss = GuardLoss(clip=2e-6)
