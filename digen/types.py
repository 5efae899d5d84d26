"""The words of the system as frozen data (no torch here: the driver reads this file).

Invariant: nothing in here holds a tensor. Where tensors are is said by a `Ref`; workers read and write them through
the engine's `TensorStore` (`digen/engines/base.py`). Paper sections 3.1 and 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Version = int
"""Number of optimizer steps that the weights have seen. Global step `s` is on-policy under version `s`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt file. `id` is the row's position: two rows with the same text are two prompts."""

    id: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    negative: str | None = None
    """What guidance leads this prompt away from; None: `sampling.negative_prompt`."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The pipeline unit: whole prompt groups. Row `k` is sample `k % n` of prompt `k // n`, n = samples_per_prompt."""

    step: int
    index: int
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    seed: int

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    def rows(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The rows that one rank takes. Strided, so that every group is spread over all ranks (GAP, section 3.2.1)."""
        return tuple(range(rank, self.num_samples, world_size))

    def identity(self, row: int) -> tuple[Prompt, int]:
        """(prompt, sample index) of a row: what its noise depends on, with seed, step and timestep (rule R8)."""
        return self.prompts[row // self.samples_per_prompt], row % self.samples_per_prompt


@dataclass(frozen=True, slots=True)
class Ref:
    """Where tensors are: `key` in the engine's store. The driver passes it on and drops it, and never reads it."""

    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank generated: these rows of the micro-batch, in this order."""

    rows: tuple[int, ...]
    trajectory: Ref
    media: Ref


@dataclass(frozen=True, slots=True)
class Rollout:
    """What `generate` returns, all ranks together. One weight version for all its trajectories (TCSS, section 3.4)."""

    microbatch: MicroBatch
    version: Version
    shards: tuple[Shard, ...]
    worker: str


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw values of every reward for some rows: `values[i][j]` = reward `names[j]` of row `rows[i]`; NaN = failed."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout that can be trained on. One entry per row of the micro-batch.

    `keep[k]` says whether row k is trained (best-of-n, failed groups); `advantages[k]` is unused where it is not.
    """

    rollout: Rollout
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    keep: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Stat:
    """A mean that can be merged over ranks and micro-batches: sum, count, smallest, largest."""

    total: float
    count: int
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def merge(self, other: Stat) -> Stat:
        return Stat(
            self.total + other.total, self.count + other.count, min(self.low, other.low), max(self.high, other.high)
        )


Stats = Mapping[str, Stat]
"""Named statistics of an update, e.g. `ratio`, `clip_fraction`, `kl`, `log_prob_gap/step3` (docs/metrics.md)."""


def merge_stats(*parts: Stats) -> dict[str, Stat]:
    """Merge statistics of several ranks or micro-batches by name."""
    merged: dict[str, Stat] = {}
    for part in parts:
        for name, stat in part.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    return merged


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an optimizer step did. `applied` is False for a zero or non-finite gradient: weights are then unchanged."""

    grad_norm: float
    learning_rate: float
    weight_delta: float
    applied: bool
    finite: bool


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at step 0 with the model as it is, or with what a checkpoint holds."""

    version: Version = 0
    loaded: bool = False
    """Whether the trainer has been given weights that the generators do not have yet."""
    rollouts: tuple[Rollout, ...] = ()
    """What exists of the coming steps: their stale samples (TCSS), in order of step and index."""
    num_bad_steps: int = 0
    """Steps in a row, up to now, with a non-finite gradient."""
    elapsed_s: float = 0.0
    """Seconds of the run before this."""


@dataclass(frozen=True, slots=True)
class Published:
    """Weights of one version on their way to the generators: where they are, what a glance at them finds (rule R15)."""

    version: Version
    weights: Ref
    fingerprint: str


SpanKind = Literal["load", "generate", "assist", "score", "update", "help", "reduce", "sync", "pull", "save"]
"""assist: the trainer generates. help: a generator accumulates gradients; reduce: it hands them to the trainer."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one worker group: everything drawn comes from these. Times in s since the run's start."""

    kind: SpanKind
    worker: str
    step: int
    index: int
    version: Version
    start: float
    end: float
    rows: int = 0
    """Samples that the work is about; 0 where it is about none (load, reduce, sync, pull, save)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose for one bubble, to be held against what happened. Times in s since the run's start."""

    step: int
    worker: str
    at: float
    rows: int
    """Samples that the worker takes over now; 0: the bubble is skipped."""
    predicted_end: float | None
    """When the step's sync ends if it goes as planned; None: the policy does not say."""
