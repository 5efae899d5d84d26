"""From rewards to advantages, within a group. Paper section 2.1, equation 1.

Invariant: a group whose rewards are all equal has advantages of exactly 0; nothing that is not finite gets in. Dividing
by the std of the whole batch, or by the largest of its groups' stds, would make the first update wait for the step's
last reward; it is had exactly, without waiting, by scaling the summed gradient instead (rule R12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from digen.algos.base import Advantage
from digen.config import Positive
from digen.errors import RewardError


class GroupAdvantage(Advantage):
    """(reward - mean of the group) / (std + eps), in float64."""

    type: Literal["group"] = "group"
    std: Literal["biased", "unbiased", "none"] = "biased"
    """Divisor n (Flow-GRPO), n - 1 (DanceGRPO), or no division at all (Dr.GRPO)."""
    eps: Positive = 1e-4
    """Added to the std, in units of the reward."""
    scale: Literal["group", "batch", "max-group"] = "group"
    """Whose std: the group's; that of all rewards of the global step; or the largest std of its groups (LongCat).

    Other than the group's, it is applied to the step's gradient.
    """

    @model_validator(mode="after")
    def _scale_has_std(self) -> GroupAdvantage:
        if self.scale != "group" and self.std == "none":
            raise ValueError(f"scale={self.scale} divides by a std of the batch; std=none allows scale=group only")
        return self

    @property
    def needs_gradient_scale(self) -> bool:
        return self.scale != "group"

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group. Raises RewardError for a reward that is not finite: such a group must be dropped."""
        values = _finite(rewards)
        if values.min() == values.max():
            return [0.0] * len(values)
        centred = values - values.mean()
        if self.std == "none" or self.needs_gradient_scale:
            return _floats(centred)
        return _floats(centred / (self._std(values) + self.eps))

    def gradient_scale(self, rewards: Sequence[Sequence[float]]) -> float:
        """1 / (std + eps) with the std of all these rewards, or the largest of a group's; 1 with `scale=group`."""
        values = _finite([reward for group in rewards for reward in group])
        if self.scale == "group" or len(values) == 0:
            return 1.0
        largest = self.scale == "max-group"
        std = max(self._std(np.asarray(group, np.float64)) for group in rewards) if largest else self._std(values)
        return 1.0 / (std + self.eps)

    def _std(self, values: npt.NDArray[np.float64]) -> float:
        return float(values.std(ddof=1 if self.std == "unbiased" else 0))


def _finite(rewards: Sequence[float]) -> npt.NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise RewardError(f"advantages need finite rewards, got {values[bad[0]]} for sample {bad[0]} of {len(values)}")
    return values


def _floats(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values]
