"""An average of policies that samples instead of the trained one, for algorithms that need no log-prob of how it did.

Invariant: what a loss compares with is what the rollout recorded of the policy that sampled, whichever that was.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from digen.algos.base import Algorithm
from digen.config import NonNegative, Section


class OldPolicyDecay(Section):
    """After k optimizer steps the policy that samples keeps min(rate (k - after), most) of itself (0 up to `after`)."""

    rate: NonNegative = 0.001
    """Per optimizer step."""
    after: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps up to which the trained policy itself samples."""
    most: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.5
    """The highest share."""

    def keeps(self, num_updates: int) -> float:
        """The share that it keeps when it follows after so many optimizer steps."""
        return min(self.rate * max(num_updates - self.after, 0), self.most)


class WithOldPolicy(Algorithm):
    """An algorithm in which another policy than the trained one may sample."""

    old_policy: OldPolicyDecay | None = None
    """How slowly the policy that samples follows the trained one, once a rollout; None: it is the trained one."""

    @property
    def has_old_policy(self) -> bool:
        return self.old_policy is not None

    def old_policy_keeps(self, num_updates: int) -> float:
        return self.old_policy.keeps(num_updates) if self.old_policy else 0.0

    def problems(self) -> list[str]:
        wrong = super().problems()
        if self.old_policy is not None and self.old_log_prob == "replay":
            wrong.append(
                "algorithm.old_log_prob=replay takes the trained policy for the one that sampled, which with "
                "algorithm.old_policy it is not; set algorithm.old_log_prob=rollout"
            )
        return wrong
