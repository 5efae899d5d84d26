"""What `digen trace` writes: the timeline as Chrome/Perfetto trace events, as a page that needs no network, as a PNG.

Invariant: the files show the same spans, bubbles and totals; the page loads nothing, and no name or text of a run can
become markup or script in it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from digen.errors import ConfigError
from digen.observe.bubbles import CAUSES
from digen.observe.files import RunFolder, write_atomic
from digen.observe.lanes import draw_lanes
from digen.observe.show import duration, share
from digen.observe.summary import Worker
from digen.observe.timeline import CAUSE_COLOURS, KIND_COLOURS, Timeline, read_timeline, total_row
from digen.types import Span

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFiles:
    """What was written, and the timeline that it shows."""

    run_dir: Path
    trace: Path
    page: Path
    picture: Path
    timeline: Timeline

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.trace, self.page, self.picture

    def as_dict(self) -> dict[str, Any]:
        """Paths and totals as plain JSON values (docs/metrics.md)."""
        paths = {name: str(getattr(self, name)) for name in ("run_dir", "trace", "page", "picture")}
        return {**paths, **self.timeline.summary.as_json()}


def write_trace(run_dir: Path, out: Path | None = None) -> TraceFiles:
    """Write trace.json, trace.html and trace.png into `out`, by default the run's own folder.

    Raises ConfigError when the folder holds no training work or `out` cannot be written; DataError for a line that
    cannot be read.
    """
    timeline = read_timeline(RunFolder.open(run_dir))
    into = run_dir if out is None else out
    written = TraceFiles(run_dir, into / "trace.json", into / "trace.html", into / "trace.png", timeline)
    try:
        write_atomic(written.trace, json.dumps(chrome_trace(timeline), allow_nan=False))
        write_atomic(written.page, page(timeline))
        draw_lanes(timeline, written.picture)
    except OSError as error:
        raise ConfigError(f"out: {into} cannot be written: {error.strerror or error}") from error
    return written


# Chrome and Perfetto -------------------------------------------------------------------------------------------------


def chrome_trace(timeline: Timeline) -> Event:
    """The run in the Trace Event Format: one process, a thread for the steps and one for each worker.

    Times are microseconds since the first span of the run began, which loading does before time 0; `args` have the
    run's own seconds.
    """
    events = [_about(0, "process_name", name=timeline.title), _about(0, "thread_name", name="steps")]
    for row, worker in enumerate(timeline.lanes, start=1):
        events += [_about(row, "thread_name", name=worker), _about(row, "thread_sort_index", sort_index=row)]
    events += sorted(_events(timeline), key=lambda event: event["ts"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline) -> Iterator[Event]:
    rows, zero = {worker: row for row, worker in enumerate(timeline.lanes, start=1)}, extent(timeline)[0]
    for step in timeline.steps:
        yield _lasting(f"step {step.step}", "step", 0, (step.start, step.end), zero)
        version = {"name": f"version {step.step + 1}", "cat": "version", "ph": "i", "s": "g"}
        yield {**version, "pid": 1, "tid": 0, "ts": _micros(step.end - zero)}
    for span in timeline.spans:
        about = {"step": span.step, "microbatch": span.index, "version": span.version, "samples": span.rows}
        about = {name: value for name, value in about.items() if not (name == "microbatch" and value < 0)}
        name = f"{span.kind} {span.step}.{span.index}" if span.index >= 0 else f"{span.kind} v{span.version}"
        yield _lasting(name, span.kind, rows[span.worker], (span.start, span.end), zero, about)
    for waits in timeline.waits.values():
        for wait in waits:
            yield _lasting(CAUSES[wait.cause], "bubble", rows[wait.worker], (wait.start, wait.end), zero)
    for decision in timeline.decisions:
        ends = {"predicted_end_s": decision.predicted_end, "actual_end_s": timeline.ends.get(decision.step)}
        event = {"name": "taken" if decision.rows else "skipped", "cat": "decision", "ph": "i", "s": "t", "pid": 1}
        place = {"tid": rows.get(decision.worker, 0), "ts": _micros(decision.at - zero)}
        yield {**event, **place, "args": {"step": decision.step, "samples": decision.rows, **ends}}


def _about(tid: int, what: str, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": 1, "tid": tid, "args": args}


def _lasting(
    name: str, category: str, tid: int, times: tuple[float, float], zero: float, about: Mapping[str, Any] | None = None
) -> Event:
    start, end = times
    event = {"name": name, "cat": category, "ph": "X", "pid": 1, "tid": tid}
    args = {**(about or {}), "start_s": start, "end_s": end}
    return {**event, "ts": _micros(start - zero), "dur": _micros(end - start), "args": args}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# The page ------------------------------------------------------------------------------------------------------------


def page(timeline: Timeline) -> str:
    """A page that draws the timeline itself; it opens from disk, without a network."""
    kinds = "".join(_key(kind, KIND_COLOURS[kind]) for kind in timeline.kinds)
    causes = "".join(_key(CAUSES[cause], CAUSE_COLOURS[cause], "low") for cause in timeline.causes)
    parts = {
        "title": html.escape(timeline.title),
        "facts": "".join(f"<p>{html.escape(fact)}</p>" for fact in timeline.facts()),
        "kinds": kinds,
        "causes": causes or "<span>none</span>",
        "table": _table(timeline),
        "data": _script_json(page_data(timeline)),
    }
    template = files("digen.observe").joinpath("trace.html").read_text(encoding="utf-8")
    return re.sub(r"@([a-z]+)@", lambda place: parts[place[1]], template)


def page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws; the order of the numbers is said there. Seconds to the microsecond."""
    kinds, causes = timeline.kinds, timeline.causes
    of_kind, of_cause = {k: i for i, k in enumerate(kinds)}, {c: i for i, c in enumerate(causes)}
    decisions: dict[str, list[list[Any]]] = {}
    for d in timeline.decisions:
        decisions.setdefault(d.worker, []).append([_short(d.at), d.rows, d.step, _short(d.predicted_end)])

    def numbers(span: Span) -> list[Any]:
        start, end = _short(span.start), _short(span.end)
        return [of_kind[span.kind], start, end, span.step, span.index, span.version, span.rows]

    return {
        "window": [_short(edge) for edge in timeline.window],
        "extent": [_short(edge) for edge in extent(timeline)],
        "kinds": [[kind, KIND_COLOURS[kind]] for kind in kinds],
        "causes": [[CAUSES[cause], CAUSE_COLOURS[cause]] for cause in causes],
        "steps": [[step.step, _short(step.start), _short(step.end)] for step in timeline.steps],
        "lanes": [
            {
                "worker": worker,
                "spans": [numbers(span) for span in spans],
                "waits": [[of_cause[w.cause], _short(w.start), _short(w.end)] for w in timeline.waits[worker]],
                "decisions": decisions.get(worker, []),
            }
            for worker, spans in timeline.lanes.items()
        ],
    }


def extent(timeline: Timeline) -> tuple[float, float]:
    """From the start of the first span to the end of the last, loading and saving included."""
    return min(span.start for span in timeline.spans), max(span.end for span in timeline.spans)


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _script_json(document: Any) -> str:
    """JSON that cannot end the script element that it stands in, nor begin a comment."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _key(name: str, colour: str, kind: str = "") -> str:
    return f'<span><i class="{kind}" style="background:{colour}"></i>{html.escape(name)}</span>'


def _table(timeline: Timeline) -> str:
    """The totals: a row for each worker, a column for each cause, shares of the wall time of training."""
    workers, causes = timeline.summary.workers, timeline.causes
    titles = ["worker", "busy", "bubbles", *(CAUSES[cause] for cause in causes), "count", "time"]
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in titles)

    def row(name: str, worker: Worker) -> str:
        shares = [worker.busy, 1.0 - worker.busy, *(worker.causes.get(cause, 0.0) for cause in causes)]
        cells = [*(share(part) for part in shares), str(worker.bubbles), duration(worker.bubble_s)]
        return f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'

    body = "".join(row(name, worker) for name, worker in workers.items())
    foot = row("all", total_row(list(workers.values()))) if len(workers) > 1 else ""
    caption = f"<caption>Shares of {duration(timeline.summary.training_s)} of training</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"
