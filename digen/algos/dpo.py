"""Online DPO on flow models (Diffusion-DPO, arXiv 2311.12908): of every group the best sample against the worst.

The policy is to match the velocity that leads back to the better sample more closely than the base does, by more than
it does so for the worse one. Both are noised anew with the same draws at the same levels, so that what differs is the
sample. beta is that of verl-omni and Flow-Factory; three of ten levels, since each costs the rollout one more forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from digen.algos.base import Advantage, Algorithm, BestOfN, LossInputs, LossTerms, NoiseStrategy, PolicyLoss, row_mean
from digen.algos.matching import Matching
from digen.algos.steps import RandomFraction, Steps
from digen.config import Positive
from digen.errors import RewardError

if TYPE_CHECKING:
    from torch import Tensor


class BestAgainstWorst(Advantage):
    """1 for the best sample of a group, -1 for the worst, 0 for the others; of equals the first counts.

    How much better a sample is does not matter, so that rewards may have any unit.
    """

    type: Literal["best-worst"] = "best-worst"

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group, all 0 where all rewards are equal. Raises RewardError for one that is not finite."""
        values = list(rewards)
        for sample, value in enumerate(values):
            if not abs(value) < float("inf"):
                raise RewardError(f"advantages need finite rewards, got {value} for sample {sample} of {len(values)}")
        best, worst = values.index(max(values)), values.index(min(values))
        return [float((k == best) - (k == worst)) for k in range(len(values))]


class DPOLoss(PolicyLoss):
    """-log sigmoid(beta / 2 (gain of the better one - gain of the worse one)), in both rows of a pair.

    The gain of a sample is by how much the policy's velocity matches better than the base's: the base's mean squared
    distance from the velocity that leads back to the sample, less the policy's. The mean over rows is that over pairs.
    """

    type: Literal["dpo"] = "dpo"
    beta: Positive = 2000.0
    """How strongly the policy is held to the base: the pull fades where beta / 2 times the gains' distance is large."""

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def rows_together(self) -> int:
        return 2

    def problems(self, noise: NoiseStrategy) -> list[str]:
        if not noise.forward_process:
            return [f"algorithm.loss.type=dpo needs noise.type=matching, got {noise.type}"]
        weight = getattr(noise, "weight", "uniform")
        return [] if weight == "uniform" else [f"algorithm.loss.type=dpo needs noise.weight=uniform, got {weight}"]

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Loss and statistics. Raises ValueError when the base's velocity, or the row to compare with, is missing."""
        if inputs.reference_mean is None or inputs.partner is None:
            raise ValueError("the loss needs the velocity under the base weights and pairs of rows, which are missing")
        gain = self._error(inputs.reference_mean, inputs) - self._error(inputs.mean, inputs)
        margin = self.beta / 2 * inputs.advantage * (gain - gain[inputs.partner])
        loss = (-margin).logaddexp(margin.new_zeros(()))
        log_ratio = (inputs.new_log_prob - inputs.old_log_prob).detach()
        stats = {"ratio": log_ratio.exp(), "approx_kl": log_ratio**2 / 2, "policy_loss": loss.detach()}
        return LossTerms(loss, {**stats, "pair_accuracy": (margin.detach() > 0).to(loss.dtype)})

    def _error(self, velocity: Tensor, inputs: LossInputs) -> Tensor:
        if inputs.next_latents is None:
            raise ValueError("the loss needs the velocity that would lead back, which is missing")
        return row_mean((velocity - inputs.next_latents) ** 2)


class DPO(Algorithm):
    """No noise in sampling, three of ten levels drawn per group, the best sample of a group against the worst."""

    name: Literal["dpo"] = "dpo"
    best_of_n: BestOfN | None = BestOfN(best=1, worst=1)
    noise: Matching = Matching(same_draws=True)
    steps: Steps = RandomFraction(fraction=0.3, per_sample=False)
    advantage: BestAgainstWorst = BestAgainstWorst()
    loss: DPOLoss = DPOLoss()
