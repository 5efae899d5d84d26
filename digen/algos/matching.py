"""Learning on the forward process: clean samples are noised anew, and the velocity there is what a loss looks at.

Invariant: nothing of how a sample was made is needed but the sample, so sampling has no noise; the draws are the
sample's own (rule R8), at levels of the sampler's table. Everything else is as for steps with noise: the rollout keeps
rows of noised latents x = (1 - s) x0 + s e, "next" latents y = e - x0, which are the velocity that would lead back, and
the log-prob -mean (v - y)^2 of the policy that sampled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

from digen.algos.base import LossInputs, LossTerms, NoiseStrategy, PolicyLoss, Transition, row_mean
from digen.config import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

_ROOT: Final = math.pow(1e-10, 0.25)


class Matching(NoiseStrategy):
    """The mean is the velocity itself, and its log-prob how well it matches (AWM, DiffusionNFT)."""

    type: Literal["matching"] = "matching"
    weight: Literal["uniform", "t", "t2", "huber", "ghuber"] = "uniform"
    """Of l = mean (v - y)^2 at level t: l, t l, t^2 l, t l^(1/2), or 4 t l^(1/4); roots are smoothed near 0."""
    same_draws: bool = False
    """All samples of a group are noised with the same draws, as samples that are compared must be (DPO)."""

    @property
    def forward_process(self) -> bool:
        return True

    @property
    def draws_per_group(self) -> bool:
        return self.same_draws

    def mean_std(self, x: Tensor, v: Tensor, at: Transition) -> tuple[Tensor, Tensor]:
        """The velocity, and the level s in the place of a std."""
        return (v if x.element_size() > 4 else v.float()), at.sigma

    def log_prob(self, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        squared, t = row_mean((mean - y) ** 2), std.flatten()
        match self.weight:
            case "uniform":
                return -squared
            case "t":
                return -t * squared
            case "t2":
                return -t * t * squared
            case "huber":
                return -t * ((squared + 1e-10).sqrt() - 1e-5)
        return -4 * t * ((squared + 1e-10).pow(0.25) - _ROOT)


class NFTLoss(PolicyLoss):
    """DiffusionNFT: the velocity of a better policy and that of a worse one, each weighed by how good the sample is.

    p = 1/2 + A / (2 c) for A clamped to +- c; v+- = v_old +- beta (v - v_old); the loss is
    c (p f(v+) + (1 - p) f(v-)) / beta + kl mean (v - v_base)^2, with f the squared error of the clean latents that a
    velocity predicts, divided by its own mean absolute error (without gradient).
    """

    type: Literal["nft"] = "nft"
    beta: Positive = 1.0
    """How far v+ and v- lie from the old velocity; 1: v+ is the policy's. With several rewards recipes use 0.1."""
    advantage_clip: Positive = 5.0
    """c."""
    advantages: Literal["all", "positive-only", "negative-only", "one-only", "binary"] = "all"
    """Which ones count; `one-only` is 1 where the advantage is above 0, `binary` its sign."""
    kl: NonNegative = 1e-4
    """Weight of the distance from the base's velocity; 0: no forward of the base is made."""

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def needs_old_mean(self) -> bool:
        return True

    def problems(self, noise: NoiseStrategy) -> list[str]:
        return [] if noise.forward_process else [f"algorithm.loss.type=nft needs noise.type=matching, got {noise.type}"]

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss and statistics. Raises ValueError when the old or the base's velocity is needed and missing."""
        old, c = _given(inputs.old_mean, "at rollout"), self.advantage_clip
        moved, p = self.beta * (inputs.mean - old), self.share(inputs.advantage)
        better, worse = (self._error(old + step, inputs) for step in (moved, -moved))
        loss = c * (p * better + (1 - p) * worse) / self.beta
        log_ratio = (inputs.new_log_prob - inputs.old_log_prob).detach()
        stats = {"ratio": log_ratio.exp(), "approx_kl": log_ratio**2 / 2, "policy_loss": loss.detach()}
        stats["old_kl"] = row_mean((inputs.mean - old) ** 2).detach()
        if self.kl > 0:
            kl = row_mean((inputs.mean - _given(inputs.reference_mean, "under the base weights")) ** 2)
            loss, stats["kl"] = loss + self.kl * kl, kl.detach()
        return LossTerms(loss, stats)

    def share(self, advantage: Tensor) -> Tensor:
        """p, (N,), from 0 to 1: how much of a sample is taken for the better policy's."""
        c = self.advantage_clip
        match self.advantages:
            case "positive-only":
                advantage = advantage.clamp(0, c)
            case "negative-only":
                advantage = advantage.clamp(-c, 0)
            case "one-only":
                advantage = advantage.sign().clamp(0, 1)
            case "binary":
                advantage = advantage.sign()
        return 0.5 + advantage.clamp(-c, c) / (2 * c)

    def _error(self, velocity: Tensor, inputs: LossInputs) -> Tensor:
        """f: x - s v, less the clean latents, is s (y - v)."""
        off = inputs.at.sigma * (velocity - _given(inputs.next_latents, "that would lead back"))
        scale = row_mean(off.detach().double().abs()).clamp(min=1e-5)
        return row_mean(off**2) / scale.to(off.dtype)


def _given(velocity: Tensor | None, which: str) -> Tensor:
    if velocity is None:
        raise ValueError(f"the loss needs the velocity {which}, which is missing")
    return velocity
