"""What work takes, as measured in this run: the online profile that decides about bubbles. Paper section 4.

Invariant: a frozen value; a finished span gives a new one. Its size is groups times kinds of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from digen.types import Span, SpanKind


@dataclass(frozen=True, slots=True)
class Costs:
    """Mean seconds and count by (worker group, kind of work)."""

    means: Mapping[tuple[str, SpanKind], tuple[float, int]] = field(default_factory=dict)

    def add(self, span: Span) -> Costs:
        key = (span.worker, span.kind)
        mean, count = self.means.get(key, (0.0, 0))
        return Costs({**self.means, key: (mean + (span.end - span.start - mean) / (count + 1), count + 1)})

    def mean(self, worker: str, kind: SpanKind) -> float | None:
        """Mean seconds of this work on this group; None when it was never measured."""
        known = self.means.get((worker, kind))
        return known[0] if known else None
