"""MixGRPO (arXiv 2507.21802): noise and training within a window of steps that moves through the schedule.

Without further keys this is the recipe for FLUX.1-dev. Its other windows are `steps.order=random` (a position drawn for
every global step) and `steps.decay=0.1` (ever shorter stays beyond step 13). A window stays for a number of global
steps, which are optimizer steps: with `trainer.updates_per_rollout=4`, 25 rollouts are `steps.every=100`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import ClippedLoss, Loss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import MovingWindow, Steps


class MixGRPO(Algorithm):
    """Flow-SDE inside a moving window and no noise outside, advantages by the group's unbiased std, clipped loss."""

    name: Literal["mixgrpo"] = "mixgrpo"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 12
    same_initial_noise: bool = True
    noise: Noise = FlowSDE(level=0.7)
    steps: Steps = MovingWindow(size=4)
    advantage: GroupAdvantage = GroupAdvantage(std="unbiased", eps=1e-8)
    loss: Loss = ClippedLoss(clip=1e-4)
