"""Sharing: an idle side takes over part of the other's work, sample by sample. Design: docs/design/sharing.md.

The rule for everybody: take no more than you can finish by the time at which all are done, if all take their part.
That time is found by letting work flow to whoever is free first. It is asked for anew whenever somebody is idle, so
that wrong estimates even out.

Invariant: pure; with unknown costs nobody shares; a generator that may generate never stays idle. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from digen.config import ScheduleConfig
from digen.schedule.costs import Costs
from digen.schedule.tag import Activity, Bubble, Choice
from digen.types import SpanKind

LEAST = 0.125
"""Of a micro-batch: the smallest part worth a call of its own."""


class Pace(NamedTuple):
    """From when on a worker is free, and what one sample then takes it."""

    free: float
    each: float


def finish(samples: float, paces: Iterable[Pace]) -> float:
    """When so many samples are done if each worker takes part from the time at which it is free; inf without any."""
    rate = head_start = 0.0
    end = inf
    for free, each in sorted(paces):
        if free >= end:
            break
        speed = 1.0 / max(each, 1e-12)
        rate, head_start = rate + speed, head_start + free * speed
        end = (samples + head_start) / rate
    return end


@dataclass(frozen=True, slots=True)
class Share:
    """Who may take over the other side's work: the trainer generation, the generators gradients."""

    trainer: bool
    generators: bool

    # What a worker that is idle takes --------------------------------------------------------------------------------

    def generate(self, generator: str, bubble: Bubble, costs: Costs) -> int:
        """Rows of the next micro-batch that an idle generator starts: all, but at the end of the step."""
        step = _Outlook(self, bubble, costs)
        if not step.known:
            return bubble.next_rows
        rate = 1.0 / max(step.generate[generator], 1e-12)
        scoring = step.scoring_rows * rate / sum(1.0 / max(each, 1e-12) for each in step.generate.values())
        return _part(step.generated_by * rate - scoring, bubble.next_rows, bubble.rows, at_least=True)

    def choose(self, bubble: Bubble, costs: Costs) -> Choice:
        """TAG: rows that an idle trainer starts. What fits into the bubble, or its part of all that is pending."""
        step = _Outlook(self, bubble, costs)
        if not self.trainer or not step.known:
            return Choice(0)
        wanted = max(step.generated_by - step.trainer.free, step.bubble_s) / max(step.assist, 1e-12)
        rows = _part(wanted, bubble.next_rows, bubble.rows)
        return Choice(rows, step.end + (costs.seconds(bubble.trainer.worker, "sync") or 0.0))

    def update(self, worker: str, bubble: Bubble, costs: Costs) -> int:
        """Rows of the first micro-batch in UQ whose gradients an idle worker computes; 0: it leaves them to others."""
        helps = worker != bubble.trainer.worker
        if not self.generators:
            return 0 if helps else bubble.next_ready
        step = _Outlook(self, bubble, costs)
        if not step.known:
            return 0 if helps else bubble.next_ready
        part = step.trained_by / max(step.update[worker], 1e-12)
        return _part(part, bubble.next_ready, bubble.kept, at_least=not helps)


def share_of(schedule: ScheduleConfig) -> Share | None:
    """Who shares by `schedule.assist`; None: nobody."""
    if schedule.assist == "none":
        return None
    return Share(trainer=schedule.assists, generators=schedule.generators_help)


def _part(wanted: float, there: int, whole: int, *, at_least: bool = False) -> int:
    """`wanted` of the rows that are there, so that neither this part nor what is left is too small for a call."""
    least = min(max(1, round(LEAST * whole)), there)
    rows = round(wanted)
    if rows < least:
        rows = least if at_least else 0
    return there if there - rows < least and rows else min(rows, there)


class _Outlook:
    """What is to come in a step, as far as costs are known. Times count from now."""

    def __init__(self, share: Share, bubble: Bubble, costs: Costs) -> None:
        self.bubble, self.costs = bubble, costs
        self.generate = self._each_row("generate", bubble.rows)
        trainer = bubble.trainer.worker
        update = self._row(trainer, "update", bubble.kept)
        self.known = bool(self.generate) and update is not None
        if not self.known or update is None:
            return
        usual = sum(self.generate.values()) / len(self.generate)
        self.assist = self._row(trainer, "assist", bubble.rows) or usual
        self.update = {trainer: update}
        if share.generators:
            self.update |= {g.worker: self._row(g.worker, "help", bubble.kept) or update for g in bubble.generators}
        score = self._each_row("score", bubble.rows)
        self.score = sum(score.values()) / len(score) if score else 0.0
        if bubble.scorer:
            self.score = self._row(bubble.scorer.worker, "score", bubble.rows) or 0.0
        scored_here = 0 if bubble.scorer else bubble.unscored_rows
        self.scoring_rows = scored_here * self.score / max(usual, 1e-12)
        # The trainer's own part of the last micro-batch comes after all generation; what it has to train before that:
        together = 1.0 / sum(1.0 / max(each, 1e-12) for each in self.update.values())
        tail = bubble.kept * together
        busy = max(0.0, bubble.untaken * update - tail)
        self.free = {a.worker: self._left(a) for a in (*bubble.generators, bubble.trainer)}
        self.trainer = Pace(self.free[trainer] + busy, self.assist)
        paces = [Pace(self.free[name], each) for name, each in self.generate.items()]
        self.generated_by = finish(bubble.pending_rows + self.scoring_rows, [*paces, *[self.trainer] * share.trainer])
        self.trained_by = finish(
            bubble.untaken,
            (
                Pace(self.free[w] if w == trainer else max(self.free[w], self.generated_by), each)
                for w, each in self.update.items()
            ),
        )
        self.end = max(self.generated_by + tail, self.trained_by)

    @property
    def bubble_s(self) -> float:
        """How long the trainer has nothing to train if nobody helps it to: until the next score ends."""
        score, scorer = self.score * self.bubble.rows, self.bubble.scorer
        if scorer and (scorer.kind or self.bubble.unscored):
            return self._left(scorer) if scorer.kind else score
        free = [self.free[g.worker] for g in self.bubble.generators]
        if self.bubble.unscored:
            return min(free, default=inf) + score
        whole = {g.worker: self.generate[g.worker] * self.bubble.rows for g in self.bubble.generators}
        ends = [self.free[g.worker] + (g.kind != "generate") * whole[g.worker] for g in self.bubble.generators]
        return min(ends, default=0.0) + score

    def _row(self, worker: str, kind: SpanKind, rows: int) -> float | None:
        seconds = self.costs.seconds(worker, kind, rows)
        return seconds / rows if seconds is not None and rows else None

    def _each_row(self, kind: SpanKind, rows: int) -> dict[str, float]:
        """Seconds a row takes each generator; one that never did it is taken for the mean of those that have."""
        names = [g.worker for g in self.bubble.generators]
        known = {name: each for name in names if (each := self._row(name, kind, rows)) is not None}
        if not known:
            return {}
        mean = sum(known.values()) / len(known)
        return {name: known.get(name, mean) for name in names}

    def _left(self, activity: Activity) -> float:
        """When a worker is free if its work takes what it typically takes."""
        if activity.kind is None:
            return 0.0
        seconds = self.costs.seconds(activity.worker, activity.kind, activity.rows)
        return max((seconds or 0.0) - activity.elapsed_s, 0.0)
