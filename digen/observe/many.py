"""Several sinks as one observer, and the usual set of them for a run.

Invariant: a sink that fails is left out from then on, the others are told once, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from digen.observe.base import Observer, StepRow
from digen.observe.console import open_view
from digen.observe.files import JsonlObserver, RunFolder
from digen.observe.live import RunInfo
from digen.observe.tensorboard import TensorBoardObserver
from digen.types import Decision, Span


def open_observer(
    info: RunInfo, folder: RunFolder, console: Console, *, tensorboard: bool = True, first_step: int = 0
) -> Observer:
    """What a run, or the rest of one from `first_step`, reports to: terminal, JSON lines, TensorBoard.

    Close it when the run ends, however it ends.
    """
    view = open_view(info, console)
    sinks: list[Observer] = [JsonlObserver(folder, view.on_note)]
    if tensorboard:
        sinks.append(TensorBoardObserver(folder.tensorboard, view.on_note, first_step=first_step))
    return ManyObservers(*sinks, view)


class ManyObservers:
    """Passes everything on to every sink, in order. Files come before views: what is seen is also written."""

    def __init__(self, *sinks: Observer) -> None:
        self._sinks = list(sinks)

    def on_span(self, span: Span) -> None:
        self._each(lambda sink: sink.on_span(span))

    def on_decision(self, decision: Decision) -> None:
        self._each(lambda sink: sink.on_decision(decision))

    def on_step(self, row: StepRow) -> None:
        self._each(lambda sink: sink.on_step(row))

    def on_note(self, message: str) -> None:
        self._each(lambda sink: sink.on_note(message))

    def close(self) -> None:
        """Close every sink, also after one that failed."""
        self._each(lambda sink: sink.close())

    def _each(self, tell: Callable[[Observer], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                tell(sink)
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything; it is reported, and the run goes on
                self._sinks.remove(sink)
                self.on_note(f"{type(sink).__name__} failed and gets nothing more: {type(error).__name__}: {error}")
