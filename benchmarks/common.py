"""What the benchmarks share: modes by name, steps in virtual time, and how results are printed, written and drawn.

Invariant: simulated steps come from the real driver on simulated groups (`digen/testing`), so a benchmark of
schedules cannot be right where the driver is wrong. The modes are those of the paper's section 5.6, each adding one
idea to the one before, and after them what digen adds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table as RichTable

from digen.observe.bubbles import CAUSES, waits
from digen.observe.curves import COLOURS, INK, PALE, ticks
from digen.observe.files import replacing, write_atomic
from digen.testing import Recorder, SimulatedGroup, simulate, simulated_config

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"

TAG = {"mode": "pipelined", "tag": "bts"}
SHARED = {"mode": "pipelined", "assist": "both"}
MODES: dict[str, dict[str, Any]] = {
    "colocated": {"mode": "colocated"},
    "naive": {"mode": "naive"},
    "gap": {"mode": "pipelined"},
    "gap-tcss": {"mode": "pipelined", "staleness": 0.5},
    "tsp": {"mode": "pipelined"},
    "tag-static": {"mode": "pipelined", "tag": "static({assists})"},
    "bts": TAG,
    "tcss": {**TAG, "staleness": 0.5},
    "shared-trainer": {"mode": "pipelined", "assist": "trainer"},
    "shared": SHARED,
    "shared-tcss": {**SHARED, "staleness": 0.5},
}
"""Name -> `schedule.` settings. `tag-static` is given the number of assists at which both sides have the same work."""
UNSTACKED = ("colocated", "naive", "gap", "gap-tcss")
"""Modes without TSP."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one micro-batch (or one sync) takes, in any one unit; `stacked` is its update under TSP."""

    generate: float
    update: float
    stacked: float
    score: float = 0.0
    assist: float | None = None
    """None: as long as `generate`."""
    sync: float = 0.0
    pull: float = 0.0

    @property
    def assists(self) -> float:
        return self.generate if self.assist is None else self.assist

    def update_of(self, mode: str) -> float:
        return self.update if mode in UNSTACKED else self.stacked

    def balanced(self, microbatches: int) -> int:
        """How many of a step's micro-batches the trainer generates when both sides have the same work."""
        left = self.generate + self.score - self.stacked
        return max(0, round(microbatches * left / (self.generate + self.assists)))


def schedule_of(mode: str, assists: int = 0) -> dict[str, Any]:
    """The `schedule.` settings of a mode."""
    settings = dict(MODES[mode])
    if "tag" in settings:
        settings["tag"] = settings["tag"].format(assists=assists)
    return settings


class Steady(NamedTuple):
    """Steps of a run that has settled: mean seconds of one, and each worker's busy share."""

    step_s: float
    busy: Mapping[str, float]


def steady(seen: Recorder, warm_up: int) -> Steady:
    """What the steps between the first `warm_up` ones and the last took: under TCSS the last leaves none to prepare."""
    rows = seen.rows[warm_up:-1]
    busy = {key.removeprefix("busy/"): fmean(row[key] for row in rows) for key in rows[0] if key.startswith("busy/")}
    return Steady(fmean(row["step_time_s"] for row in rows), busy)


def waited(seen: Recorder, warm_up: int) -> dict[str, dict[str, float]]:
    """Worker -> cause -> the share of those steps for which it waited."""
    low, high = seen.rows[warm_up - 1]["time_s"], seen.rows[-2]["time_s"]
    lost = {span.worker: dict.fromkeys(CAUSES, 0.0) for span in seen.spans}
    for wait in waits(seen.spans):
        lost[wait.worker][wait.cause] += max(0.0, min(wait.end, high) - max(wait.start, low)) / (high - low)
    return lost


def simulated(
    mode: str, costs: Costs, microbatches: int, *, slower: Sequence[float] = (1.0,), steps: int = 7, warm_up: int = 3
) -> Steady:
    """Steps of the real driver in virtual time. Generator k takes `slower[k]` times as long for everything."""
    update = costs.update_of(mode)
    generators = [
        SimulatedGroup(
            f"generator-{k}",
            generate=factor * costs.generate,
            score=factor * costs.score,
            update=factor * update,
            pull=factor * costs.pull,
        )
        for k, factor in enumerate(slower)
    ]
    trainer = SimulatedGroup("trainer", generate=costs.assists, update=update, sync=costs.sync)
    schedule = schedule_of(mode, costs.balanced(microbatches))
    config = simulated_config(steps=steps, samples_per_prompt=16, schedule=schedule)
    return steady(simulate(config, generators, trainer, prompts_per_step=microbatches), warm_up)


# Results --------------------------------------------------------------------------------------------------------------


WIDE = 132
"""Columns of a terminal that tables are given, also where the output is a file."""


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(cells)} |" for cells in lines)])

    def show(self) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for k, column in enumerate(self.columns):
            table.add_column(column, justify="right" if k else "left")
        for row in self.rows:
            table.add_row(*row)
        Console(width=max(Console().width, WIDE)).print(table)


def arguments(doc: str | None, *more: Callable[[argparse.ArgumentParser], Any]) -> argparse.Namespace:
    """`--out`, `--quick` and what the functions in `more` add."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the JSON file and the picture")
    parser.add_argument("--quick", action="store_true", help="a small part of it, to see that it works")
    for add in more:
        add(parser)
    return parser.parse_args()


def publish(name: str, out: Path, tables: Sequence[Table], document: Mapping[str, Any], chart: Chart) -> None:
    """Print the tables; write `name.json`, `name.png`, and the part of a page beside `out` that has its markers."""
    for table in tables:
        table.show()
    write_atomic(out / f"{name}.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    chart.draw(out / f"{name}.png")
    start, end = f"<!-- results of {name}.py -->", f"<!-- end of {name}.py -->"
    for page in out.parent.rglob("*.md") if out == DOCS else ():
        if start in (text := page.read_text()):
            before, after = text.split(start)[0], text.split(end)[1]
            body = "\n\n".join(table.markdown() for table in tables)
            write_atomic(page, f"{before}{start}\n{body}\n{end}{after}")


# Pictures -------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 40, 60
SHARPNESS, DENSITY = 4, 2
"""Drawn 4 times larger and scaled down to 2 times, as in `digen/observe/curves.py`."""

Value = float | tuple[float, float] | None
"""A point, a range, or nothing."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over named categories: points joined by a line, or (low, high) ranges as bars beside each other."""

    categories: Sequence[str]
    series: Mapping[str, Sequence[Value]]
    label: str
    """Of the value axis."""
    below: str
    """Of the categories."""
    log: bool = False

    def draw(self, path: Path) -> None:
        image = Image.new("RGB", (WIDTH * SHARPNESS, HEIGHT * SHARPNESS), "#ffffff")
        canvas = _Canvas(ImageDraw.Draw(image), self)
        canvas.frame()
        for k, (name, values) in enumerate(self.series.items()):
            canvas.one(k, values)
            canvas.legend(k, name)
        smooth = image.resize((WIDTH * DENSITY, HEIGHT * DENSITY), Image.Resampling.LANCZOS)
        with replacing(path) as temporary:
            smooth.quantize(128).save(temporary, format="PNG", optimize=True)


class _Canvas:
    """Maps (category, value) to pixels of the large drawing."""

    def __init__(self, pen: ImageDraw.ImageDraw, chart: Chart) -> None:
        self.pen, self.chart = pen, chart
        values = [v for series in chart.series.values() for value in series for v in _ends(value)]
        low, high = (math.log10(v) if chart.log else v for v in (min(values), max(values)))
        edge = 0.08 * (high - low) or 0.5
        room = 0.06 * len(chart.series) * (high - low)  # the legend is above everything
        self.low, self.high = low - edge, high + edge + room
        if not chart.log and 0 <= low < 0.5 * high:
            self.low = 0.0

    def at(self, category: float, value: float) -> tuple[float, float]:
        up = ((math.log10(value) if self.chart.log else value) - self.low) / (self.high - self.low)
        across = (category + 0.5) / len(self.chart.categories)
        x, y = LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        return x * SHARPNESS, y * SHARPNESS

    def marks(self) -> list[float]:
        if not self.chart.log:
            return ticks(self.low, self.high)
        whole = range(math.ceil(self.low), math.floor(self.high) + 1)
        every = [10.0**k * unit for k in range(math.floor(self.low), math.ceil(self.high)) for unit in (1, 2, 5)]
        inside = [v for v in every if self.low <= math.log10(v) <= self.high]
        return inside if len(whole) < 3 else [10.0**k for k in whole]

    def text(self, x: float, y: float, words: str, anchor: str, size: int = 12) -> None:
        self.pen.text((x, y), words, fill=INK, font=ImageFont.load_default(size * SHARPNESS), anchor=anchor)

    def frame(self) -> None:
        chart, last = self.chart, len(self.chart.categories) - 0.5
        for value in self.marks():
            left, right = self.at(-0.5, value), self.at(last, value)
            self.pen.line((left, right), fill=PALE, width=SHARPNESS)
            self.text(left[0] - 8 * SHARPNESS, left[1], f"{value:g}", "rm")
        for k, name in enumerate(chart.categories):
            self.text(
                self.at(k, 10**self.low if chart.log else self.low)[0], (HEIGHT - BOTTOM + 8) * SHARPNESS, name, "ma"
            )
        self.text((LEFT + WIDTH - RIGHT) * SHARPNESS // 2, (HEIGHT - 8) * SHARPNESS, chart.below, "mb", 13)
        self.text(12 * SHARPNESS, 10 * SHARPNESS, chart.label, "lt", 13)

    def one(self, k: int, values: Sequence[Value]) -> None:
        colour, ranges = COLOURS[k % len(COLOURS)], any(isinstance(v, tuple) for v in values)
        width = 0.7 / len(self.chart.series) if ranges else 0.0
        offset = (k - (len(self.chart.series) - 1) / 2) * width
        points = [self.at(c + offset, v) for c, v in enumerate(values) if isinstance(v, (int, float))]
        if not ranges:
            self.pen.line(points, fill=colour, width=2 * SHARPNESS, joint="curve")
        for x, y in points:
            r = 3 * SHARPNESS
            self.pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        for c, value in enumerate(values):
            if isinstance(value, tuple):
                (left, bottom), (right, top) = (
                    self.at(c + offset - 0.4 * width, value[0]),
                    self.at(c + offset + 0.4 * width, value[1]),
                )
                self.pen.rectangle((left, top - SHARPNESS, right, bottom + SHARPNESS), fill=colour)

    def legend(self, k: int, name: str) -> None:
        x, y = (LEFT + 12) * SHARPNESS, (TOP + 10 + 16 * k) * SHARPNESS
        self.pen.line((x, y, x + 20 * SHARPNESS, y), fill=COLOURS[k % len(COLOURS)], width=4 * SHARPNESS)
        self.text(x + 28 * SHARPNESS, y, name, "lm")


def _ends(value: Value) -> tuple[float, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
