"""Flow-GRPO (arXiv 2505.05470): GRPO on the SDE form of a flow model, one group per prompt.

Without further keys `flowgrpo` is the recipe for SD3.5-medium with the OCR reward, `flowgrpo-nocfg` the same without
guidance, and `flowgrpo-fast` the project's fast one for the same model, which is meant to be run without guidance:
`sampling.guidance=1 sampling.eval_guidance=1`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import ClippedLoss, Loss
from digen.algos.sde import CPS, FlowSDE, Noise
from digen.algos.steps import AllButLast, Steps, Window


class FlowGRPO(Algorithm):
    """Flow-SDE, all steps but the last, advantages by the group's biased std, clipped loss with a KL to the base."""

    name: Literal["flowgrpo"] = "flowgrpo"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 24
    noise: Noise = FlowSDE(level=0.7)
    steps: Steps = AllButLast()
    advantage: GroupAdvantage = GroupAdvantage(std="biased", eps=1e-4)
    loss: Loss = ClippedLoss(clip=1e-4, kl=0.04, kl_kind="mean-over-g2")


class FlowNoCFG(FlowGRPO):
    """Flow-GRPO without classifier-free guidance, in training and evaluation: half the forwards; rewards replace it."""

    without_guidance: ClassVar[bool] = True

    name: Literal["flowgrpo-nocfg"] = "flowgrpo-nocfg"  # type: ignore[assignment]


class FlowCPS(FlowGRPO):
    """Flow-GRPO with CPS: samples stay clean; clip ranges are those of a log-prob without variance; no KL."""

    name: Literal["flowgrpo-cps"] = "flowgrpo-cps"  # type: ignore[assignment]
    noise: Noise = CPS(level=0.8)
    loss: Loss = ClippedLoss(clip=1e-5)


class FlowFast(FlowCPS):
    """Flow-GRPO-Fast: CPS on three neighbouring steps, the only ones that are noisy and trained; no KL."""

    name: Literal["flowgrpo-fast"] = "flowgrpo-fast"  # type: ignore[assignment]
    steps: Steps = Window(size=3)
