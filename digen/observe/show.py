"""Numbers as people read them: durations, shares, small quantities, sparklines. Pure; used by every view of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float | None) -> str:
    """`0.8s`, `12s`, `3m12s`, `1h02m`; `-` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def number(value: float | None) -> str:
    """Counts as they are, else four digits; scientific below 1e-3, so that a ratio error of 1e-6 is not `0.0000`.

    `-` for a number that there is not, `nan` for one that went wrong.
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:#.4g}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:.2e}"


def share(value: float | None) -> str:
    """A share of 1 as a percentage: `3.1%`, `71%`; `-` and `nan` as in `number`."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{100 * value:.0f}%" if value == 0 or value >= 0.0995 else f"{100 * value:.1f}%"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as bars between their lowest and highest; a value that is not finite is a gap."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    top = len(BARS) - 1
    if high == low:
        return "".join(BARS[top // 2] if math.isfinite(value) else " " for value in shown)
    return "".join(BARS[round((value - low) / (high - low) * top)] if math.isfinite(value) else " " for value in shown)


def bar(filled: float, width: int) -> str:
    """A share of 1 as a bar of `width` cells; not finite: an empty one."""
    cells = round(min(max(filled, 0.0), 1.0) * width) if math.isfinite(filled) else 0
    return "█" * cells + "░" * (width - cells)


def cut(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
