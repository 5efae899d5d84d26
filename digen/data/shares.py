"""How many prompts of a step come from each of several sources.

Invariant: whole prompts, as near to the shares that are asked for as they can be, and at least one from each.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import Any

from digen.errors import DataError

Shares = Mapping[Any, float]
"""Source -> share, of any scale."""


def counts_of(shares: Shares, prompts_per_step: int) -> list[int]:
    """Prompts of a step by source: the shares of it rounded by largest remainder, each at least 1.

    Raises DataError when there are more sources than prompts in a step.
    """
    if len(shares) > prompts_per_step:
        raise DataError(
            f"data.prompts_per_step: got {prompts_per_step}; allowed: {len(shares)} or more, the number of sources"
        )
    weights = list(map(_exact, shares.values()))
    exact = [prompts_per_step * weight / sum(weights) for weight in weights]
    counts = [max(floor(quota), 1) for quota in exact]

    def short_by(k: int) -> Fraction:
        return exact[k] - counts[k]

    while sum(counts) < prompts_per_step:
        counts[max(range(len(counts)), key=short_by)] += 1
    while sum(counts) > prompts_per_step:
        counts[min((k for k, count in enumerate(counts) if count > 1), key=short_by)] -= 1
    return counts


def rounded_shares(shares: Shares, prompts_per_step: int) -> str | None:
    """What the shares are and what whole prompts make of them, where that is not the same."""
    if len(shares) > prompts_per_step:
        return None  # which is refused elsewhere
    counts = counts_of(shares, prompts_per_step)
    total = sum(map(_exact, shares.values()))
    if all(
        _exact(share) * prompts_per_step == count * total for share, count in zip(shares.values(), counts, strict=True)
    ):
        return None
    asked, taken = " : ".join(f"{share:g}" for share in shares.values()), " : ".join(map(str, counts))
    return f"data.prompts asks for {asked}; of the {prompts_per_step} prompts of a step it is {taken}"


def _exact(share: float) -> Fraction:
    """The number as it was written: 0.1 is a tenth."""
    return Fraction(str(share))
