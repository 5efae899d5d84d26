"""What a person sees of a run while it runs: a live view on a terminal, plain `key=value` lines anywhere else.

Invariant: the driver's thread only swaps one frozen `Progress` for the next; drawing is a pure function of it and
happens in rich's own refresh thread, so a slow terminal does not hold up the loop. A terminal that is gone does not
stop the run.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic

from rich.console import Console
from rich.live import Live

from digen.observe.base import Observer, StepRow
from digen.observe.live import Progress, RunInfo, busy_groups, draw, kl_of, reward_terms
from digen.observe.show import duration, number, share
from digen.types import Decision, Span

REFRESHES_PER_S = 2


def open_view(info: RunInfo, console: Console) -> Observer:
    """A live view where `console` is a terminal that can redraw and shows Unicode, plain lines elsewhere."""
    live = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(info, console) if live else PlainView(info, console)


class LiveView:
    """Redraws one panel in place until `close`, which leaves the last one on the screen and gives the cursor back."""

    def __init__(self, info: RunInfo, console: Console, clock: Callable[[], float] = monotonic) -> None:
        start = clock()
        self.progress = Progress(info)
        self._live = Live(
            get_renderable=lambda: draw(self.progress, clock() - start),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
        )
        atexit.register(self.close)  # an error that skips `close` must not leave a terminal without a cursor
        self._live.start()

    def on_span(self, span: Span) -> None:
        self.progress = self.progress.after_span(span)

    def on_decision(self, decision: Decision) -> None:
        """Decisions are for `decisions.jsonl`."""

    def on_step(self, row: StepRow) -> None:
        self.progress = self.progress.after_step(row)

    def on_note(self, message: str) -> None:
        self.progress = self.progress.after_note(message)

    def close(self) -> None:
        """Stop redrawing; it may be called twice."""
        atexit.unregister(self.close)
        with suppress(OSError, SystemExit):  # rich exits on a broken pipe; a run must not
            self._live.stop()


class PlainView:
    """One line per step, note and loaded group, for log files and pipes. The format is in docs/metrics.md."""

    def __init__(self, info: RunInfo, console: Console) -> None:
        self._console = console
        self._progress = Progress(info)
        self._print(f"digen {info.algorithm} {info.model} seed={info.seed} steps={info.num_steps} run={info.run_dir}")

    def on_span(self, span: Span) -> None:
        if span.kind == "load":
            self._print(f"loaded {span.worker} time={duration(span.end - span.start)}")

    def on_decision(self, decision: Decision) -> None:
        """Decisions are for `decisions.jsonl`."""

    def on_step(self, row: StepRow) -> None:
        self._progress = self._progress.after_step(row)
        fields = " ".join(f"{name}={value}" for name, value in _fields(row))
        eta = duration(self._progress.eta_s)
        self._print(f"step {self._progress.done}/{self._progress.info.num_steps} {fields} eta={eta}")

    def on_note(self, message: str) -> None:
        self._print(f"note: {' '.join(message.split())}")

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, line: str) -> None:
        """Past rich: no wrapping and no markup, and a reader that went away (`| head`) does not stop the run."""
        if self._console.quiet:
            return
        encoding = self._console.encoding
        with suppress(OSError):
            self._console.file.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._console.file.flush()


def _fields(row: StepRow) -> Iterator[tuple[str, str]]:
    """Name and value of what a plain line shows, in fixed order; what a row lacks is left out."""
    kl_name, kl = kl_of(row)
    values: list[tuple[str, Callable[[float | None], str], float | None]] = [
        ("reward", number, row.get("reward/mean")),
        *((f"reward/{name}", number, mean) for name, mean, _ in reward_terms(row)),
        ("ratio_error", number, row.get("ratio/max_error")),
        ("clip", share, row.get("clip_fraction/mean")),
        (kl_name.replace(" ", "_").lower(), number, kl),
        ("grad_norm", number, row.get("grad_norm")),
        ("lr", number, row.get("learning_rate")),
        ("stale", share, row.get("stale_share")),
        ("dropped", number, row.get("groups_dropped")),
        *((f"busy/{name}", share, value) for name, value in busy_groups(row).items()),
        ("time", duration, row.get("step_time_s")),
    ]
    return ((name, show(value)) for name, show, value in values if value is not None)
