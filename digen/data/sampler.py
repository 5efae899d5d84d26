"""Which prompts a global step takes.

Invariant: a pure function of (seed, step), so that a resumed run needs no state and any number of workers agree; within
an epoch of its source no prompt comes twice; every step has exactly `prompts_per_step` different rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from digen.errors import DataError
from digen.types import Prompt


@dataclass(frozen=True, slots=True)
class StepPrompts:
    """The prompts of every global step, steps counted from 0.

    With `shuffle` every epoch has its own order. What does not fill a step sits out that epoch: 10 prompts, 4 a step,
    are 2 steps an epoch. Several sources have epochs of their own, and are spread evenly over a step, so that no part
    of it (its first micro-batches, which may be stale) is of one source alone. Raises DataError when there are fewer
    prompts than one step takes.
    """

    prompts: Sequence[Prompt]
    prompts_per_step: int
    shuffle: bool
    seed: int
    sources: tuple[tuple[int, int], ...] = ()
    """(its prompts, of which so many in a step) of each source, in the order of `prompts`; empty: they are one."""

    def __post_init__(self) -> None:
        if self.prompts_per_step > len(self.prompts):
            raise DataError(
                f"data.prompts_per_step: got {self.prompts_per_step}; allowed: 1 to {len(self.prompts)}, "
                "the number of prompts"
            )

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """`sources`, or the one that there is."""
        return self.sources or ((len(self.prompts), self.prompts_per_step),)

    @property
    def steps_per_epoch(self) -> int:
        """Global steps until every source was passed once."""
        return max(count // per_step for count, per_step in self.parts)

    def __call__(self, step: int) -> tuple[Prompt, ...]:
        placed: list[tuple[float, int, Prompt]] = []
        first = 0
        for source, (count, per_step) in enumerate(self.parts):
            epoch, place = divmod(step, count // per_step)
            rows = self._order(source, count, epoch)[place * per_step :][:per_step]
            placed += [((k + 0.5) / per_step, source, self.prompts[first + row]) for k, row in enumerate(rows)]
            first += count
        return tuple(prompt for *_, prompt in sorted(placed, key=lambda at: at[:2]))

    def num_steps(self, steps: int | None, epochs: int | None, per_rollout: int = 1) -> int:
        """Global steps of a run that ends at whichever limit comes first, in whole rollouts of `per_rollout` steps.

        Raises ValueError when there is no limit, DataError when not one rollout fits.
        """
        limits = [steps, None if epochs is None else epochs * self.steps_per_epoch]
        limit = min(limit for limit in limits if limit is not None)
        if limit < per_rollout:
            raise DataError(f"{limit} global steps are less than one rollout of {per_rollout} (updates_per_rollout)")
        return limit - limit % per_rollout

    def _order(self, source: int, count: int, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(count))
        digest = sha256(f"digen prompts {self.seed} {epoch}{f' {source}' if source else ''}".encode()).digest()
        # NumPy promises the raw words of a bit generator for ever, but not what permutation() makes of them.
        words = np.random.PCG64(int.from_bytes(digest, "big")).random_raw(count)
        order: list[int] = np.argsort(words, kind="stable").tolist()
        return order
