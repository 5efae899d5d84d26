"""One number per sample out of several rewards.

Invariant: a sample has a total exactly when every one of its rewards has a value (rule R17). Pure Python: the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping

from digen.config import RewardTerm
from digen.types import Scores


def total(scores: Scores, terms: Mapping[str, RewardTerm]) -> tuple[float, ...]:
    """Sum over rewards of weight * raw value, per row in the order of `scores.values`; NaN where one of them failed.

    Values are not normalised before they are summed: weights carry the scales, e.g. 0.7 and 0.3.
    """
    weights = [terms[name].weight for name in scores.names]
    return tuple(float(sum(w * v for w, v in zip(weights, row, strict=True))) for row in scores.values)
