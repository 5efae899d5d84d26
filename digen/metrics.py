"""One row of numbers for each global step. Pure: facts in, row out; docs/metrics.md explains every key.

Invariant: a number that was not measured in this step has no key (no KL without a KL term, no ratio when all groups
were dropped); nothing is reported as 0 because it is missing. A row does not depend on the order in which work ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from digen import credit
from digen.types import ScoredRollout, Scores, Stats, StepReport, Version

MEANS = ("ratio", "clip_fraction", "approx_kl", "old_kl", "kl", "loss", "pair_accuracy")


@dataclass(frozen=True, slots=True)
class StepFacts:
    """All that happened in one global step: `results` in micro-batch order, times in seconds.

    `due`: the version that its samples were due under; those of an older one are stale.

    `time_s` counts from the start of the run; `busy` is each worker group's share of `step_time_s`.
    """

    step: int
    due: Version
    results: Sequence[tuple[ScoredRollout, Scores]]
    stats: Stats
    report: StepReport
    time_s: float
    step_time_s: float
    busy: Mapping[str, float]


def step_row(facts: StepFacts) -> dict[str, float | int]:
    """The row of a global step; `version` is that of the weights after it."""
    return {
        "step": facts.step,
        "version": facts.step + 1,
        "time_s": facts.time_s,
        "step_time_s": facts.step_time_s,
        **dict(_samples(facts)),
        **dict(_rewards(facts)),
        **dict(_update(facts.stats)),
        "grad_norm": facts.report.grad_norm,
        "learning_rate": facts.report.learning_rate,
        "weight_delta": facts.report.weight_delta,
        "step_applied": int(facts.report.applied),
        **{f"busy/{name}": share for name, share in facts.busy.items()},
    }


def log_prob_complaint(step: int, stats: Stats, limit: float) -> str | None:
    """What is wrong when rollout and replay disagree about on-policy log-probs by more than `limit` (rule R10)."""
    gap = stats.get("log_prob_gap")
    if gap is None or gap.high <= limit:
        return None
    worst = {name: stat.high for name, stat in stats.items() if name.startswith("log_prob_gap/")}
    where = max(worst, key=worst.__getitem__, default="log_prob_gap/unknown step").partition("/")[2]
    return (
        f"step {step}: replayed and rollout log-probs differ by up to {gap.high:.3g}, most at {where}; "
        f"trainer.log_prob_gap allows {limit:g}"
    )


Entries = Iterator[tuple[str, float | int]]


def _samples(facts: StepFacts) -> Entries:
    results = [scored for scored, _ in facts.results]
    samples = sum(scored.rollout.microbatch.num_samples for scored in results)
    stale = sum(s.rollout.microbatch.num_samples for s in results if s.rollout.version < facts.due)
    num_groups = sum(len(scored.rollout.microbatch.prompts) for scored in results)
    yield "samples", samples
    yield "trained_samples", sum(sum(scored.keep) for scored in results)
    yield "groups_dropped", num_groups - len(credit.whole_groups(results))
    yield "stale_share", stale / samples


def _rewards(facts: StepFacts) -> Entries:
    results = [scored for scored, _ in facts.results]
    totals = [reward for scored in results for reward in scored.rewards]
    yield "reward/failed", sum(not math.isfinite(reward) for reward in totals)
    yield from _spread("reward", totals)
    if whole := credit.whole_groups(results):
        yield "reward/zero_std_share", fmean(min(rewards) == max(rewards) for rewards in whole)
    names = facts.results[0][1].names
    for j, name in enumerate(names):
        values = [row[j] for _, scores in facts.results for row in scores.values]
        yield from _spread(f"reward/{name}", values)
        if len(names) > 1:
            yield f"reward/{name}/failed", sum(not math.isfinite(value) for value in values)
            yield from _normalised(f"reward/{name}", facts.results, j)
    if kept := [abs(a) for s in results for a, keep in zip(s.advantages, s.keep, strict=True) if keep]:
        yield "advantage/abs_mean", fmean(kept)


def _normalised(name: str, results: Sequence[tuple[ScoredRollout, Scores]], j: int) -> Entries:
    """What reward j is worth within groups: its std there, and how its values go with the advantages trained on.

    Both are means over groups. The second is the correlation, -1 to 1, of the values in stds from the group's mean.
    """
    stds, pulls = [], []
    for scored, scores in results:
        size = scored.rollout.microbatch.samples_per_prompt
        for start in range(0, len(scored.rewards), size):
            values = np.array([row[j] for row in scores.values[start : start + size]])
            if not np.isfinite(values).all():
                continue
            stds.append(float(values.std()))
            advantages = np.array(scored.advantages[start : start + size])
            if values.std() > 0 and advantages.std() > 0:
                pulls.append(float(np.corrcoef(values, advantages)[0, 1]))
    if stds:
        yield f"{name}/group_std", fmean(stds)
    if pulls:
        yield f"{name}/pull", fmean(pulls)


def _spread(name: str, values: Sequence[float]) -> Entries:
    """Mean and population standard deviation of the finite ones."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        mean = fmean(finite)
        yield f"{name}/mean", mean
        yield f"{name}/std", math.sqrt(fmean((value - mean) ** 2 for value in finite))


def _update(stats: Stats) -> Entries:
    for name in MEANS:
        if name in stats:
            yield f"{name}/mean", stats[name].mean
    if "ratio" in stats:
        yield "ratio/low", stats["ratio"].low
        yield "ratio/high", stats["ratio"].high
    if "ratio_error" in stats:
        yield "ratio/max_error", stats["ratio_error"].high
    if "log_prob_gap" in stats:
        yield "log_prob_gap/max", stats["log_prob_gap"].high
    for name in sorted(stats, key=lambda n: (len(n), n)):  # step2 before step10
        if name.startswith("log_prob_gap/step"):
            yield name, stats[name].high
