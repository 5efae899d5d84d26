"""From rewards to advantages and to what is trained: lines 13 and 14 of Algorithm 1. Pure.

Invariant: groups are found by their rows and judged on their own (rule R12); a group with a failed reward leaves as a
whole and changes no other group, nor the step's denominator (rules R11, R17). Paper sections 2.1 and 3.4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from digen import gather
from digen.algos.base import Algorithm
from digen.config import RunConfig
from digen.types import Prompt, Rollout, ScoredRollout, Scores


def credit(rollout: Rollout, rewards: Sequence[float], algorithm: Algorithm) -> ScoredRollout:
    """Advantages within each group, and what is trained of it. `rewards`: one per row, not finite where one failed."""
    advantages: list[float] = []
    keep: list[bool] = []
    size = rollout.microbatch.samples_per_prompt
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        whole = all(map(math.isfinite, group))
        advantages += algorithm.advantage(group) if whole else [0.0] * size
        keep += algorithm.select(advantages[start:]) if whole else [False] * size
    return ScoredRollout(rollout, tuple(rewards), tuple(advantages), tuple(keep))


def groups(scored: ScoredRollout) -> Iterator[tuple[Prompt, tuple[float, ...]]]:
    """(prompt, rewards of its samples) of every group of a micro-batch, in prompt order."""
    size = scored.rollout.microbatch.samples_per_prompt
    for index, prompt in enumerate(scored.rollout.microbatch.prompts):
        yield prompt, scored.rewards[index * size : (index + 1) * size]


def failures(rollout: Rollout, scores: Scores) -> list[str]:
    """A sentence for every single reward that failed: which, on what."""
    sentences = []
    for row, name in gather.failed(scores):
        prompt, sample = rollout.microbatch.identity(row)
        sentences.append(f"reward {name!r} failed for sample {sample} of prompt {prompt.id} ({prompt.text!r})")
    return sentences


def whole_groups(results: Iterable[ScoredRollout]) -> list[tuple[float, ...]]:
    """Rewards of the groups in which none failed."""
    return [rewards for scored in results for _, rewards in groups(scored) if all(map(math.isfinite, rewards))]


def denominator(config: RunConfig[Any], num_groups: int) -> float:
    """Z of the loss: (sample, timestep) pairs that the step trains if no group fails; fixed before it (rule R11)."""
    algorithm = config.algorithm
    num_trained: int = algorithm.steps.num_trained(config.sampling.num_steps)
    return float(num_groups * algorithm.kept_per_prompt() * num_trained)
