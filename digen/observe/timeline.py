"""A run as it is drawn: its spans, bubbles, steps, decisions and totals, and the colours that every picture of it uses.

Invariant: everything here is read from the run's files; the pictures (`lanes.py`, `trace.py`) add nothing of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from digen.errors import ConfigError
from digen.observe.bubbles import (
    CAUSES,
    TRAINING,
    Cause,
    Interval,
    StepTime,
    Wait,
    by_worker,
    step_times,
    training_window,
    waits,
)
from digen.observe.files import RunFolder, read_decisions, read_rows, read_spans
from digen.observe.show import duration, number, share
from digen.observe.summary import Summary, Worker, assists_line, causes_line, mean_causes, summarise
from digen.types import Decision, Span, SpanKind

KIND_COLOURS: dict[SpanKind, str] = {
    "generate": "#2f81d6",
    "assist": "#12a3b4",
    "score": "#8957d0",
    "update": "#e5801a",
    "help": "#c9a20c",
    "reduce": "#a5673f",
    "sync": "#2a9d4e",
    "pull": "#84bd3c",
    "save": "#64707d",
    "load": "#a3adb8",
}
"""Generation is blue, training orange, weights on the move green; `assist` and `help` are the other side's work."""

CAUSE_COLOURS: dict[Cause, str] = {
    "generator": KIND_COLOURS["generate"],
    "trainer": KIND_COLOURS["update"],
    "scoring": KIND_COLOURS["score"],
    "sync": KIND_COLOURS["sync"],
    "start-up": "#9aa4af",
    "driver": "#d1303f",
}
"""A bubble has the colour of the work that it waits for."""


@dataclass(frozen=True)
class Timeline:
    """One run. `spans` in any order; what follows from them is computed once."""

    title: str
    spans: Sequence[Span]
    decisions: Sequence[Decision]
    summary: Summary

    @cached_property
    def lanes(self) -> Mapping[str, list[Span]]:
        """Worker -> its spans by start, workers by name."""
        return {w: sorted(own, key=lambda span: span.start) for w, own in by_worker(self.spans).items()}

    @cached_property
    def waits(self) -> Mapping[str, list[Wait]]:
        """Worker -> its bubbles by start."""
        found: dict[str, list[Wait]] = {worker: [] for worker in self.lanes}
        for wait in waits(self.spans):
            found[wait.worker].append(wait)
        return found

    @cached_property
    def steps(self) -> list[StepTime]:
        return step_times(self.spans)

    @cached_property
    def window(self) -> Interval:
        """The wall time of training, which all shares are of."""
        return training_window(self.spans)

    @cached_property
    def ends(self) -> Mapping[int, float]:
        """Step -> the end of its sync."""
        return {time.step: time.end for time in self.steps}

    @property
    def kinds(self) -> list[SpanKind]:
        """The kinds of work there are, in the order of the legend."""
        found = {span.kind for span in self.spans}
        return [kind for kind in KIND_COLOURS if kind in found]

    @property
    def causes(self) -> list[Cause]:
        """The causes of bubbles there are, in the order of the legend."""
        found = {wait.cause for waits in self.waits.values() for wait in waits}
        return [cause for cause in CAUSES if cause in found]

    def facts(self) -> list[str]:
        """The totals of the run as sentences; what is not known is left out."""
        summary = self.summary
        every = total_row(list(summary.workers.values()))
        pace = f", {number(summary.samples_per_s)} samples/s" if summary.samples else ""
        lines = [f"{len(self.steps)} steps in {duration(summary.training_s)}{pace}"]
        lines.append(f"workers busy {share(every.busy)}; bubbles: {causes_line(every.causes)}")
        if summary.assists.taken or summary.assists.skipped:
            lines.append(f"assists: {assists_line(summary.assists)}")
        stale = f"stale samples {share(summary.stale_share)}; " if math.isfinite(summary.stale_share) else ""
        return [*lines, f"{stale}wasted {duration(summary.wasted_s)} of worker time"]


def read_timeline(folder: RunFolder) -> Timeline:
    """The timeline of a run folder. Raises ConfigError when it has no training work; DataError for a bad line."""
    spans = read_spans(folder.events) if folder.events.is_file() else []
    if not any(span.kind in TRAINING for span in spans):
        raise ConfigError(f"{folder.path} has nothing to draw: {folder.events.name} has no training work")
    decisions = read_decisions(folder.decisions) if folder.decisions.is_file() else []
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    return Timeline(folder.path.resolve().name, spans, decisions, summarise(rows, spans, decisions))


def total_row(workers: Sequence[Worker]) -> Worker:
    """All workers as one: mean shares, summed bubbles."""
    busy = fmean(worker.busy for worker in workers) if workers else math.nan
    return Worker(busy, sum(w.bubbles for w in workers), sum(w.bubble_s for w in workers), mean_causes(workers))
