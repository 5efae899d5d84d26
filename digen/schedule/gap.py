"""GAP: how a global step is cut into micro-batches, the units of the pipeline. Paper section 3.2.1.

Invariant: a micro-batch is whole prompt groups, so its advantages exist as soon as its last sample is scored. How a
group's samples spread over the ranks of a generator is `MicroBatch.rows`: any number of ranks fits any size of group.
"""

from __future__ import annotations

from collections.abc import Sequence

from digen.errors import DataError
from digen.types import MicroBatch, Prompt


def cut(
    step: int, prompts: Sequence[Prompt], samples_per_prompt: int, prompts_per_microbatch: int, seed: int
) -> tuple[MicroBatch, ...]:
    """The ceil(prompts / prompts_per_microbatch) micro-batches of a step, in prompt order; the last may be smaller.

    Raises DataError when the step has no prompt.
    """
    if not prompts:
        raise DataError(f"global step {step} was given no prompts; allowed: one or more")
    starts = range(0, len(prompts), prompts_per_microbatch)
    return tuple(
        MicroBatch(step, index, tuple(prompts[start : start + prompts_per_microbatch]), samples_per_prompt, seed)
        for index, start in enumerate(starts)
    )
