"""Flow-DPPO (arXiv 2606.11025): a trust region in the divergence of the two policies instead of a clip on the ratio.

Without further keys these are the numbers of UniRL's recipe for SD3.5-medium. With one update per rollout the policies
are the same and nothing is ever dropped; it acts from `trainer.updates_per_rollout=2` on, or with stale samples.
"""

from __future__ import annotations

from typing import Literal

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.losses import DivergenceLoss, Loss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import AllButLast, Steps


class FlowDPPO(Algorithm):
    """Flow-SDE, all steps but the last, advantages by the group's unbiased std, rows beyond a divergence dropped."""

    name: Literal["flow-dppo"] = "flow-dppo"
    records: tuple[Literal["mean"], ...] = ("mean",)
    noise: Noise = FlowSDE(level=0.7)
    steps: Steps = AllButLast()
    advantage: GroupAdvantage = GroupAdvantage(std="unbiased", eps=1e-8)
    loss: Loss = DivergenceLoss(limit=1e-5)
