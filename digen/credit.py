"""From rewards to advantages and to what is trained: lines 13 and 14 of Algorithm 1. Pure.

Invariant: groups are found by their rows and judged on their own (rule R12); a group with a failed reward leaves as a
whole and changes no other group, nor the step's denominator (rules R11, R17). Paper sections 2.1 and 3.4.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from digen import gather
from digen.algos.base import Algorithm
from digen.config import RunConfig
from digen.rewards.total import Part
from digen.rewards.total import parts as parts_of
from digen.types import Prompt, Rollout, ScoredRollout, Scores


def credit(
    rollout: Rollout, rewards: Sequence[float], algorithm: Algorithm, parts: Sequence[Sequence[Part]] = ()
) -> ScoredRollout:
    """Advantages within each group, and what is trained of it. `rewards`: one per row, not finite where one failed.

    `parts`: the single rewards of each group, whose own advantages are then weighted and summed.
    """
    advantages: list[float] = []
    keep: list[bool] = []
    size = rollout.microbatch.samples_per_prompt
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        whole = all(map(math.isfinite, group))
        single = parts[start // size] if parts else [(1.0, tuple(group))]
        advantages += _summed(algorithm, single) if whole else [0.0] * size
        keep += algorithm.select(advantages[start:]) if whole else [False] * size
    return ScoredRollout(rollout, tuple(rewards), tuple(advantages), tuple(keep))


def _summed(algorithm: Algorithm, parts: Sequence[Part]) -> list[float]:
    """Sum over rewards of weight * advantage, one per sample of the group."""
    own = [[weight * value for value in algorithm.advantage(values)] for weight, values in parts]
    return own[0] if len(own) == 1 else [math.fsum(column) for column in zip(*own, strict=True)]


def parts(config: RunConfig[Any], scores: Scores) -> Sequence[Sequence[Part]]:
    """What `credit` wants to know of single rewards: nothing where raw ones are summed (`scoring.combine`)."""
    if config.scoring.combine == "rewards":
        return ()
    return parts_of(scores, config.reward, config.algorithm.samples_per_prompt)


def gradient_scale(config: RunConfig[Any], results: Sequence[ScoredRollout]) -> float:
    """Factor on the step's summed gradient (rule R12).

    GDPO: 1 / (std + eps) of the summed advantages of the step, whose mean is 0 in every group and so in all of them.
    """
    advantage, combine = config.algorithm.advantage, config.scoring.combine
    if not (whole := whole_groups(results)):
        return 1.0
    if combine == "gdpo":
        summed = [values for scored in results for values in _whole_advantages(scored)]
        return float(advantage.model_copy(update={"scale": "batch"}).gradient_scale(summed))
    return float(advantage.gradient_scale(whole))


def _whole_advantages(scored: ScoredRollout) -> Iterator[tuple[float, ...]]:
    """Advantages of each group in which no reward failed."""
    size = scored.rollout.microbatch.samples_per_prompt
    for start in range(0, len(scored.rewards), size):
        if all(map(math.isfinite, scored.rewards[start : start + size])):
            yield scored.advantages[start : start + size]


def groups(scored: ScoredRollout) -> Iterator[tuple[Prompt, tuple[float, ...]]]:
    """(prompt, rewards of its samples) of every group of a micro-batch, in prompt order."""
    size = scored.rollout.microbatch.samples_per_prompt
    for index, prompt in enumerate(scored.rollout.microbatch.prompts):
        yield prompt, scored.rewards[index * size : (index + 1) * size]


def failures(rollout: Rollout, scores: Scores, optional: Collection[str] = ()) -> list[str]:
    """A sentence for every single reward that failed, but for optional ones: which, on what."""
    sentences = []
    for row, name in gather.failed(scores):
        if name in optional:
            continue
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
