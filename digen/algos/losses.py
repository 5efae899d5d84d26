"""From log-probs and advantages to a loss per (sample, timestep) row. Paper section 2.1, equation 2.

Invariant: rows do not see each other, so their order and cut into batches cannot matter (rule R11); the KL carries
gradient; all in the dtype of the log-probs, which is float32 or float64 (R9).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from digen.algos.base import LossInputs, LossTerms, NoiseStrategy, PolicyLoss, row_mean
from digen.algos.sde import noise_to_data
from digen.config import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


class RatioLoss(PolicyLoss):
    """A policy term in the ratio r = exp(new - old log-prob), and kl * KL; subclasses differ in the policy term."""

    advantage_clip: Positive | None = 5.0
    """Advantages are clamped to +- this; None: not at all."""
    kl: NonNegative = 0.0
    """Weight of the KL; 0: no forward of the base is made."""
    kl_kind: Literal["mean-over-g2", "gaussian", "squared", "log-ratio"] = "mean-over-g2"
    """What the KL is: a mean over latents, d the difference of the two means, std = g sqrt(h) that of the step.

    `mean-over-g2`: d^2 / (2 g^2), h is left out (Flow-GRPO for SD3, FLUX, Qwen-Image); `gaussian`: d^2 / (2 std^2), the
    KL of the two normal distributions (Flow-GRPO for Wan, GenRL); `squared`: d^2 (GenRL with CPS); `log-ratio`:
    (new - old log-prob)^2 / 2, for `kl_to=old` alone (MixGRPO).
    """
    kl_to: Literal["base", "old"] = "base"
    """From what the KL keeps near: the model as it came, or the policy that made the samples (no forward for it)."""

    @model_validator(mode="after")
    def _kl_has_a_source(self) -> RatioLoss:
        if self.kl_kind == "log-ratio" and self.kl_to == "base":
            raise ValueError("kl_kind=log-ratio compares with the recorded log-prob; allowed with kl_to=old only")
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0 and self.kl_to == "base"

    @property
    def needs_old_mean(self) -> bool:
        return self.kl > 0 and self.kl_to == "old" and self.kl_kind != "log-ratio"

    @property
    def is_proportional(self) -> bool:
        return self.advantage_clip is None and self.kl == 0

    def problems(self, noise: NoiseStrategy) -> list[str]:
        if noise.forward_process and self.kl > 0 and self.kl_kind in ("mean-over-g2", "gaussian"):
            lacks = f"algorithm.loss.kl_kind={self.kl_kind} divides by a step's noise, which matching does not have"
            return [f"{lacks}; allowed: squared (of velocities), log-ratio"]
        return []

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss and statistics. Raises ValueError when a mean is needed and missing."""
        advantage, limit = inputs.advantage, self.advantage_clip
        loss, stats = self.policy(inputs, advantage if limit is None else advantage.clamp(-limit, limit))
        log_ratio = (inputs.new_log_prob - inputs.old_log_prob).detach()
        stats |= {"approx_kl": log_ratio**2 / 2, "policy_loss": loss.detach()}
        if self.kl > 0:
            kl = self._kl(inputs)
            loss, stats["kl"] = loss + self.kl * self.kl_weight(inputs) * kl, kl.detach()
        return LossTerms(loss, stats)

    @abstractmethod
    def policy(self, inputs: LossInputs, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy term (N,) for advantages that are clamped already, and `ratio` and clip shares (N,), detached."""

    def kl_weight(self, inputs: LossInputs) -> Tensor | float:  # noqa: ARG002
        """A further factor on the KL, per row."""
        return 1.0

    def _kl(self, inputs: LossInputs) -> Tensor:
        if self.kl_kind == "log-ratio":
            return (inputs.new_log_prob - inputs.old_log_prob) ** 2 / 2
        other = inputs.reference_mean if self.kl_to == "base" else inputs.old_mean
        if other is None:
            whose = "under the base weights" if self.kl_to == "base" else "at rollout"
            raise ValueError(f"algorithm.loss.kl={self.kl} needs the mean {whose}, which is missing")
        squared = (inputs.mean - other) ** 2
        if self.kl_kind == "squared":
            return row_mean(squared)
        variance = inputs.std**2 if self.kl_kind == "gaussian" else inputs.std**2 / inputs.at.h
        return row_mean(squared / (2 * variance))


class ClippedLoss(RatioLoss):
    """max(-A r, -A clip(r, 1 - c, 1 + c)) + kl * KL (Flow-GRPO, DanceGRPO)."""

    type: Literal["clipped"] = "clipped"
    clip: Positive = 1e-4
    """c. Log-probs are means over latents, so ratios stay within about 1e-3 of 1."""
    reweight: Literal["none", "step"] = "none"
    """`step`: the policy term times w = sqrt(s / (1 - s)) / sqrt(h), and the KL times w^2 (LongCat).

    The gradient of Flow-SDE's log-prob by the velocity has the factor 1 / w, which favours some steps: w undoes it.
    """

    def problems(self, noise: NoiseStrategy) -> list[str]:
        if self.reweight == "none" or noise.type == "flow-sde":
            return super().problems(noise)
        lacks = f"algorithm.loss.reweight=step undoes a factor of flow-sde's log-prob, which {noise.type} does not have"
        return [f"{lacks}; set algorithm.loss.reweight=none, or algorithm.noise.type=flow-sde"]

    def policy(self, inputs: LossInputs, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.new_log_prob - inputs.old_log_prob).exp()
        loss = _clipped(ratio, advantage, self.clip)
        return (loss if self.reweight == "none" else loss * _step_weight(inputs)), _clip_stats(ratio, self.clip)

    def kl_weight(self, inputs: LossInputs) -> Tensor | float:
        return 1.0 if self.reweight == "none" else _step_weight(inputs) ** 2


class GuardLoss(RatioLoss):
    """The clipped loss with log r = (new - old log-prob + b) std, divided by h (GRPO-Guard).

    b = mean (mu - mu_old)^2 / (2 std^2) takes away what makes ratios smaller than 1 on average, so that the clip acts
    on both sides; std = g sqrt(h) gives the ratios of all steps one scale, and 1 / h their gradients.
    """

    type: Literal["guard"] = "guard"
    clip: Positive = 2e-6
    """c, for ratios that have been brought to one scale: smaller than without."""

    @property
    def needs_old_mean(self) -> bool:
        return True

    def problems(self, noise: NoiseStrategy) -> list[str]:
        if noise.type == "flow-sde":
            return []
        got = f"algorithm.loss.type=guard is defined for flow-sde, got algorithm.noise.type={noise.type}"
        reason = "no published result or code says what its scale and its correction are for another step"
        return [f"{got}: {reason}; allowed: flow-sde"]

    def policy(self, inputs: LossInputs, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = inputs.new_log_prob - inputs.old_log_prob + _divergence(inputs)
        ratio = (log_ratio * inputs.std.flatten()).exp()
        return _clipped(ratio, advantage, self.clip) / inputs.at.h.flatten(), _clip_stats(ratio, self.clip)


class DivergenceLoss(RatioLoss):
    """-A r, dropped where the policy has gone further than `limit` and A pushes it on in that direction (Flow-DPPO).

    How far is measured by the KL of the two normal distributions, mean (mu - mu_old)^2 / (2 std^2), not by one sample's
    ratio: (r - 1) A > 0 says only whether it is pushed on or back.
    """

    type: Literal["divergence"] = "divergence"
    limit: Positive = 1e-5
    """The KL, in nats per latent dimension, from which on a row is dropped (tau)."""
    advantage_clip: Positive | None = None

    @property
    def needs_old_mean(self) -> bool:
        return True

    def policy(self, inputs: LossInputs, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, far = (inputs.new_log_prob - inputs.old_log_prob).exp(), _divergence(inputs).detach()
        dropped = (far >= self.limit) & ((ratio - 1) * advantage > 0)
        loss = (-advantage * ratio).masked_fill(dropped, 0.0)
        return loss, {"ratio": ratio.detach(), "clip_fraction": dropped.to(ratio.dtype), "old_kl": far}


Loss = Annotated[ClippedLoss | GuardLoss | DivergenceLoss, Field(discriminator="type")]
"""Any of the built-in losses, chosen by `type`."""


def _clipped(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    return (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - clip, 1 + clip))


def _clip_stats(ratio: Tensor, clip: float) -> dict[str, Tensor]:
    ratio = ratio.detach()
    high, low = ratio - 1 > clip, 1 - ratio > clip
    shares = {"clip_fraction": high | low, "clip_high": high, "clip_low": low}
    return {"ratio": ratio, **{name: share.to(ratio.dtype) for name, share in shares.items()}}


def _step_weight(inputs: LossInputs) -> Tensor:
    """Sqrt(s / (1 - s)) / sqrt(h), (N,)."""
    return (noise_to_data(inputs.at) / inputs.at.h.sqrt()).flatten()


def _divergence(inputs: LossInputs) -> Tensor:
    """KL (N,) of the two normal distributions of a step, now against rollout, as a mean over latents."""
    if inputs.old_mean is None:
        raise ValueError("the loss needs the mean at rollout, which is missing: set algorithm.records=[mean]")
    return row_mean((inputs.mean - inputs.old_mean) ** 2 / (2 * inputs.std**2))
