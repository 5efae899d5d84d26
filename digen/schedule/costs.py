"""What work takes, as measured in this run: the online profile that decides about bubbles. Paper section 4.

Invariant: a frozen value; a finished span gives a new one. Its size is groups times kinds of work times sizes of work,
however long the run. A cold first call and outliers do not move it: it is the median of recent calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple, Self

from digen.types import Span, SpanKind

RECENT = 15
"""Calls of one size that count; older ones are forgotten, so that the profile follows a machine that changes."""

CARRIED = 3
"""Calls that what is carried over from elsewhere counts as: more than one cold call, fewer than the new run's own."""

TAIL = 0.1
"""Share of the shortest and of the longest calls that a whole run's profile leaves out."""


class Measured(NamedTuple):
    """Calls of one group, kind and size: seconds of the newest, oldest first, and their median."""

    recent: tuple[float, ...]
    typical_s: float
    warm: bool = False
    """Whether the first call has been left out: it compiles, allocates and fills caches."""

    def add(self, seconds: float) -> Measured:
        recent = (*(self.recent if self.warm else ()), seconds)[-RECENT:]
        return Measured(recent, median(recent), warm=True)

    @classmethod
    def carried(cls, seconds: float) -> Measured:
        """What is known from elsewhere: the cold first call of this run does not replace it, a few warm ones do."""
        return cls((seconds,) * CARRIED, seconds, warm=True)


@dataclass(frozen=True, slots=True)
class Costs:
    """Typical seconds by worker group, kind of work and number of samples that it was about."""

    measured: Mapping[tuple[str, SpanKind], Mapping[int, Measured]] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Self:
        """The profile of a run: what it had measured at its end. Costs of another run are taken over by this."""
        costs = cls()
        for span in spans:
            costs = costs.add(span)
        return costs

    @classmethod
    def over(cls, spans: Iterable[Span], *, trimmed: bool = True) -> Self:
        """The mean of all calls of each kind and size; `trimmed`: of the middle 80 % of all but the first.

        A step is a sum of calls, so a mean predicts it better than a median; without its tails it is as robust.
        """
        calls: dict[tuple[str, SpanKind], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for span in spans:
            calls[span.worker, span.kind][span.rows].append(span.end - span.start)
        return cls(
            {
                key: {
                    rows: Measured.carried(_middle_mean(each) if trimmed else fmean(each))
                    for rows, each in sizes.items()
                }
                for key, sizes in calls.items()
            }
        )

    def updated(self, other: Costs) -> Self:
        """With the other profile's costs where it has any."""
        return type(self)({**self.measured, **other.measured})

    def fixed(self, worker: str, kind: SpanKind, rows: int, seconds: float) -> Self:
        """With this work on `rows` samples taking so long, whatever was measured of it before, at any size."""
        return type(self)({**self.measured, (worker, kind): {rows: Measured.carried(seconds)}})

    def scaled(self, factors: Mapping[SpanKind, float], workers: Collection[str] | None = None) -> Self:
        """With these kinds of work taking so many times as long, on every group or on these."""

        def scale(worker: str, kind: SpanKind, measured: Measured) -> Measured:
            known = kind in factors and (workers is None or worker in workers)
            return Measured.carried(measured.typical_s * factors[kind]) if known else measured

        return type(self)(
            {
                (worker, kind): {rows: scale(worker, kind, measured) for rows, measured in sizes.items()}
                for (worker, kind), sizes in self.measured.items()
            }
        )

    def renamed(self, generators: Iterable[str], trainer: str) -> Self:
        """The profile for other groups: a generator of the same name takes over its own costs, others the mean of all.

        Who updated was the trainer. A colocated run has no generators: its trainer stands for both sides.
        """
        workers = {worker for worker, _ in self.measured}
        trainers = {worker for worker, kind in self.measured if kind == "update"}
        costs = self._mean(trainers, trainer)
        if not (others := workers - trainers) and (trainer, "generate") in costs:
            costs[trainer, "assist"] = costs[trainer, "generate"]
        for name in generators:
            costs |= self._mean({name} & others or others or trainers, name)
        return type(self)(costs)

    def _mean(self, workers: Collection[str], name: str) -> dict[tuple[str, SpanKind], dict[int, Measured]]:
        """What the workers' costs are on average, under a new name."""
        seconds: dict[SpanKind, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for (worker, kind), sizes in self.measured.items():
            for rows, measured in sizes.items() if worker in workers else ():
                seconds[kind][rows].append(measured.typical_s)
        return {
            (name, kind): {rows: Measured.carried(fmean(each)) for rows, each in sizes.items()}
            for kind, sizes in seconds.items()
        }

    def add(self, span: Span) -> Self:
        key, seconds = (span.worker, span.kind), span.end - span.start
        sizes = self.measured.get(key, {})
        known = sizes.get(span.rows)
        now = known.add(seconds) if known else Measured((seconds,), seconds)
        return type(self)({**self.measured, key: {**sizes, span.rows: now}})

    def seconds(self, worker: str, kind: SpanKind, rows: int = 0) -> float | None:
        """Typical seconds of this work on `rows` samples; None when this group never did it.

        A size that was never measured takes what the nearest measured one takes, in proportion.
        """
        sizes = self.measured.get((worker, kind))
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: (abs(size - rows), size))
        scale = rows / nearest if rows and nearest else 1.0
        return sizes[nearest].typical_s * scale


def _middle_mean(seconds: Sequence[float]) -> float:
    warm = sorted(seconds[1:] or seconds)
    cut = int(TAIL * len(warm))
    return fmean(warm[cut : len(warm) - cut])
