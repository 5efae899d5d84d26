"""What a run did, computed from its rows and spans, and the block that closes it on the terminal.

Invariant: pure, except for printing; time is measured by the spans alone and every second of a worker counts once,
however many spans cover it. A bubble (section 2.3 of the paper) is a gap of one worker while the run is not done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from digen.observe.base import StepRow
from digen.observe.files import RunFolder, read_rows, read_spans
from digen.observe.live import reward_terms
from digen.observe.show import duration, number, share
from digen.types import Span

AROUND = 0.1
"""Share of the steps that the first and the last mean are taken over."""

TRAINING = frozenset({"generate", "assist", "score", "update", "sync", "pull"})
"""Kinds of span that make up the wall time of training; loading and saving are outside."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Change:
    """One reward over a run. `first` and `last` are means over the first and last tenth of the steps (at least one)."""

    first: float
    last: float
    best: float
    best_step: int

    @property
    def gain(self) -> float:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker group during the wall time of training: share of it at work, and the gaps."""

    busy: float
    bubbles: int
    bubble_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished (or stopped) run in numbers. NaN: not known."""

    num_steps: int
    rewards: Mapping[str, Change]
    """`mean` (the weighted sum that is trained on) and every single reward."""
    total_s: float
    """From the start of the first to the end of the last span: loading and saving included."""
    training_s: float
    """From the start of the first to the end of the last training span."""
    samples: int
    trained_samples: int
    samples_per_s: float
    """Generated samples per second of `training_s`."""
    groups_dropped: int
    rewards_failed: int
    steps_not_applied: int
    stale_share: float
    max_ratio_error: float
    workers: Mapping[str, Worker]
    wasted_s: float
    """Worker seconds of generating and scoring that no update used: done again after a resume, or cut off."""
    spans: Mapping[str, int]
    """Kind -> how many."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values; NaN is None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarise(rows: Sequence[StepRow], spans: Sequence[Span]) -> Summary:
    """Rows of `metrics.jsonl` in step order and spans of `events.jsonl` in any order; either may be empty."""
    training = [span for span in spans if span.kind in TRAINING]
    window = (min((s.start for s in training), default=0.0), max((s.end for s in training), default=0.0))
    training_s = window[1] - window[0]
    samples = int(_sum(rows, "samples"))
    return Summary(
        num_steps=len(rows),
        rewards=_changes(rows),
        total_s=_total(rows, spans),
        training_s=training_s,
        samples=samples,
        trained_samples=int(_sum(rows, "trained_samples")),
        samples_per_s=samples / training_s if training_s > 0 else math.nan,
        groups_dropped=int(_sum(rows, "groups_dropped")),
        rewards_failed=int(_sum(rows, "reward/failed")),
        steps_not_applied=sum(not row["step_applied"] for row in rows if "step_applied" in row),
        stale_share=_mean(_values(rows, "stale_share")),
        max_ratio_error=max(_values(rows, "ratio/max_error"), default=math.nan),
        workers={name: _worker(name, training, window) for name in sorted({s.worker for s in training})},
        wasted_s=_wasted(training),
        spans=dict(sorted(Counter(span.kind for span in spans).items())),
    )


def summarise_folder(folder: RunFolder) -> Summary:
    """The summary of a run folder. A log that a full disk never let begin counts as empty."""
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    return summarise(rows, read_spans(folder.events) if folder.events.is_file() else [])


def _total(rows: Sequence[StepRow], spans: Sequence[Span]) -> float:
    """Loading ends at time 0, so that spans may start before it."""
    ends = [span.end for span in spans] + _values(rows, "time_s")
    return max(ends) - min([0.0, *(span.start for span in spans)]) if ends else math.nan


def _values(rows: Iterable[StepRow], key: str) -> list[float]:
    """The finite values of a key."""
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def _sum(rows: Iterable[StepRow], key: str) -> float:
    return sum(_values(rows, key))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _changes(rows: Sequence[StepRow]) -> dict[str, Change]:
    names = [
        "mean",
        *(f"{name}/mean" for name in dict.fromkeys(name for row in rows for name, *_ in reward_terms(row))),
    ]
    changes = {name.removesuffix("/mean"): _change(rows, f"reward/{name}") for name in names}
    return {name: change for name, change in changes.items() if change is not None}


def _change(rows: Sequence[StepRow], key: str) -> Change | None:
    points = [(row[key], int(row["step"])) for row in rows if key in row and math.isfinite(row[key])]
    if not points:
        return None
    count = max(1, round(AROUND * len(points)))
    values = [value for value, _ in points]
    best, best_step = max(points, key=lambda point: point[0])
    return Change(_mean(values[:count]), _mean(values[-count:]), best, best_step)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted disjoint intervals that cover the same seconds."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _worker(name: str, training: Sequence[Span], window: Interval) -> Worker:
    """A worker's gaps, with the one before its first and the one after its last piece of work."""
    busy = union((span.start, span.end) for span in training if span.worker == name)
    edges = [window[0], *(edge for interval in busy for edge in interval), window[1]]
    gaps = [end - start for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    length = window[1] - window[0]
    worked = sum(end - start for start, end in busy)
    return Worker(worked / length if length > 0 else math.nan, len(gaps), sum(gaps))


def _wasted(training: Sequence[Span]) -> float:
    """Of every micro-batch that was updated on, the last rollout and the last score were of use; all else was not."""
    updated = {(span.step, span.index) for span in training if span.kind == "update"}
    useful: dict[tuple[int, int, bool], float] = {}
    total = 0.0
    for span in sorted(training, key=lambda span: span.end):
        if span.kind not in {"generate", "assist", "score"}:
            continue
        total += span.end - span.start
        if (span.step, span.index) in updated:
            useful[span.step, span.index, span.kind == "score"] = span.end - span.start
    return max(total - sum(useful.values()), 0.0)


def print_summary(summary: Summary, console: Console, run_dir: Path) -> None:
    """The closing block: what improved, where the files are, the next command to try."""
    for line in _lines(summary, run_dir):
        console.print(line, soft_wrap=True, highlight=False)


def _lines(summary: Summary, run_dir: Path) -> list[Text]:
    workers = "  ".join(f"{name} {share(worker.busy)}" for name, worker in summary.workers.items())
    lines = [
        Text(),
        Text.assemble(
            (f"{summary.num_steps} steps in {duration(summary.total_s)}", "bold"), f", training {_pace(summary)}"
        ),
        *(_reward_line(name, change) for name, change in summary.rewards.items()),
    ]
    if workers:
        lines.append(_labelled("busy", workers))
    lines += [_labelled("watch", text) for text in _warnings(summary)]
    lines += [
        _labelled("files", f"{run_dir}"),
        _labelled("", "metrics.jsonl  events.jsonl  samples/  checkpoints/  logs/"),
        _labelled("next", f"digen eval {run_dir}", style="bold"),
    ]
    return lines


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:<9} ", "dim"), (text, style))


def _pace(summary: Summary) -> str:
    return f"{duration(summary.training_s)}, {summary.samples} samples, {number(summary.samples_per_s)} samples/s"


def _reward_line(name: str, change: Change) -> Text:
    up = change.gain > 0
    label = "reward" if name == "mean" else name
    line = _labelled(label, f"{number(change.first)} -> ")
    line.append(number(change.last), style="bold green" if up else "bold yellow")
    line.append(f"  ({change.gain:+.4f}; best {number(change.best)} in step {change.best_step + 1})")
    return line


def _warnings(summary: Summary) -> list[str]:
    """What a person should know before trusting the run; nothing when all is well."""
    found = [
        (summary.groups_dropped, "groups were dropped"),
        (summary.rewards_failed, "samples had a reward that failed (they are not counted as 0)"),
        (summary.steps_not_applied, "steps were not applied (zero or non-finite gradient)"),
    ]
    return [f"{count} {what}" for count, what in found if count]
