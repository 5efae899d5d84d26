"""Which prompts a global step takes.

Invariant: a pure function of (seed, step), so that a resumed run needs no state and any number of workers agree; within
an epoch no prompt comes twice; every step has exactly `prompts_per_step` different rows of the prompt file.
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
    are 2 steps an epoch. Raises DataError when there are fewer prompts than one step takes.
    """

    prompts: Sequence[Prompt]
    prompts_per_step: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if self.prompts_per_step > len(self.prompts):
            raise DataError(
                f"data.prompts_per_step is {self.prompts_per_step}, but there are only {len(self.prompts)} prompts; "
                f"allowed: 1 to {len(self.prompts)}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.prompts) // self.prompts_per_step

    def __call__(self, step: int) -> tuple[Prompt, ...]:
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self._order(epoch)[place * self.prompts_per_step :][: self.prompts_per_step]
        return tuple(self.prompts[row] for row in rows)

    def num_steps(self, steps: int | None, epochs: int | None, per_rollout: int = 1) -> int:
        """Global steps of a run that ends at whichever limit comes first, in whole rollouts of `per_rollout` steps.

        Raises ValueError when there is no limit, DataError when not one rollout fits.
        """
        limits = [steps, None if epochs is None else epochs * self.steps_per_epoch]
        limit = min(limit for limit in limits if limit is not None)
        if limit < per_rollout:
            raise DataError(f"{limit} global steps are less than one rollout of {per_rollout} (updates_per_rollout)")
        return limit - limit % per_rollout

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.prompts)))
        digest = sha256(f"digen prompts {self.seed} {epoch}".encode()).digest()
        # NumPy promises the raw words of a bit generator for ever, but not what permutation() makes of them.
        words = np.random.PCG64(int.from_bytes(digest, "big")).random_raw(len(self.prompts))
        order: list[int] = np.argsort(words, kind="stable").tolist()
        return order
