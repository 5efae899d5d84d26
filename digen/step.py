"""One global step under way: its two queues SQ and UQ, and what is known of it so far. Paper section 3.3.

Invariant: every sample is in exactly one place: pending, being generated, generated (its micro-batch is not complete),
unscored, being scored, ready, being trained, or trained; it only moves forward. Workers take pieces: micro-batches, or
rows of one where idle sides share the work. Only the driver changes a step, and it forgets the step when its weights
exist (rules R2, R4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from digen import credit
from digen.config import RunConfig
from digen.schedule import gap
from digen.schedule.staleness import StalenessPolicy
from digen.schedule.tag import Activity, Bubble
from digen.types import MicroBatch, Prompt, Ref, Rollout, ScoredRollout, Scores, Shard, Stats, Version, merge_stats


class Piece(NamedTuple):
    """Rows of a micro-batch that one worker generates in one call."""

    microbatch: MicroBatch
    rows: tuple[int, ...]


@dataclass(slots=True)
class GlobalStep:
    """The micro-batches of one optimizer step, on their way through the queues from top to bottom."""

    index: int
    microbatches: tuple[MicroBatch, ...]
    denominator: float
    """Z of the loss, fixed here, before the first micro-batch (rule R11)."""
    kept_per_prompt: int
    """Samples of a group that are trained unless a reward fails."""
    rows_together: int = 1
    """How many neighbours among them are never parted (a loss of pairs)."""
    pending: deque[Piece] = field(init=False)
    shards: dict[int, list[Shard]] = field(default_factory=dict)
    """Of micro-batches that several workers share, by index, until the last row is there."""
    unscored: deque[Rollout] = field(default_factory=deque)
    """SQ, the scoring queue."""
    ready: dict[int, ScoredRollout] = field(default_factory=dict)
    """UQ, the update queue, by index of micro-batch; `keep` marks the rows that nobody has begun to train."""
    untrained: dict[int, int] = field(default_factory=dict)
    """Rows of each scored micro-batch that are to be trained and are not trained yet, by index."""
    num_trained: int = 0
    """Micro-batches of which all rows are trained."""
    num_assisted: int = 0
    """Pieces that the trainer generated."""
    helpers: dict[str, list[tuple[ScoredRollout, Stats]]] = field(default_factory=dict)
    """Generators with gradients of this step that they have not handed over, and of what: it is not trained yet."""
    handed: list[Ref] = field(default_factory=list)
    """Gradients that generators handed over."""
    num_samples: int = field(init=False)
    num_stale: int = 0
    """Samples started under older weights than are due."""
    gap_noted: bool = False
    results: dict[int, tuple[ScoredRollout, Scores]] = field(default_factory=dict)
    stats: dict[int, Stats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = deque(Piece(m, tuple(range(m.num_samples))) for m in self.microbatches)
        self.num_samples = sum(m.num_samples for m in self.microbatches)

    @classmethod
    def of(cls, config: RunConfig[Any], index: int, prompts: tuple[Prompt, ...]) -> GlobalStep:
        """The step of these prompts, cut as the config says; nothing of it is done."""
        algorithm, per_microbatch = config.algorithm, config.schedule.prompts_per_microbatch
        cut = gap.cut(index, prompts, algorithm.samples_per_prompt, per_microbatch, config.seed)
        denominator = credit.denominator(config, len(prompts))
        return cls(index, cut, denominator, algorithm.kept_per_prompt(), algorithm.loss.rows_together)

    @property
    def all_scored(self) -> bool:
        return len(self.results) == len(self.microbatches)

    @property
    def all_trained(self) -> bool:
        return self.num_trained == len(self.microbatches)

    @property
    def untaken(self) -> int:
        """Rows to train that nobody has begun to train, those that are still to be generated included."""
        unscored = (self.kept(m) for m in self.microbatches if m.index not in self.results)
        return sum(unscored) + sum(sum(scored.keep) for scored in self.ready.values())

    def kept(self, microbatch: MicroBatch) -> int:
        return len(microbatch.prompts) * self.kept_per_prompt

    def scored_in_order(self) -> list[tuple[ScoredRollout, Scores]]:
        """What was scored so far, by index of micro-batch and not by time."""
        return [self.results[index] for index in sorted(self.results)]

    # Forward through the queues --------------------------------------------------------------------------------------

    def take_pending(self, rows: int) -> Piece:
        """The next micro-batch, or its first `rows` rows."""
        microbatch, pending = self.pending.popleft()
        if rows < len(pending):
            self.pending.appendleft(Piece(microbatch, pending[rows:]))
        return Piece(microbatch, pending[:rows])

    def generated(self, piece: Rollout) -> None:
        """Into SQ when its micro-batch is complete: groups are judged as a whole."""
        microbatch = piece.microbatch
        shards = self.shards.setdefault(microbatch.index, [])
        shards += piece.shards
        if sum(len(shard.rows) for shard in shards) == microbatch.num_samples:
            del self.shards[microbatch.index]
            self.unscored.append(replace(piece, shards=tuple(sorted(shards, key=lambda shard: shard.rows))))

    def made_before(self, stale: Rollout) -> None:
        """A stale rollout of an earlier run of this step (TCSS): the pending micro-batches of the lowest indices."""
        piece = self.take_pending(stale.microbatch.num_samples)
        assert piece.microbatch == stale.microbatch, "stale samples are those of the first micro-batches"
        self.num_stale += len(piece.rows)
        self.generated(stale)

    def scored(self, scored: ScoredRollout, scores: Scores) -> None:
        index = scored.rollout.microbatch.index
        self.ready[index] = scored
        self.untrained[index] = sum(scored.keep)
        self.results[index] = scored, scores

    def take_ready(self, rows: int) -> ScoredRollout:
        """The micro-batch of the smallest index that is ready, or its first `rows` rows that are to be trained."""
        index = min(self.ready)
        scored = self.ready.pop(index)
        kept = [row for row, keep in enumerate(scored.keep) if keep]
        rows = -(-rows // self.rows_together) * self.rows_together
        if rows >= len(kept):
            return scored
        first = set(kept[:rows])
        self.ready[index] = replace(scored, keep=tuple(k and row not in first for row, k in enumerate(scored.keep)))
        return replace(scored, keep=tuple(row in first for row in range(len(scored.keep))))

    def trained(self, scored: ScoredRollout, stats: Stats) -> tuple[Ref, ...]:
        """The trainer has the gradients of these rows; the trajectories that nobody needs now: all rows have been."""
        index = scored.rollout.microbatch.index
        self.untrained[index] -= sum(scored.keep)
        self.stats[index] = merge_stats(self.stats.get(index, {}), stats)
        done = self.untrained[index] == 0 and index not in self.ready
        self.num_trained += done
        return tuple(shard.trajectory for shard in scored.rollout.shards) if done else ()

    # Back, when a worker is lost ------------------------------------------------------------------------------------

    def not_generated(self, piece: Piece, *, stale: bool) -> None:
        """Rows whose worker was lost before they were there are the next ones to start."""
        self.pending.appendleft(piece)
        self.num_stale -= len(piece.rows) if stale else 0

    def not_trained(self, scored: ScoredRollout) -> None:
        """Rows whose gradients were lost with the worker that had them are to be trained again."""
        index = scored.rollout.microbatch.index
        others = self.ready.get(index)
        keep = scored.keep if others is None else tuple(map(max, scored.keep, others.keep))
        self.ready[index] = replace(scored, keep=keep)

    # Facts for policies ----------------------------------------------------------------------------------------------

    def num_allowed(self, staleness: StalenessPolicy, version: Version) -> int:
        """How many more of the pending micro-batches may be generated under `version`."""
        stale, count = self.num_stale, 0
        for piece in self.pending:
            if not staleness.allows(piece.microbatch, version, stale, self.num_samples):
                break
            stale, count = stale + piece.microbatch.num_samples, count + 1
        return count

    def bubble(
        self,
        trainer: Activity,
        generators: tuple[Activity, ...],
        *,
        max_in_flight: int,
        ahead: int = 0,
        naive: bool = False,
        scorer: Activity | None = None,
    ) -> Bubble:
        """The facts of a bubble of this step."""
        first = self.microbatches[0]
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
            scorer=scorer,
            rows=first.num_samples,
            kept=self.kept(first),
            pending_rows=sum(len(piece.rows) for piece in self.pending),
            next_rows=len(self.pending[0].rows) if self.pending else 0,
            unscored_rows=sum(m.num_samples for m in self.microbatches if m.index not in self.results),
            untaken=self.untaken,
            next_ready=sum(self.ready[min(self.ready)].keep) if self.ready else 0,
        )
