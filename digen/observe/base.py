"""What the driver tells the outside: spans as they end, one row per global step, notes. Consumers are sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from digen.types import Decision, Span

StepRow = Mapping[str, float | int]
"""One row of metrics.jsonl; every key is explained in docs/metrics.md."""


class Observer(Protocol):
    """Called from the driver's loop: must return at once and must not raise for a full disk or a lost tracker."""

    def on_span(self, span: Span) -> None: ...

    def on_decision(self, decision: Decision) -> None: ...

    def on_step(self, row: StepRow) -> None: ...

    def on_note(self, message: str) -> None:
        """Something a person should read: a retry, a dropped group, a gap in log-probs."""
        ...

    def close(self) -> None: ...
