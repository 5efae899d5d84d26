"""What a run did, computed from its rows and spans, and the block that closes it on the terminal.

Invariant: pure, except for printing; time is measured by the spans alone and every second of a worker counts once,
however many spans cover it: as work, or as a bubble of one cause (`observe/bubbles.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from digen.observe.base import StepRow
from digen.observe.bubbles import (
    CAUSES,
    TRAINING,
    Assists,
    Cause,
    Interval,
    Wait,
    assists,
    by_worker,
    gaps,
    training_window,
    waits,
)
from digen.observe.files import RunFolder, read_decisions, read_rows, read_spans
from digen.observe.live import reward_terms
from digen.observe.show import duration, number, share
from digen.types import Decision, Span

AROUND = 0.1
"""Share of the steps that the first and the last mean are taken over."""

NOTHING = 5e-4
"""A share of time that would be shown as 0.0%."""

LINES = 6
"""Workers whose bubbles the closing block shows one by one; generators beyond them are shown as a mean."""


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
    """One worker group during the wall time of training: share of it at work, the gaps, and what they waited for."""

    busy: float
    bubbles: int
    bubble_s: float
    causes: Mapping[Cause, float]
    """Share of the wall time that was spent waiting, by cause; with `busy` they add up to 1."""


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
    assists: Assists
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


def summarise(rows: Sequence[StepRow], spans: Sequence[Span], decisions: Sequence[Decision] = ()) -> Summary:
    """Rows of `metrics.jsonl` in step order, spans and decisions in any order; each may be empty."""
    window = training_window(spans)
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
        workers=_workers(spans, window),
        assists=assists(spans, decisions),
        wasted_s=_wasted(spans),
        spans=dict(sorted(Counter(span.kind for span in spans).items())),
    )


def summarise_folder(folder: RunFolder) -> Summary:
    """The summary of a run folder. A log that a full disk never let begin counts as empty."""
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    spans = read_spans(folder.events) if folder.events.is_file() else []
    return summarise(rows, spans, read_decisions(folder.decisions) if folder.decisions.is_file() else [])


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


def _workers(spans: Sequence[Span], window: Interval) -> dict[str, Worker]:
    """Every worker that did any training work."""
    bubbles: dict[str, list[Wait]] = {}
    for wait in waits(spans):
        bubbles.setdefault(wait.worker, []).append(wait)
    return {
        name: _worker(own, window, bubbles.get(name, []))
        for name, own in by_worker(spans).items()
        if any(span.kind in TRAINING for span in own)
    }


def _worker(own: Sequence[Span], window: Interval, bubbles: Sequence[Wait]) -> Worker:
    """A worker's gaps, with the one before its first and the one after its last piece of work."""
    length, lengths = window[1] - window[0], [end - start for start, end in gaps(own, window)]
    if length <= 0:
        return Worker(math.nan, 0, 0.0, {})
    causes = {c: sum(wait.length_s for wait in bubbles if wait.cause == c) / length for c in CAUSES}
    return Worker(
        busy=1.0 - sum(lengths) / length,
        bubbles=len(lengths),
        bubble_s=sum(lengths),
        causes={cause: part for cause, part in causes.items() if part > 0},
    )


def _wasted(spans: Sequence[Span]) -> float:
    """Of every micro-batch that was trained on, the last score and the last whole rollout before that, nothing else.

    A rollout may be in parts, made by several workers: it is whole when it has as many rows as were scored.
    """
    trained: set[tuple[int, int]] = set()
    missing: dict[tuple[int, int], int] = {}
    wasted = 0.0
    in_order = sorted(spans, key=lambda span: (span.end, span.start))
    for span in reversed(in_order):  # of equal ones (work that takes no time) the later in the log is the later
        key, rows, useful = (span.step, span.index), max(span.rows, 1), True
        if span.kind in ("update", "help"):
            trained.add(key)
        elif span.kind == "score":
            if useful := key in trained and key not in missing:
                missing[key] = rows
        elif span.kind in ("generate", "assist") and (useful := missing.get(key, 0) > 0):
            missing[key] -= rows
        wasted += 0.0 if useful else span.end - span.start
    return wasted


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
    lines += [_labelled("" if k else "bubbles", text) for k, text in enumerate(_bubbles(summary.workers))]
    if summary.assists.taken or summary.assists.skipped:
        lines.append(_labelled("assists", assists_line(summary.assists)))
    lines += [_labelled("watch", text) for text in _warnings(summary)]
    lines += [
        _labelled("files", f"{run_dir}"),
        _labelled("", "metrics.jsonl  events.jsonl  samples/  checkpoints/  logs/"),
        _labelled("next", f"digen eval {run_dir}", style="bold"),
        _labelled("", f"digen trace {run_dir}", style="bold"),
    ]
    return lines


def _bubbles(workers: Mapping[str, Worker]) -> list[str]:
    """One line for each worker with bubbles, longest cause first; many workers are told as a mean of those alike."""
    alike: dict[str, list[Worker]] = {}
    for name, worker in workers.items():
        alike.setdefault(name if len(workers) <= LINES else name.rstrip("0123456789").rstrip("-"), []).append(worker)
    lines = []
    for name, group in alike.items():
        causes = mean_causes(group)
        if sum(causes.values()) >= NOTHING:
            who = name if len(group) == 1 else f"{len(group)} {name}s"
            lines.append(f"{who} {share(sum(causes.values()))}: {causes_line(causes)}")
    return lines


def mean_causes(workers: Sequence[Worker]) -> dict[Cause, float]:
    """Mean share of the wall time that the workers waited, by cause, the longest first."""
    means = {cause: fmean(worker.causes.get(cause, 0.0) for worker in workers) for cause in CAUSES} if workers else {}
    return dict(sorted(((c, part) for c, part in means.items() if part > 0), key=lambda item: -item[1]))


def causes_line(causes: Mapping[Cause, float]) -> str:
    """`waits for trainer 12%, sync 3.0%`, without what rounds to nothing."""
    return ", ".join(f"{CAUSES[cause]} {share(part)}" for cause, part in causes.items() if part >= NOTHING) or "none"


def assists_line(found: Assists) -> str:
    """`12 taken, 5 skipped; step ends predicted within 1.2% of the step (median), 4.0% (largest)`."""
    text = f"{found.taken} taken, {found.skipped} skipped"
    if not found.predicted:
        return text
    errors = f"{share(found.median_error)} (median), {share(found.max_error)} (largest)"
    return f"{text}; step ends predicted within {errors}"


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
