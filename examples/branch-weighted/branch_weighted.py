"""Steps that decide more count more: each trained step is weighed by its noise, the room that it has to branch.

With Flow-SDE a step's noise is large where structure is decided and small where details are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from digen.algos.flowgrpo import FlowGRPO
from digen.algos.losses import ClippedLoss
from digen.config import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from digen.algos.base import LossInputs


class BranchWeighted(ClippedLoss):
    """The clipped loss, each row times (std / a step's typical std) ** power."""

    type: Literal["branch-weighted"] = "branch-weighted"  # type: ignore[assignment]
    power: NonNegative = 1.0
    typical_std: Positive = 0.2

    def policy(self, inputs: LossInputs, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = super().policy(inputs, advantage)
        return loss * (inputs.std.flatten() / self.typical_std) ** self.power, stats


class BranchWeightedGRPO(FlowGRPO):
    """Flow-GRPO without KL, its steps weighed by their noise."""

    name: Literal["branch-weighted"] = "branch-weighted"  # type: ignore[assignment]
    loss: BranchWeighted = BranchWeighted(clip=1e-3)  # type: ignore[assignment]
