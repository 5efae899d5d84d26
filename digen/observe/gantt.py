"""A stretch of a run as text: a lane for each worker, a letter for what it does.

Invariant: pure; a cell shows what takes most of its time; calls of one kind are in small letters and capitals by turns,
so that neighbours are told apart; lanes, axis and legend stay within the width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple

from rich.text import Text

from digen.observe.show import number, share
from digen.types import Span, SpanKind

IDLE = "·"


class Look(NamedTuple):
    """How a kind of work is drawn."""

    letter: str
    words: str
    style: str


LOOKS: dict[SpanKind, Look] = {
    "generate": Look("g", "generate", "green"),
    "assist": Look("a", "assist", "yellow"),
    "score": Look("s", "score", "cyan"),
    "update": Look("u", "update", "blue"),
    "help": Look("h", "help", "magenta"),
    "reduce": Look("r", "reduce", "magenta"),
    "sync": Look("y", "sync", "red"),
    "pull": Look("p", "pull", "red"),
    "save": Look("v", "save", "dim"),
    "load": Look("l", "load", "dim"),
}
AHEAD = Look("n", "generate for the next step", "bold green")


def gantt(spans: Iterable[Span], window: tuple[float, float], step: int, width: int = 100) -> list[Text]:
    """Lanes of all workers between two times (s since the run's start), in which `step` is the current step."""
    within = [span for span in spans if _overlap(span, *window) > 0]
    names = sorted({span.worker for span in within})
    margin = max(map(len, names), default=0) + 2
    cells = max(width - margin - 6, 10)
    lanes = [_lane(name, [s for s in within if s.worker == name], window, step, margin, cells) for name in names]
    used = [_look(span, step) for span in within]
    legend = [f"{look.letter} {look.words}" for look in (*LOOKS.values(), AHEAD) if look in used]
    indent = " " * margin
    axis = Text(indent + "0" + f"{number(window[1] - window[0])} s".rjust(cells - 1), style="dim")
    lines = wrap(", ".join([*legend, f"{IDLE} idle"]), width, initial_indent=indent, subsequent_indent=indent)
    return [axis, *lanes, *(Text(line, style="dim") for line in lines)]


def _lane(name: str, spans: Sequence[Span], window: tuple[float, float], step: int, margin: int, cells: int) -> Text:
    """One worker, and at its end the share of the time in which it is busy."""
    lane, each = Text(name.ljust(margin)), (window[1] - window[0]) / cells
    drawn = list(_letters(spans, step))
    for cell in range(cells):
        start = window[0] + cell * each
        letter, style, longest = IDLE, "dim", each - sum(_overlap(span, start, start + each) for span in spans)
        for span, look, shown in drawn:
            if (overlap := _overlap(span, start, start + each)) > longest:
                letter, style, longest = shown, look.style, overlap
        lane.append(letter, style)
    worked = sum(_overlap(span, *window) for span in spans)
    return lane.append(share(worked / (window[1] - window[0])).rjust(6), "dim")


def _letters(spans: Iterable[Span], step: int) -> Iterator[tuple[Span, Look, str]]:
    """Each call with its letter, every second one of a look as a capital."""
    seen: Counter[Look] = Counter()
    for span in sorted(spans, key=lambda span: span.start):
        look = _look(span, step)
        yield span, look, look.letter.upper() if seen[look] % 2 else look.letter
        seen[look] += 1


def _look(span: Span, step: int) -> Look:
    return AHEAD if span.kind == "generate" and span.step > step else LOOKS[span.kind]


def _overlap(span: Span, start: float, end: float) -> float:
    return max(min(span.end, end) - max(span.start, start), 0.0)
