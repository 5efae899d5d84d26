"""Advantage-weighted matching (arXiv 2509.25050): the pretraining loss on own samples, weighed by their advantages.

Without further keys these are Flow-Factory's numbers, six levels out of ten for every sample, but without its KL to an
average of the weights: `old_policy` with `loss.kl` and `loss.kl_to=old` is one to an average, which then samples too.
Sampling has no noise and takes any number of steps; each trained level costs the rollout one more forward, for the
ratio.
"""

from __future__ import annotations

from typing import Literal

from digen.algos.advantages import GroupAdvantage
from digen.algos.losses import ClippedLoss
from digen.algos.matching import Matching
from digen.algos.old_policy import WithOldPolicy
from digen.algos.steps import RandomFraction, Steps


class AWM(WithOldPolicy):
    """No noise in sampling, six of ten levels drawn per sample, advantages by the group's std, clipped ratio."""

    name: Literal["awm"] = "awm"
    noise: Matching = Matching()
    steps: Steps = RandomFraction(fraction=0.6)
    advantage: GroupAdvantage = GroupAdvantage(std="biased", eps=1e-6)
    loss: ClippedLoss = ClippedLoss(clip=1.0, advantage_clip=1.0, kl_kind="squared")
