"""From log-probs and advantages to a loss per (sample, timestep) row. Paper section 2.1, equation 2.

Invariant: rows do not see each other, so their order and cut into batches cannot matter (rule R11); the KL to the base
carries gradient; all in the dtype of the log-probs, which is float32 or float64 (R9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from digen.algos.base import LossInputs, LossTerms, PolicyLoss, row_mean
from digen.config import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


class ClippedLoss(PolicyLoss):
    """max(-A r, -A clip(r, 1 - c, 1 + c)) + kl * KL(policy, base), with ratio r = exp(new - old log-prob)."""

    type: Literal["clipped"] = "clipped"
    clip: Positive = 1e-4
    """c. Log-probs are means over latents, so ratios stay within about 1e-3 of 1."""
    advantage_clip: Positive | None = 5.0
    """Advantages are clamped to +- this; None: not at all."""
    kl: NonNegative = 0.0
    """Weight of the KL; 0: no forward of the base is made."""
    kl_kind: Literal["mean-over-g2", "gaussian", "squared"] = "mean-over-g2"
    """What the KL is: a mean over latents, d the difference of the two means, std = g sqrt(h) that of the step.

    `mean-over-g2`: d^2 / (2 g^2), h is left out (Flow-GRPO for SD3, FLUX, Qwen-Image); `gaussian`: d^2 / (2 std^2), the
    KL of the two normal distributions (Flow-GRPO for Wan, GenRL); `squared`: d^2 (GenRL with CPS).
    """

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def is_proportional(self) -> bool:
        return self.advantage_clip is None and self.kl == 0

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss and statistics. Raises ValueError when the reference mean is needed and missing."""
        advantage, limit = inputs.advantage, self.advantage_clip
        if limit is not None:
            advantage = advantage.clamp(-limit, limit)
        log_ratio = inputs.new_log_prob - inputs.old_log_prob
        ratio = log_ratio.exp()
        loss = (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - self.clip, 1 + self.clip))
        stats = self._stats(log_ratio.detach(), ratio.detach()) | {"policy_loss": loss.detach()}
        if self.kl > 0:
            kl = self._kl(inputs)
            loss, stats["kl"] = loss + self.kl * kl, kl.detach()
        return LossTerms(loss, stats)

    def _stats(self, log_ratio: Tensor, ratio: Tensor) -> dict[str, Tensor]:
        high, low = ratio - 1 > self.clip, 1 - ratio > self.clip
        return {
            "ratio": ratio,
            "clip_fraction": (high | low).to(ratio.dtype),
            "clip_high": high.to(ratio.dtype),
            "clip_low": low.to(ratio.dtype),
            "approx_kl": log_ratio**2 / 2,
        }

    def _kl(self, inputs: LossInputs) -> Tensor:
        if inputs.reference_mean is None:
            raise ValueError(f"algorithm.loss.kl={self.kl} needs the mean under the base weights, which is missing")
        squared = (inputs.mean - inputs.reference_mean) ** 2
        if self.kl_kind == "squared":
            return row_mean(squared)
        variance = inputs.std**2 if self.kl_kind == "gaussian" else inputs.std**2 / inputs.at.h
        return row_mean(squared / (2 * variance))
