"""Curves of a metric over the steps of one or several runs, as a PNG for the documentation.

Invariant: every point drawn is a row of `metrics.jsonl`; the thick line is a running mean of the pale one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from digen.observe.base import StepRow
from digen.observe.files import replacing

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 40, 48
SHARPNESS, DENSITY = 4, 2
"""Drawn 4 times larger and scaled down to 2 times: Pillow's lines have no smoothing of their own."""
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#57606a", "#bf3989", "#9a6700")
LEGEND_ROWS, LEGEND_WIDTH = 4, 160
INK, PALE = "#1b1f24", "#d8dee4"


@dataclass(frozen=True, slots=True)
class _Axes:
    """Maps (step, value) to pixels of the large drawing."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def at(self, point: Point) -> Point:
        across = (point[0] - self.steps[0]) / (self.steps[1] - self.steps[0])
        up = (point[1] - self.values[0]) / (self.values[1] - self.values[0])
        x, y = LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        return x * SHARPNESS, y * SHARPNESS


def plot_curves(
    rows_by_name: Mapping[str, Sequence[StepRow]], path: Path, key: str = "reward/mean", label: str | None = None
) -> None:
    """Write one curve per run: `rows_by_name` maps the name in the legend to rows of `metrics.jsonl`.

    `label` stands at the value axis (default: the key). Raises ValueError when a run has no finite value of `key`.
    """
    curves = {name: _points(rows, key) for name, rows in rows_by_name.items()}
    empty = [name for name, points in curves.items() if not points]
    if empty or not curves:
        raise ValueError(f"key: got {key!r}, of which {', '.join(empty) or 'no run'} has no finite value")
    every = [point for points in curves.values() for point in points]
    axes = _Axes(_range([x for x, _ in every]), _padded(*_range([y for _, y in every])))
    image = Image.new("RGB", (WIDTH * SHARPNESS, HEIGHT * SHARPNESS), "#ffffff")
    draw = ImageDraw.Draw(image)
    _frame(draw, axes, label or key)
    for index, (name, points) in enumerate(curves.items()):
        _curve(draw, axes, points, COLOURS[index % len(COLOURS)])
        _legend(draw, index, name)
    smooth = image.resize((WIDTH * DENSITY, HEIGHT * DENSITY), Image.Resampling.LANCZOS)
    with replacing(path) as temporary:
        smooth.quantize(128).save(temporary, format="PNG", optimize=True)


def _points(rows: Sequence[StepRow], key: str) -> list[Point]:
    return [(row["step"], row[key]) for row in rows if key in row and math.isfinite(row[key])]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _padded(low: float, high: float) -> tuple[float, float]:
    return low - 0.06 * (high - low), high + 0.06 * (high - low)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten apart) between low and high; low < high."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    gap = next(unit * power for unit in (1, 2, 5, 10, 20) if (high - low) / (unit * power) <= most - 1)
    return [round(gap * index, 12) for index in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SHARPNESS)


def _frame(draw: ImageDraw.ImageDraw, axes: _Axes, label: str) -> None:
    for value in ticks(*axes.values):
        left, right = axes.at((axes.steps[0], value)), axes.at((axes.steps[1], value))
        draw.line((left, right), fill=PALE, width=SHARPNESS)
        draw.text((left[0] - 8 * SHARPNESS, left[1]), f"{value:g}", fill=INK, font=_font(12), anchor="rm")
    for step in ticks(*axes.steps, most=10):
        x, y = axes.at((step, axes.values[0]))
        draw.text((x, y + 8 * SHARPNESS), f"{step:g}", fill=INK, font=_font(12), anchor="mt")
    middle = (LEFT + WIDTH - RIGHT) * SHARPNESS // 2
    draw.text((middle, (HEIGHT - 8) * SHARPNESS), "global step", fill=INK, font=_font(13), anchor="mb")
    draw.text((12 * SHARPNESS, 10 * SHARPNESS), label, fill=INK, font=_font(13), anchor="lt")


def _curve(draw: ImageDraw.ImageDraw, axes: _Axes, points: Sequence[Point], colour: str) -> None:
    pale = tuple(round(255 - (255 - int(colour[i : i + 2], 16)) * 0.35) for i in (1, 3, 5))
    draw.line([axes.at(point) for point in points], fill=pale, width=SHARPNESS)
    draw.line([axes.at(point) for point in _smooth(points)], fill=colour, width=2 * SHARPNESS, joint="curve")
    if len(points) == 1:
        (x, y), r = axes.at(points[0]), 3 * SHARPNESS
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Mean over the tenth of the curve around each point, of what there is of it at the ends."""
    half = len(points) // 20
    near = [points[max(index - half, 0) : index + half + 1] for index in range(len(points))]
    return [(x, sum(y for _, y in part) / len(part)) for (x, _), part in zip(points, near, strict=True)]


def _legend(draw: ImageDraw.ImageDraw, index: int, name: str) -> None:
    column, row = divmod(index, LEGEND_ROWS)
    x, y = (LEFT + 12 + LEGEND_WIDTH * column) * SHARPNESS, (TOP + 12 + 18 * row) * SHARPNESS
    draw.line((x, y, x + 20 * SHARPNESS, y), fill=COLOURS[index % len(COLOURS)], width=3 * SHARPNESS)
    draw.text((x + 28 * SHARPNESS, y), name, fill=INK, font=_font(12), anchor="lm")
