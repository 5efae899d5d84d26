"""The timeline of a run as a PNG: one lane per worker, work as tall bars, bubbles as low ones coloured by cause.

Invariant: every bar is a span or a bubble of the timeline. Of a long run some whole steps of its middle are shown, and
the title says which; the totals are always of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from digen.observe.bubbles import CAUSES, Interval
from digen.observe.curves import ticks
from digen.observe.files import replacing
from digen.observe.show import share
from digen.observe.timeline import CAUSE_COLOURS, KIND_COLOURS, Timeline
from digen.types import Span

Box = tuple[float, float, float, float]

WIDTH, MARGIN = 1280, 16
TITLE, LEGEND, RULER, LINE = 30, 22, 44, 20
BUSY = 60
"""Width of the column with each worker's busy share."""
MOST = 240
"""Pieces of work in one lane that can still be told apart."""
LOW = 0.38
"""Height of a bubble, as a share of the lane."""
NOTE = "3.1: step 3, micro-batch 1; odd steps are lighter"
PAPER, INK, PALE, EDGE, BAND = "#ffffff", "#1b1f24", "#57606a", "#d0d7de", "#f3f5f8"


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where things are, in pixels of the final picture; drawn `scale` times larger and scaled down to `scale` / 2.

    Pillow's lines have no smoothing of their own; very many lanes are drawn smaller, to fit into memory.
    """

    timeline: Timeline
    shown: Interval
    left: float
    lane: int
    draw: ImageDraw.ImageDraw
    scale: int

    @property
    def top(self) -> int:
        return MARGIN + TITLE + LEGEND * 2 + RULER

    @property
    def bottom(self) -> int:
        return self.top + self.lane * len(self.timeline.lanes)

    def x(self, time_s: float) -> float:
        low, high = self.shown
        across = (min(max(time_s, low), high) - low) / (high - low)
        return self.left + across * (WIDTH - MARGIN - BUSY - self.left)

    def box(self, box: Box, fill: str) -> None:
        """A filled rectangle, at least a hair wide."""
        x0, y0, x1, y1 = (round(edge * self.scale) for edge in box)
        self.draw.rectangle((x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)), fill=fill)

    def line(self, x: float, top: float, bottom: float, fill: str) -> None:
        s = self.scale
        self.draw.line((x * s, top * s, x * s, bottom * s), fill=fill, width=max(1, s // 2))

    def text(self, x: float, y: float, text: str, size: int = 12, fill: str = INK, anchor: str = "lm") -> None:
        self.draw.text((x * self.scale, y * self.scale), text, fill=fill, font=font(size * self.scale), anchor=anchor)


def draw_lanes(timeline: Timeline, path: Path) -> None:
    """Write the picture, 2 pixels for each of its own."""
    low, high = part_to_show(timeline)
    shown = (low, high if high > low else low + 1.0)
    many = len(timeline.lanes)
    lane = 34 if many <= 8 else 22 if many <= 64 else 8
    scale = 4 if many <= 64 else 2
    left = MARGIN + max(length(name, 12) for name in timeline.lanes) + 10
    height = MARGIN * 2 + TITLE + LEGEND * 2 + RULER + lane * many + 10 + LINE * len(timeline.facts())
    image = Image.new("RGB", (WIDTH * scale, height * scale), PAPER)
    sheet = Sheet(timeline, shown, left, lane, ImageDraw.Draw(image), scale)
    _heading(sheet)
    _ruler(sheet)
    for row, worker in enumerate(timeline.lanes):
        _lane(sheet, worker, sheet.top + row * lane)
    _marks(sheet)
    for row, fact in enumerate(timeline.facts()):
        sheet.text(MARGIN, sheet.bottom + 10 + LINE * (row + 0.5), fact, 13)
    smooth = image.resize((image.width * 2 // scale, image.height * 2 // scale), Image.Resampling.LANCZOS)
    with replacing(path) as temporary:
        smooth.save(temporary, format="PNG", optimize=True)


def part_to_show(timeline: Timeline) -> Interval:
    """The wall time of training, or as many whole steps of its middle as can be told apart."""
    steps = timeline.steps
    busiest = max(len(lane) for lane in timeline.lanes.values())
    count = max(1, int(len(steps) * MOST / busiest))
    if busiest <= MOST or count >= len(steps):
        return timeline.window
    first = (len(steps) - count) // 2
    return steps[first].start, steps[first + count - 1].end


def shade(colour: str, step: int) -> str:
    """Steps alternate between a full and a lighter tone."""
    return mixed(colour, 0.38) if step % 2 else colour


def mixed(colour: str, white: float) -> str:
    """The colour with a share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def length(text: str, size: int) -> float:
    return font(size).getlength(text)


def _heading(sheet: Sheet) -> None:
    timeline, (low, high) = sheet.timeline, sheet.shown
    title, inside = timeline.title, [t.step for t in timeline.steps if low <= t.start and t.end <= high]
    if len(inside) < len(timeline.steps):
        title += f": steps {inside[0]} to {inside[-1]} of {len(timeline.steps)}"
    sheet.text(MARGIN, MARGIN + TITLE / 2 - 4, title, 17)
    kinds = [kind for kind in timeline.kinds if _in_window(timeline, kind)]
    work: list[tuple[str, str, float]] = [(kind, KIND_COLOURS[kind], 1.0) for kind in kinds]
    bubbles = [(CAUSES[cause], CAUSE_COLOURS[cause], LOW) for cause in timeline.causes]
    for row, entries in enumerate((work, bubbles)):
        x, y = float(MARGIN), MARGIN + TITLE + LEGEND * row
        if entries and row:
            sheet.text(x, y + LEGEND / 2, "bubbles", 12, PALE)
            x += length("bubbles", 12) + 12
        for name, colour, tall in entries:
            sheet.box((x, y + 4 + 13 * (1 - tall), x + 18, y + 17), colour)
            sheet.text(x + 24, y + LEGEND / 2, name)
            x += 24 + length(name, 12) + 18
    sheet.text(WIDTH - MARGIN, MARGIN + TITLE + LEGEND / 2, NOTE, 11, PALE, "rm")


def _in_window(timeline: Timeline, kind: str) -> bool:
    low, high = timeline.window
    return any(span.kind == kind and span.end > low and span.start < high for span in timeline.spans)


def _ruler(sheet: Sheet) -> None:
    """Seconds above, steps below; every second step has a band that runs through the lanes."""
    top, (low, high) = sheet.top - RULER, sheet.shown
    for time in ticks(low, high, most=12):
        sheet.line(sheet.x(time), top + 16, top + 20, PALE)
        sheet.text(sheet.x(time), top + 8, f"{time:g}s", 11, PALE, "mm")
    for step in sheet.timeline.steps:
        x0, x1 = sheet.x(step.start), sheet.x(step.end)
        if x1 <= x0:
            continue
        if step.step % 2 == 0:
            sheet.box((x0, top + 22, x1, sheet.bottom), BAND)
        if (name := _fitting((f"step {step.step}", f"{step.step}"), 11, x1 - x0)) is not None:
            sheet.text((x0 + x1) / 2, top + 33, name, 11, PALE, "mm")


def _marks(sheet: Sheet) -> None:
    """A line where each sync ended, with the version that it made."""
    for step in sheet.timeline.steps:
        if sheet.shown[0] < step.end <= sheet.shown[1]:
            sheet.line(sheet.x(step.end), sheet.top - 20, sheet.bottom, INK)
            name = f"v{step.step + 1}"
            sheet.text(sheet.x(step.end) - 3, sheet.top - 11, name, 10, INK, "rm")


def _lane(sheet: Sheet, worker: str, top: int) -> None:
    timeline, pad = sheet.timeline, 3 if sheet.lane > 10 else 1
    floor = top + sheet.lane - pad
    sheet.box((sheet.left, floor, WIDTH - MARGIN - BUSY, floor + 0.5), EDGE)
    if sheet.lane > 10:
        sheet.text(sheet.left - 10, top + sheet.lane / 2, worker, 12, INK, "rm")
        busy = timeline.summary.workers.get(worker)
        sheet.text(WIDTH - MARGIN, top + sheet.lane / 2, share(busy.busy) if busy else "-", 12, INK, "rm")
    low = floor - (sheet.lane - 2 * pad) * LOW
    for wait in timeline.waits[worker]:
        if _visible(sheet, wait.start, wait.end):
            sheet.box((sheet.x(wait.start), low, sheet.x(wait.end), floor), CAUSE_COLOURS[wait.cause])
    for span in timeline.lanes[worker]:
        if _visible(sheet, span.start, span.end):
            _bar(sheet, span, (sheet.x(span.start), top + pad, sheet.x(span.end), floor))


def _visible(sheet: Sheet, start: float, end: float) -> bool:
    return end > sheet.shown[0] and start < sheet.shown[1]


def _bar(sheet: Sheet, span: Span, box: Box) -> None:
    colour = shade(KIND_COLOURS[span.kind], span.step)
    x0, top, x1, bottom = box
    sheet.box((x0, top, x1 - 0.5 if x1 - x0 > 2 else x1, bottom), colour)
    if (name := _fitting(_names(span), 11, x1 - x0 - 4)) is not None and sheet.lane > 10:
        sheet.text((x0 + x1) / 2, (top + bottom) / 2, name, 11, ink_on(colour), "mm")


def _names(span: Span) -> Iterator[str]:
    """What may stand on a bar, the longest first: step and micro-batch, or the version."""
    if span.index >= 0:
        yield f"{span.step}.{span.index}"
        yield f"{span.index}"
    else:
        yield f"v{span.version}"


def _fitting(names: Iterable[str], size: int, width: float) -> str | None:
    return next((name for name in names if length(name, size) <= width), None)


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on the colour (WCAG relative luminance)."""
    red, green, blue = ((int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else INK
