"""A plan as people read it: the table of modes, a step of one of them as a Gantt chart, and what must be known.

Invariant: prints only what the plan holds; every number has its unit beside it or in the head of its column.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from digen.observe.gantt import gantt
from digen.observe.show import number, share
from digen.plan import Check, Plan, Prediction, Split, setting
from digen.types import SpanKind
from digen.workload import TRAINER, Workload

WIDEST = 110
ROOMY = 96
"""Columns from which on settings are shown too."""


def show_plan(plan: Plan, console: Console, shown: Prediction) -> None:
    """Print everything; `shown` is the mode of the Gantt chart."""
    width = min(console.width, WIDEST)
    lines = [
        *_head(plan.workload),
        Text(),
        _modes(plan, with_settings=width >= ROOMY),
        Text(f"lower bound {number(plan.lower_bound_s)} s a step: no device ever waits"),
        *([_check(plan.check)] if plan.check else []),
        Text(f"\nstep {shown.typical + 1} of {shown.mode}", style="bold"),
        *gantt(shown.spans, shown.window, shown.typical, width),
        *([Text(), *_splits(plan.workload, plan.splits)] if plan.splits else []),
        Text(),
        *(Text(f"- {note}", style="dim") for note in plan.notes),
    ]
    for line in lines:
        console.print(line, highlight=False, width=width)


def _head(work: Workload) -> list[Text]:
    replicas = len(work.generators)
    groups = f"{replicas} generator{'s' if replicas > 1 else ''} and 1 trainer"
    counts = f"{len(work.sizes)} micro-batches of {work.num_samples} samples a step, {work.steps} steps, {groups}"
    prices = [_price(work, kind, work.generators) for kind in ("generate", "score", "pull")]
    prices += [_price(work, kind, [TRAINER]) for kind in ("assist", "update", "sync")]
    return [Text(counts, style="bold"), Text(f"seconds: {', '.join(prices)}", style="dim")]


def _price(work: Workload, kind: SpanKind, workers: Sequence[str]) -> str:
    """What a kind of work takes, from the fastest to the slowest of these workers."""
    each = sorted(work.seconds(worker, kind, work.num_samples) for worker in workers)
    return f"{kind} {' to '.join(dict.fromkeys([number(each[0]), number(each[-1])]))}"


def _modes(plan: Plan, *, with_settings: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mode")
    for head in ("step s", "speed-up", "busy", "bubble", "total s", "assists", "helps"):
        table.add_column(head, justify="right")
    if with_settings:
        table.add_column("settings (schedule.)")
    naive = plan.mode("naive")
    for mode in plan.modes:
        table.add_row(
            mode.mode,
            number(mode.step_time_s),
            f"{naive.step_time_s / mode.step_time_s:.2f}x",
            share(mode.busy_share),
            share(1.0 - mode.busy_share),
            number(mode.total_s),
            _range(mode.assists),
            _range(mode.helps),
            *([setting(mode.schedule).replace("schedule.", "")] if with_settings else []),
            style="bold" if mode is plan.fastest else "",
        )
    return table


def _range(counts: Sequence[float]) -> str:
    """Per step, in the steps after the first: `3`, or `2-3` where they differ."""
    steady = counts[1:] or counts
    low, high = f"{min(steady):.3g}", f"{max(steady):.3g}"
    return low if low == high else f"{low}-{high}"


def _check(check: Check) -> Text:
    sentence = f"this run: predicted {number(check.predicted_s)} s a step, measured {number(check.measured_s)} s"
    return Text(f"{sentence} ({100 * check.error:+.1f} %)", style="bold")


def _splits(work: Workload, splits: Sequence[Split]) -> list[Text | Table]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    best = min(splits, key=lambda split: split.best_s)
    for head in ("generator devices", "trainer devices", *(f"{mode} s" for mode in best.step_times_s)):
        table.add_column(head, justify="right")
    for split in splits:
        times = map(number, split.step_times_s.values())
        generators = f"{split.generators} + {split.borrowed}" if split.borrowed else str(split.generators)
        table.add_row(generators, str(split.trainers), *times, style="bold" if split is best else "")
    given = "{} generator and {} trainer devices".format(*work.devices)
    borrowed = f"{best.borrowed} of the trainer's kind + " if best.borrowed else ""
    counts = f"{best.generators} + {borrowed}{best.trainers} devices"
    return [
        Text("splits of the devices", style="bold"),
        Text(f"generation and updates take 1 / devices of what they take on {given}", style="dim"),
        table,
        Text(f"best: {counts}, {number(best.best_s)} s a step", style="bold"),
    ]
