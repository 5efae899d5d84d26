"""Bubbles with their causes, steps in time, and how well policies foresaw a step's end: from spans and decisions alone.

Invariant: pure; every second of the wall time of training is, for every worker, either work or a wait of exactly one
cause. A bubble (section 2.3 of the paper) is a gap of one worker while the run is not done; the rules are in
docs/trace.md.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from digen.types import Decision, Span, SpanKind

TRAINING = frozenset({"generate", "assist", "score", "update", "help", "reduce", "sync", "pull"})
"""Kinds of span that make up the wall time of training; loading before and saving after it are outside."""

Cause = Literal["generator", "trainer", "scoring", "sync", "start-up", "driver"]

CAUSES: dict[Cause, str] = {
    "generator": "waits for generator",
    "trainer": "waits for trainer",
    "scoring": "scoring",
    "sync": "sync",
    "start-up": "start-up",
    "driver": "driver",
}
"""Every cause and its name for people. `driver`: nobody is at work, so the driver is choosing or settling."""

NEEDS: tuple[tuple[frozenset[SpanKind], Cause], ...] = (
    (frozenset({"generate", "help"}), "generator"),
    (frozenset({"score"}), "scoring"),
    (frozenset({"pull", "reduce"}), "sync"),
)
"""What generators do, and the cause that an idle trainer then has: the first that is under way."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Wait:
    """A bubble, or a part of one: this worker waits, and all of it for one cause. Times in s as in spans."""

    worker: str
    cause: Cause
    start: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepTime:
    """A global step from the end of the sync before it to the end of its own, which makes version `step + 1`."""

    step: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Assists:
    """What policies chose in bubbles, and how far their predicted step ends were from the real ones. NaN: not known."""

    taken: int
    skipped: int
    predicted: int
    """Decisions that can be judged: they predicted an end, and the step ended."""
    median_error_s: float
    max_error_s: float
    median_error: float
    """As a share of the step's time."""
    max_error: float


def by_name(worker: str) -> list[tuple[bool, int, str]]:
    """Sorting key that reads numbers as such: `generator-2`, `generator-10`, `trainer`."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", worker)]


def by_worker(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of every worker, workers in the order of their names."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.worker, []).append(span)
    return {worker: found[worker] for worker in sorted(found, key=by_name)}


def training_window(spans: Iterable[Span]) -> Interval:
    """From the start of the first to the end of the last piece of training work; (0, 0) when there is none."""
    training = [span for span in spans if span.kind in TRAINING]
    return min((s.start for s in training), default=0.0), max((s.end for s in training), default=0.0)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted disjoint intervals that cover the same seconds."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(spans: Iterable[Span], window: Interval) -> list[Interval]:
    """The parts of `window` that no span covers, in order. Work that takes no time ends no gap."""
    low, high = window
    inside = [(max(span.start, low), min(span.end, high)) for span in spans]
    busy = union(interval for interval in inside if interval[0] < interval[1])
    edges = [low, *(edge for interval in busy for edge in interval), high]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


def waits(spans: Sequence[Span]) -> list[Wait]:
    """The bubbles of every worker in the wall time of training, cut where the cause changes; by worker and start."""
    window = training_window(spans)
    stretches = _stretches(spans, window)
    ends = [end for _, end, _ in stretches]
    found: list[Wait] = []
    for worker, own in by_worker(spans).items():
        first = min((span.start for span in own if span.kind in TRAINING), default=math.inf)
        for gap in gaps(own, window):
            if gap[1] <= first:
                found.append(Wait(worker, "start-up", *gap))
                continue
            for start, end, cause in stretches[bisect_right(ends, gap[0]) :]:
                if start >= gap[1]:
                    break
                found.append(Wait(worker, cause, max(start, gap[0]), min(end, gap[1])))
    return found


def _stretches(spans: Sequence[Span], window: Interval) -> list[tuple[float, float, Cause]]:
    """The window cut into stretches (start, end, cause): what a worker waits for, if it is idle then."""
    trainers = {span.worker for span in spans if span.kind in ("assist", "update", "sync")}
    of_trainer = sorted((span for span in spans if span.worker in trainers), key=lambda span: span.start)
    starts = [span.start for span in of_trainer]
    merged: list[tuple[float, float, Cause]] = []
    for start, end, active in _slices(spans, window):
        coming = bisect_left(starts, end)
        following = of_trainer[coming] if coming < len(starts) else None
        cause = _cause(active, [span for span in active if span.worker in trainers], following)
        if merged and merged[-1][2] == cause:
            merged[-1] = (merged[-1][0], end, cause)
        else:
            merged.append((start, end, cause))
    return merged


def _slices(spans: Sequence[Span], window: Interval) -> Iterator[tuple[float, float, list[Span]]]:
    """(start, end, spans under way), from edge to edge: within a slice nothing begins and nothing ends."""
    low, high = window
    edges = sorted({low, high, *(e for s in spans for e in (s.start, s.end) if low < e < high)})
    coming = sorted(spans, key=lambda span: span.start, reverse=True)
    active: list[Span] = []
    for start, end in pairwise(edges):
        while coming and coming[-1].start <= start:
            active.append(coming.pop())
        active = [span for span in active if span.end > start]
        yield start, end, active


def _cause(active: Sequence[Span], of_trainer: Sequence[Span], following: Span | None) -> Cause:
    """What holds up an idle worker: the trainer if it is at work, else what the trainer itself waits for.

    `following` is the trainer's next work. What is about its step comes before all else, and the score of its very
    micro-batch before that: in naive mode other scores do not bring the trainer to work while samples are missing.
    """
    if of_trainer:
        return "sync" if any(span.kind in ("sync", "reduce") for span in of_trainer) else "trainer"
    needed = [span for span in active if following is None or span.step == following.step]
    if following and any(span.kind == "score" and span.index == following.index for span in needed):
        return "scoring"
    for under_way in (needed, active):
        for kinds, cause in NEEDS:
            if any(span.kind in kinds for span in under_way):
                return cause
    return "driver"


def step_times(spans: Iterable[Span]) -> list[StepTime]:
    """The finished steps in order of time. A sync that only publishes resumed weights ends no step."""
    spans = list(spans)
    syncs = sorted((s for s in spans if s.kind == "sync" and s.version == s.step + 1), key=lambda span: span.end)
    edges = [training_window(spans)[0], *(sync.end for sync in syncs)]
    return [StepTime(sync.step, *times) for sync, times in zip(syncs, pairwise(edges), strict=True)]


def assists(spans: Sequence[Span], decisions: Sequence[Decision]) -> Assists:
    """Count and judge decisions. Runs that have none recorded (`decisions` is empty) count their assist spans."""
    ends = {time.step: time for time in step_times(spans)}
    judged = [
        (d.predicted_end - ends[d.step].end, ends[d.step]) for d in decisions if d.predicted_end and d.step in ends
    ]
    errors = [abs(error) for error, _ in judged]
    shares = [abs(error) / (time.end - time.start) for error, time in judged if time.end > time.start]
    taken = sum(d.rows > 0 for d in decisions) if decisions else sum(span.kind == "assist" for span in spans)
    return Assists(
        taken=taken,
        skipped=sum(d.rows == 0 for d in decisions),
        predicted=len(judged),
        median_error_s=median(errors) if errors else math.nan,
        max_error_s=max(errors, default=math.nan),
        median_error=median(shares) if shares else math.nan,
        max_error=max(shares, default=math.nan),
    )
