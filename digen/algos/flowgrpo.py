"""Flow-GRPO (arXiv 2505.05470): GRPO on the SDE form of a flow model, one group per prompt.

Without further keys this is the recipe for SD3.5-medium with the OCR reward; its fast variant is
`steps.type=window noise.type=cps loss.clip=1e-5 loss.kl=0`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import ClippedLoss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import AllButLast, Steps


class FlowGRPO(Algorithm):
    """Flow-SDE, all steps but the last, advantages by the group's biased std, clipped loss with a KL to the base."""

    name: Literal["flowgrpo"] = "flowgrpo"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 24
    noise: Noise = FlowSDE(level=0.7)
    steps: Steps = AllButLast()
    advantage: GroupAdvantage = GroupAdvantage(std="biased", eps=1e-4)
    loss: ClippedLoss = ClippedLoss(clip=1e-4, kl=0.04, kl_kind="mean-over-g2")
