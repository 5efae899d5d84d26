"""What a run's own numbers say about its health: one pure function for each thing that can be wrong.

Invariant: a check reads what was measured and what was set, never a model; it answers with a level, the numbers that it
saw and what to do about them. A number that was not measured is `unknown`, never a pass. Thresholds are named below;
docs/doctor.md says where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final, Literal, TypeAlias

from digen.config import RunConfig
from digen.observe.base import StepRow
from digen.types import Span

Level: TypeAlias = Literal["ok", "note", "unknown", "warn", "wrong"]
"""note: nothing is wrong, but it is often misread; warn: it trains, worse than it could; wrong: it does not train."""

RATIO_ERROR: Final = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 1e-2}
"""Largest abs(ratio - 1) before an update that rounding explains, by the dtype of the forward pass."""
RECENT: Final = 10
"""Steps at the end of a run that speak for its present state."""
FEW_GROUPS: Final = 0.5
"""Share of groups without any difference in reward from which on most of the work is for nothing."""
SAME_PIXELS: Final = 0.5
"""Mean difference of pixel values (0..255) below which two samples are the same picture."""
DOMINANT: Final = 0.95
"""Share of the reward's variance from which on the other rewards do not count."""
SMALL_ADVANTAGE: Final = 0.02
HALF_STEP, NO_STEP = 0.5, 0.05
"""Parts of trainer.learning_rate that Adam's eps may leave of a step."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of a run: its settings, its rows in order, its spans, and how many numbers it trains."""

    config: RunConfig[Any]
    rows: Sequence[StepRow]
    spans: Sequence[Span] = ()
    num_weights: int | None = None

    def values(self, key: str, last: int | None = None) -> list[float]:
        """A metric's finite values by step, of all steps or of the last so many."""
        rows = self.rows if last is None else self.rows[-last:]
        found = [row.get(key) for row in rows]
        return [float(value) for value in found if value is not None and math.isfinite(value)]

    @property
    def ratio_limit(self) -> float:
        dtypes = (self.config.generator.dtype, self.config.trainer.dtype)
        return max(RATIO_ERROR[dtype] for dtype in dtypes)

    @property
    def loss(self) -> Any:
        return self.config.algorithm.loss


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw, and what to do where that is not as it should be."""

    check: str
    level: Level
    found: str
    advice: str = ""


def examine(facts: Facts) -> list[Finding]:
    """All checks, in the order in which causes come before effects."""
    return [finding for check in CHECKS for finding in check(facts)]


Check = Callable[[Facts], Iterator[Finding]]


def ratio_is_one(facts: Facts) -> Iterator[Finding]:
    """Before the first update the policy is the one that made the samples."""
    name, limit = "ratio before update", facts.ratio_limit
    errors = facts.values("ratio/max_error")
    gaps = facts.values("log_prob_gap/max")
    if not errors:
        yield Finding(name, "unknown", "no on-policy sample was trained", "see `groups_dropped` in metrics.jsonl")
        return
    error = max(errors[0], gaps[0] if gaps else 0.0)  # with old_log_prob=replay the ratio cannot show it
    found = f"largest abs(ratio - 1) {error:.2g} in the first step, rounding explains {limit:g}"
    if error <= limit:
        yield Finding(name, "ok", found)
        return
    steps = {key: value for key, value in facts.rows[0].items() if key.startswith("log_prob_gap/step")}
    worst = max(steps, key=lambda key: steps[key] or 0.0, default="")
    where = f", most at denoising {worst.partition('/')[2]}" if worst else ""
    advice = (
        "replaying a stored step does not give the log-prob that sampling gave it: same dtype and attention on both "
        "sides? A model plugin whose velocity depends on its neighbours in the batch, or has dropout, does this"
    )
    yield Finding(name, "wrong", found + where, advice)


def sync_has_effect(facts: Facts) -> Iterator[Finding]:
    """Weights change, and generators sample with the changed ones."""
    name, applied = "weights and sync", [row.get("step_applied") for row in facts.rows]
    deltas = facts.values("weight_delta")
    if not facts.rows:
        yield Finding(name, "unknown", "no step has ended yet")
    elif not any(applied) or not any(deltas):
        advice = "no gradient: see the rewards below; else nothing is trainable (trainer.lora.target_modules)"
        yield Finding(name, "wrong", f"none of {len(facts.rows)} steps changed the weights", advice)
    elif problem := _not_arrived(facts):
        yield Finding(name, "wrong", *problem)
    elif skipped := applied.count(0):
        advice = "zero gradients: rewards without differences; non-finite ones: lower trainer.learning_rate"
        yield Finding(name, "warn", f"{skipped} of {len(applied)} steps were not applied", advice)
    elif len(facts.rows) == 1:
        yield Finding(name, "unknown", "one step has ended; whether its weights arrived shows in the next")
    else:
        yield Finding(name, "ok", f"changes of {min(deltas):.2g} to {max(deltas):.2g}, and the next samples show them")


def _not_arrived(facts: Facts) -> tuple[str, str] | None:
    later = [row.get("ratio/max_error") for row in facts.rows[1:]]
    errors = [error for error in later if error is not None]
    if errors and max(errors) > max(facts.ratio_limit, 10 * (facts.rows[0].get("ratio/max_error") or 0.0)):
        found = f"abs(ratio - 1) of on-policy samples grows to {max(errors):.2g} after the first step"
        return found, "generators sample with other weights than the trainer has: the weight transport or a backend"
    pulled = {span.version for span in facts.spans if span.kind == "pull"}
    updates = facts.config.trainer.updates_per_rollout
    if facts.spans and facts.config.schedule.mode != "colocated" and len(facts.rows) > updates and not pulled:
        return "no generator ever took new weights", "events.jsonl has no `pull`: a generator backend without it?"
    return None


def groups_differ(facts: Facts) -> Iterator[Finding]:
    """Advantages come from differences in a group: without them there is nothing to learn."""
    name, shares = "groups differ", facts.values("reward/zero_std_share", RECENT)
    if not shares:
        yield Finding(name, "unknown", "no group had all its rewards", "see `reward/failed` in metrics.jsonl")
        return
    share = fmean(shares)
    found = f"{share:.0%} of the groups of the last {len(shares)} steps have one reward for all samples"
    if share == 1:
        advice = "a reward that can be had in parts (not 0 or 1), easier prompts, more noise (algorithm.noise.level)"
        yield Finding(name, "wrong", found, advice)
    elif share > FEW_GROUPS:
        advice = "larger groups (algorithm.samples_per_prompt), prompts that are neither too easy nor too hard"
        yield Finding(name, "warn", found, advice)
    else:
        yield Finding(name, "ok", found)


def samples_differ(facts: Facts) -> Iterator[Finding]:
    """The samples of a group are not one picture."""
    name, advice = "samples differ", "collapsed or without noise: algorithm.noise.level, same_initial_noise"
    if distances := facts.values("reward/spread/mean", RECENT):
        found = f"the nearest other sample of a prompt is {distances[-1]:.3g} of 255 away"
        yield Finding(name, *(("ok", found) if distances[-1] >= SAME_PIXELS else ("wrong", found, advice)))
        return
    shares, stds = facts.values("reward/zero_std_share", RECENT), facts.values("reward/std", RECENT)
    if shares and min(shares) == 1 and max(stds, default=0.0) > 0:
        found = "prompts get different rewards, the samples of a prompt never do"
        yield Finding(name, "warn", found, "look at samples/*.png: one picture for all? or a reward of the text alone?")
        return
    found = "not measured" + (": rewards differ, so samples do" if shares and min(shares) < 1 else "")
    level: Level = "ok" if shares and min(shares) < 1 else "unknown"
    yield Finding(name, level, found, "" if level == "ok" else "watch it: 'reward.spread={weight: 0, required: false}'")


def clip_is_above_noise(facts: Facts) -> Iterator[Finding]:
    """A clip range below the rounding of ratios clips at random."""
    name, clip = "clip above noise", getattr(facts.loss, "clip", None)
    floors = facts.values("ratio/max_error")
    if clip is None:
        return
    if not floors:
        yield Finding(name, "unknown", "no on-policy sample was trained")
        return
    found = f"clip {clip:g}; ratios of unchanged weights are up to {max(floors):.2g} from 1"
    if clip > max(floors):
        yield Finding(name, "ok", found)
    else:
        advice = "widen algorithm.loss.clip, use float32, or set algorithm.old_log_prob=replay"
        yield Finding(name, "warn", found, advice)


def clip_acts(facts: Facts) -> Iterator[Finding]:
    """With one update per rollout every ratio is 1: not an error, and often taken for one."""
    config = facts.config
    if getattr(facts.loss, "clip", None) is None or config.trainer.updates_per_rollout > 1:
        return
    if config.schedule.staleness == 0:
        found = "one update per rollout and no stale samples: every ratio is 1 and the clip never acts"
        advice = "as it should be; trainer.updates_per_rollout=2 or schedule.staleness make samples off-policy"
        yield Finding("clip acts", "note", found, advice)


def gradients_are_above_eps(facts: Facts) -> Iterator[Finding]:
    """Adam divides by the root of the second moment plus eps: below eps its steps shrink with the gradient."""
    name, trainer = "Adam's eps", facts.config.trainer
    norms = [norm for norm in facts.values("grad_norm") if norm > 0]
    if trainer.optimizer == "sgd":
        return
    if not norms or not facts.num_weights:
        why = "no gradient" if not norms else "no checkpoint that says how many numbers are trained"
        yield Finding(name, "unknown", why)
        return
    clipped = min(median(norms), trainer.max_grad_norm or math.inf)
    typical = clipped / math.sqrt(facts.num_weights)
    left = typical / (typical + trainer.adam_eps)
    found = f"gradients are about {typical:.2g}, eps {trainer.adam_eps:g}: steps are {left:.0%} of the learning rate"
    advice = f"trainer.adam_eps={10.0 ** math.floor(math.log10(typical) - 1):g} or less"
    level: Level = "ok" if left > HALF_STEP else "warn" if left > NO_STEP else "wrong"
    yield Finding(name, level, found, "" if level == "ok" else advice)


def rewards_come(facts: Facts) -> Iterator[Finding]:
    """Scores that could not be had take their groups out of the step."""
    name, failed, samples = "scores", sum(facts.values("reward/failed")), sum(facts.values("samples"))
    if not samples:
        return
    found, advice = f"{failed:g} of {samples:g} samples without a score", "logs/ of the workers that score say why"
    level: Level = "ok" if not failed else "wrong" if failed == samples else "warn"
    yield Finding(name, level, found, "" if level == "ok" else advice)


def rewards_are_in_scale(facts: Facts) -> Iterator[Finding]:
    """No reward drowns the others, and advantages are of a size that clipping and learning rate are made for."""
    name = "reward scale"
    parts = {key: fmean(stds) * abs(term.weight) for key, term in facts.config.reward.items()
             if term.weight and (stds := facts.values(f"reward/{key}/std", RECENT))}  # fmt: skip
    if loud := _dominant(parts):
        rest = ", ".join(f"{key} {part:.2g}" for key, part in parts.items())
        advice = f"lower reward.{loud}.weight, or raise the others until weight * std are alike"
        yield Finding(name, "warn", f"weight * std of each: {rest}; {loud} is all that counts", advice)
    sizes, shares = facts.values("advantage/abs_mean", RECENT), facts.values("reward/zero_std_share", RECENT)
    if not sizes:
        yield Finding(name, "unknown", "no sample was trained")
        return
    alive = 1 - fmean(shares) if shares else 1.0
    size, limit = fmean(sizes) / alive if alive else 0.0, getattr(facts.loss, "advantage_clip", None) or math.inf
    found = f"abs(advantage) is {size:.2g} on average where rewards differ"
    if alive and size < SMALL_ADVANTAGE:
        yield Finding(name, "warn", found, "scale the reward up, or divide by a std (algorithm.advantage.std)")
    elif size > limit:
        yield Finding(name, "warn", f"{found}, and clipped at {limit:g}", "scale the reward down or divide by a std")
    elif not loud:
        yield Finding(name, "ok", found)


def _dominant(parts: Mapping[str, float]) -> str | None:
    """The reward that makes next to all of the sum's variance, if there are several."""
    whole = sum(part**2 for part in parts.values())
    return next((k for k, part in parts.items() if len(parts) > 1 and whole and part**2 > DOMINANT * whole), None)


CHECKS: Final[tuple[Check, ...]] = (
    ratio_is_one, clip_is_above_noise, clip_acts, rewards_come, groups_differ, samples_differ, rewards_are_in_scale,
    gradients_are_above_eps, sync_has_effect,
)  # fmt: skip
