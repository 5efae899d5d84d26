"""An algorithm of your own is one file: here leave-one-out advantages and a trust region instead of a clip.

    digen run examples/my_algorithm.py:MyAlgorithm algorithm.loss.limit=2e-3

It takes noise and steps from the built-in ones and knows nothing of models, workers or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from digen.algos.base import Advantage, Algorithm, LossInputs, LossTerms, PolicyLoss
from digen.algos.sde import FlowSDE, Noise
from digen.algos.steps import Steps, Window
from digen.config import Positive


class LeaveOneOut(Advantage):
    """A reward minus the mean of the group's other rewards, not divided by any std."""

    type: Literal["leave-one-out"] = "leave-one-out"

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        others = len(rewards) - 1
        return [sum(reward - other for other in rewards) / others for reward in rewards]


class TrustRegion(PolicyLoss):
    """-A r, with r = exp(new - old log-prob), dropped where r has moved by more than `limit` to where A pushes it."""

    type: Literal["trust-region"] = "trust-region"
    limit: Positive = 1e-3

    def __call__(self, inputs: LossInputs) -> LossTerms:
        ratio = (inputs.new_log_prob - inputs.old_log_prob).exp()
        outside = (ratio - 1) * inputs.advantage.sign() > self.limit
        loss = (-inputs.advantage * ratio).masked_fill(outside, 0.0)
        return LossTerms(loss, {"ratio": ratio.detach(), "clip_fraction": outside.to(ratio.dtype)})


class MyAlgorithm(Algorithm):
    """Flow-SDE noise on the first three steps, which are the trained ones."""

    name: Literal["my-algorithm"] = "my-algorithm"
    samples_per_prompt: int = 8
    noise: Noise = FlowSDE(level=1.0)
    steps: Steps = Window(size=3, low=0, high=3)
    advantage: LeaveOneOut = LeaveOneOut()
    loss: TrustRegion = TrustRegion()
