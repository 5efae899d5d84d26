"""One number per sample out of several rewards, or several for it to be made of later.

Invariant: a sample has a total exactly when every required reward of it has a value (rule R17), and within a group all
totals are of the same rewards: an optional one that failed for a sample counts for none of its group. Pure Python: the
driver's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from digen.config import RewardTerm
from digen.types import Scores

Part = tuple[float, tuple[float, ...]]
"""A reward's weight and its raw values for the samples of one group."""


def total(scores: Scores, terms: Mapping[str, RewardTerm], group_size: int = 1) -> tuple[float, ...]:
    """Sum over rewards of weight * raw value, per row in the order of `scores.values`; NaN where one of them failed.

    Values are not normalised before they are summed: weights carry the scales, e.g. 0.7 and 0.3.
    """
    return tuple(value for group in parts(scores, terms, group_size) for value in _sums(group))


def parts(scores: Scores, terms: Mapping[str, RewardTerm], group_size: int) -> list[list[Part]]:
    """The rewards that count in each group of so many rows; NaN among the values where a required one failed.

    A group of which every reward with a weight failed has them all, for it must not pass for one with a total of 0.
    """
    columns = [
        (terms[name], column) for name, column in zip(scores.names, zip(*scores.values, strict=True), strict=True)
    ]
    return [_counted(columns, slice(k, k + group_size)) for k in range(0, len(scores.rows), group_size)]


def optional(terms: Mapping[str, RewardTerm]) -> frozenset[str]:
    """Names of the rewards that a sample may lack."""
    return frozenset(name for name, term in terms.items() if not term.required)


def _counted(columns: Sequence[tuple[RewardTerm, tuple[float, ...]]], rows: slice) -> list[Part]:
    every = [(term, column[rows]) for term, column in columns]
    found = [(term.weight, values) for term, values in every if term.required or all(map(math.isfinite, values))]
    if any(weight for weight, _ in found) or not any(term.weight for term, _ in every):
        return found
    return [(term.weight, values) for term, values in every]


def _sums(group: Sequence[Part]) -> list[float]:
    weights = [weight for weight, _ in group]
    return [
        float(sum(w * v for w, v in zip(weights, row, strict=True)))
        for row in zip(*(values for _, values in group), strict=True)
    ]
