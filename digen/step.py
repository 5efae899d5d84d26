"""One global step under way: its two queues SQ and UQ, and what is known of it so far. Paper section 3.3.

Invariant: every micro-batch is in exactly one place: pending, being generated, unscored, being scored, ready, being
trained, or trained; it only moves forward. Only the driver changes a step, and it forgets the step when its weights
exist (rules R2, R4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from digen.schedule.staleness import StalenessPolicy
from digen.schedule.tag import Activity, Bubble
from digen.types import MicroBatch, Rollout, ScoredRollout, Scores, Stats, Version


@dataclass(slots=True)
class GlobalStep:
    """The micro-batches of one optimizer step, on their way through the queues from top to bottom."""

    index: int
    microbatches: tuple[MicroBatch, ...]
    denominator: float
    """Z of the loss, fixed here, before the first micro-batch (rule R11)."""
    pending: deque[MicroBatch] = field(init=False)
    unscored: deque[Rollout] = field(default_factory=deque)
    """SQ, the scoring queue."""
    ready: dict[int, ScoredRollout] = field(default_factory=dict)
    """UQ, the update queue, by index of micro-batch."""
    num_trained: int = 0
    num_assisted: int = 0
    """Micro-batches that the trainer generated."""
    num_samples: int = field(init=False)
    num_stale: int = 0
    """Samples started under older weights than the step's own."""
    gap_noted: bool = False
    results: dict[int, tuple[ScoredRollout, Scores]] = field(default_factory=dict)
    stats: dict[int, Stats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = deque(self.microbatches)
        self.num_samples = sum(m.num_samples for m in self.microbatches)

    @property
    def all_scored(self) -> bool:
        return len(self.results) == len(self.microbatches)

    @property
    def all_trained(self) -> bool:
        return self.num_trained == len(self.microbatches)

    def scored_in_order(self) -> list[tuple[ScoredRollout, Scores]]:
        """What was scored so far, by index of micro-batch and not by time."""
        return [self.results[index] for index in sorted(self.results)]

    def num_allowed(self, staleness: StalenessPolicy, version: Version) -> int:
        """How many more of the pending micro-batches may be generated under `version`."""
        stale, count = self.num_stale, 0
        for microbatch in self.pending:
            if not staleness.allows(microbatch, version, stale, self.num_samples):
                break
            stale, count = stale + microbatch.num_samples, count + 1
        return count

    def bubble(
        self, trainer: str, generators: tuple[Activity, ...], *, max_in_flight: int, ahead: int = 0, naive: bool = False
    ) -> Bubble:
        """The facts of a bubble of this step."""
        return Bubble(
            step=self.index,
            num_microbatches=len(self.microbatches),
            pending=len(self.pending),
            unscored=len(self.unscored),
            ready=len(self.ready),
            trained=self.num_trained,
            assisted=self.num_assisted,
            trainer=trainer,
            generators=generators,
            max_in_flight=max_in_flight,
            ahead=ahead,
            naive=naive,
        )
