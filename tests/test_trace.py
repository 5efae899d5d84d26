"""What `digen trace` writes: trace events, a page without a network, a picture. From runs of the real driver."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from digen.cli import app
from digen.errors import ConfigError
from digen.observe import lanes
from digen.observe.bubbles import CAUSES, Assists
from digen.observe.files import JsonlObserver, RunFolder
from digen.observe.summary import summarise
from digen.observe.timeline import CAUSE_COLOURS, KIND_COLOURS, Timeline, read_timeline
from digen.observe.trace import chrome_trace, page, page_data, write_trace
from digen.testing import Recorder, SimulatedGroup, simulate, simulated_config
from digen.types import Decision, Span

DOCS = Path(__file__).parents[1] / "docs"
SCHEDULE = {"mode": "pipelined", "tag": "static(1)", "staleness": 0.5}


def recorded(replicas: int = 1, steps: int = 3, prompts: int = 4) -> Recorder:
    """A run of the real driver on simulated groups, with spans of loading and saving around it."""
    config = simulated_config(steps=steps, schedule=SCHEDULE)
    names = ["generator"] if replicas == 1 else [f"generator-{k}" for k in range(replicas)]
    generators = [SimulatedGroup(name, generate=4 + k % 3, score=0.5, pull=0.25) for k, name in enumerate(names)]
    trainer = SimulatedGroup("trainer", generate=5, update=2 / replicas, sync=0.5)
    record = simulate(config, generators, trainer, prompts_per_step=prompts)
    loads = [Span("load", name, 0, -1, 0, -3.0, 0.0) for name in [*names, "trainer"]]
    save = Span("save", "trainer", steps - 1, -1, steps, record.end_s, record.end_s + 1)
    return Recorder([*loads, *record.spans, save], record.decisions, record.rows)


def written(path: Path, record: Recorder) -> RunFolder:
    folder = RunFolder.create(path, "flowgrpo", "glyph")
    sink = JsonlObserver(folder)
    for span in record.spans:
        sink.on_span(span)
    for decision in record.decisions:
        sink.on_decision(decision)
    for row in record.rows:
        sink.on_step(row)
    sink.close()
    return folder


def made(record: Recorder, title: str = "run") -> Timeline:
    return Timeline(title, record.spans, record.decisions, summarise(record.rows, record.spans, record.decisions))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# The command ---------------------------------------------------------------------------------------------------------


def test_trace_writes_three_files_into_the_run_and_says_where(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", recorded())
    result = call("trace", str(folder.path))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("3 steps in ")
    assert lines[-3:] == [str(folder.path / f"trace.{kind}") for kind in ("json", "html", "png")]
    assert all(Path(line).stat().st_size > 1000 for line in lines[-3:])


def test_trace_as_json_is_one_object_with_paths_and_the_totals_of_the_summary(tmp_path: Path) -> None:
    folder, out = written(tmp_path / "run", record := recorded()), tmp_path / "elsewhere"
    result = call("trace", str(folder.path), "--out", str(out), "--json")
    document = json.loads(result.stdout)
    assert [document[name] for name in ("trace", "page", "picture")] == [
        str(out / f"trace.{k}") for k in ("json", "html", "png")
    ]
    assert not list(folder.path.glob("trace.*"))
    totals = summarise(record.rows, record.spans, record.decisions).as_json()
    assert {name: document[name] for name in totals} == totals
    for worker in document["workers"].values():
        assert worker["busy"] + sum(worker["causes"].values()) == pytest.approx(1)


def test_an_old_run_without_decisions_or_rows_has_a_trace_too(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", Recorder(recorded().spans))
    folder.events.write_text(re.sub(r', "rows": \d+', "", folder.events.read_text()))
    folder.metrics.unlink(missing_ok=True)
    assert write_trace(folder.path).timeline.summary.assists.taken > 0


@pytest.mark.parametrize("spans", [[], [Span("load", "trainer", 0, -1, 0, -1.0, 0.0)]])
def test_a_run_that_has_not_begun_is_an_error_with_its_folder(tmp_path: Path, spans: list[Span]) -> None:
    folder = written(tmp_path / "run", Recorder(spans))
    folder.config.write_text("")
    result = call("trace", str(folder.path))
    assert result.exit_code == ConfigError.exit_code
    assert "run has nothing to draw: events.jsonl has no training work" in result.stderr
    assert not list(folder.path.glob("trace.*"))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", recorded())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out: .*file cannot be written: (Not a directory|File exists)"):
        write_trace(folder.path, tmp_path / "file")


# Trace events --------------------------------------------------------------------------------------------------------


def test_trace_events_hold_every_span_and_bubble_once_on_the_thread_of_its_worker() -> None:
    timeline = made(recorded(2))
    events = chrome_trace(timeline)["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(threads.values()) == ["steps", "generator-0", "generator-1", "trainer"]
    lasting = [e for e in events if e["ph"] == "X"]
    shown = Counter((e["cat"], threads[e["tid"]], e["args"]["start_s"], e["args"]["end_s"]) for e in lasting)
    spans = Counter((span.kind, span.worker, span.start, span.end) for span in timeline.spans)
    bubbles = Counter(("bubble", w.worker, w.start, w.end) for waits in timeline.waits.values() for w in waits)
    steps = Counter(("step", "steps", time.start, time.end) for time in timeline.steps)
    assert shown == spans + bubbles + steps


def test_trace_events_are_in_microseconds_from_the_start_of_loading_and_in_order() -> None:
    events = [e for e in chrome_trace(made(recorded()))["traceEvents"] if "ts" in e]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert events[0]["ts"] == 0
    (first,) = [e for e in events if e["name"] == "generate 0.0"]
    assert (first["ts"], first["dur"]) == (3_000_000, 4_000_000)
    assert first["args"] == {
        "step": 0,
        "microbatch": 0,
        "version": 0,
        "samples": first["args"]["samples"],
        "start_s": 0.0,
        "end_s": 4.0,
    }


def test_trace_events_mark_versions_and_decisions_with_what_was_predicted() -> None:
    record = recorded(steps=2)
    record.decisions[:] = [Decision(0, "trainer", 1.0, 2, 9.0), Decision(0, "trainer", 2.0, 0, None)]
    timeline = made(record)
    marks = [e for e in chrome_trace(timeline)["traceEvents"] if e["ph"] == "i"]
    assert [e["name"] for e in marks if e["cat"] == "version"] == ["version 1", "version 2"]
    taken, skipped = (e for e in marks if e["cat"] == "decision")
    assert (taken["name"], taken["args"]["predicted_end_s"]) == ("taken", 9.0)
    assert (skipped["name"], skipped["args"]["actual_end_s"]) == ("skipped", timeline.steps[0].end)


# The page ------------------------------------------------------------------------------------------------------------


def data_in(text: str) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_what_it_draws_and_loads_nothing() -> None:
    timeline = made(recorded(4))
    text = page(timeline)
    assert data_in(text) == page_data(timeline)
    assert not re.search(r"https?:|src=|href=|@import|url\(|fetch\(|import ", text)
    assert not re.findall(r"@[a-z]+@", text)


def test_the_totals_are_in_the_page_without_its_script() -> None:
    timeline = made(recorded(2))
    table = page(timeline).split("<table>")[1]
    for worker in ("generator-0", "generator-1", "trainer", "all"):
        assert f'<th scope="row">{worker}</th>' in table
    for cause in timeline.causes:
        assert f'<th scope="col">{CAUSES[cause]}</th>' in table


def test_a_name_cannot_become_markup_or_script() -> None:
    evil = '</script><script>alert("x")</script>@data@'
    spans = [Span("generate", evil, 0, 0, 0, 0.0, 1.0), Span("update", "trainer", 0, 0, 0, 1.0, 2.0)]
    text = page(made(Recorder(spans), title=evil))
    assert text.count("<script") == 2
    assert evil not in text
    assert data_in(text)["lanes"][0]["worker"] == evil


def test_the_legend_shows_what_there_is_and_nothing_else() -> None:
    timeline = made(recorded())
    legend = page(timeline).split('<div class="stage">')[0]
    assert [kind for kind in KIND_COLOURS if f"</i>{kind}</span>" in legend] == timeline.kinds
    assert [cause for cause in CAUSES if f"</i>{CAUSES[cause]}</span>" in legend] == timeline.causes
    assert "help" not in timeline.kinds
    assert {"load", "save", "assist", "pull"} <= set(timeline.kinds)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_is_javascript(tmp_path: Path) -> None:
    script = page(made(recorded())).split('<script id="code">')[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    checked = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


POKE = """<script>
addEventListener('error', (event) => { document.body.dataset.state = event.message; });
const canvas = document.getElementById('lanes'), box = canvas.getBoundingClientRect();
const send = (Kind, name, more) => canvas.dispatchEvent(new Kind(name, { cancelable: true, bubbles: true, ...more }));
const at = (x, y) => ({ clientX: box.left + x, clientY: box.top + y });
for (let k = 0; k < 30; k++) send(WheelEvent, 'wheel', { deltaY: 100, ...at(400, 60) });
document.getElementById('training').click();
for (let k = 0; k < 5; k++) send(WheelEvent, 'wheel', { deltaY: -100, ...at(box.width / 8, 60) });
send(KeyboardEvent, 'keydown', { key: 'ArrowRight' });
send(PointerEvent, 'pointermove', at(box.width / 2, 60));
document.body.dataset.tip = document.getElementById('tip').textContent;
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("replicas", [1, 31])
def test_a_browser_draws_the_page_zooms_and_says_what_is_under_the_pointer(tmp_path: Path, replicas: int) -> None:
    path = tmp_path / "trace.html"
    path.write_text(page(made(recorded(replicas, prompts=2 * replicas + 2))).replace("</body>", POKE))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
    ]
    shown = subprocess.run(
        ["chromium", *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=60
    )
    assert 'data-state="drawn"' in shown.stdout, shown.stderr
    tip = re.search(r'data-tip="([^"]*)"', shown.stdout)
    assert tip, shown.stdout[-500:]
    assert re.match(r"(generate|score) on generator(-0)?step \d, micro-batch \d+\n", tip[1])


# The picture ---------------------------------------------------------------------------------------------------------


def shares(row: Any) -> dict[str, float]:
    """Share of a row of pixels that has each colour."""
    colours = Counter("#" + bytes(pixel).hex() for pixel in row)
    return {colour: count / len(row) for colour, count in colours.items()}


def test_bars_are_as_long_as_the_work_and_bubbles_as_long_as_the_wait(tmp_path: Path) -> None:
    spans = [
        Span("generate", "generator", 0, 0, 0, 0.0, 5.0, 4),
        Span("score", "generator", 0, 0, 0, 5.0, 6.0, 4),
        Span("update", "trainer", 0, 0, 0, 6.0, 9.0, 4),
        Span("sync", "trainer", 0, -1, 1, 9.0, 10.0),
    ]
    timeline = made(Recorder(spans))
    lanes.draw_lanes(timeline, tmp_path / "trace.png")
    with Image.open(tmp_path / "trace.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    left = round(2 * (lanes.MARGIN + max(lanes.length(name, 12) for name in timeline.lanes) + 10))
    right, top = (
        2 * (lanes.WIDTH - lanes.MARGIN - lanes.BUSY),
        2 * (lanes.MARGIN + lanes.TITLE + 2 * lanes.LEGEND + lanes.RULER),
    )
    generator, trainer = (shares(pixels[top + 68 * k + 10, left:right]) for k in range(2))  # above the bubbles
    assert generator[KIND_COLOURS["generate"]] == pytest.approx(0.5, abs=0.005)
    assert generator[KIND_COLOURS["score"]] == pytest.approx(0.1, abs=0.005)
    assert trainer[KIND_COLOURS["update"]] == pytest.approx(0.3, abs=0.005)
    generator, trainer = (shares(pixels[top + 68 * k + 56, left:right]) for k in range(2))
    assert generator[CAUSE_COLOURS["trainer"]] == pytest.approx(0.3, abs=0.005)
    assert generator[CAUSE_COLOURS["sync"]] == pytest.approx(0.1, abs=0.005)
    assert trainer[CAUSE_COLOURS["start-up"]] == pytest.approx(0.6, abs=0.005)


@pytest.mark.parametrize("replicas", [1, 3, 31, 99])
def test_the_picture_grows_with_the_number_of_workers(tmp_path: Path, replicas: int) -> None:
    lanes.draw_lanes(made(recorded(replicas, steps=1)), tmp_path / "trace.png")
    with Image.open(tmp_path / "trace.png") as image:
        assert image.width == 2 * lanes.WIDTH
        assert 300 < image.height < 2600


def test_of_a_long_run_the_picture_shows_whole_steps_of_the_middle() -> None:
    timeline = made(recorded(steps=60))
    low, high = lanes.part_to_show(timeline)
    first, last = (
        next(t.step for t in timeline.steps if getattr(t, edge) == time)
        for edge, time in (("start", low), ("end", high))
    )
    assert abs(first + last - 59) <= 1
    busiest = max(sum(low <= span.start < high for span in lane) for lane in timeline.lanes.values())
    assert lanes.MOST / 2 < busiest <= lanes.MOST * 1.1
    short = made(recorded(steps=2))
    assert lanes.part_to_show(short) == short.window


def test_work_that_takes_no_time_can_be_drawn(tmp_path: Path) -> None:
    spans = [Span("generate", "generator", 0, 0, 0, 1.0, 1.0), Span("sync", "trainer", 0, -1, 1, 1.0, 1.0)]
    folder = written(tmp_path / "run", Recorder(spans))
    assert write_trace(folder.path).picture.is_file()
    assert read_timeline(folder).facts()[0] == "1 steps in 0.0s"


def test_odd_steps_are_lighter_and_text_is_read_on_every_colour() -> None:
    assert lanes.shade("#000000", 1) == "#616161"
    assert lanes.shade("#2f81d6", 4) == "#2f81d6"
    assert lanes.ink_on("#2f81d6") == "#ffffff"
    assert lanes.ink_on("#84bd3c") == lanes.INK


# The documentation ---------------------------------------------------------------------------------------------------


def test_every_kind_and_cause_is_explained() -> None:
    text = (DOCS / "trace.md").read_text()
    assert not [cause for cause in CAUSES.values() if f"**{cause}**" not in text]
    events = (DOCS / "metrics.md").read_text().split("## events.jsonl")[1].split("\n## ")[0]
    assert not [kind for kind in KIND_COLOURS if f"`{kind}`" not in events]
    assert not [name for name in Span.__dataclass_fields__ if f"`{name}`" not in events]


def test_every_key_of_the_json_of_a_trace_is_documented(tmp_path: Path) -> None:
    text = (DOCS / "metrics.md").read_text()
    document = write_trace(written(tmp_path / "run", recorded()).path).as_dict()
    section = text.split("## JSON documents")[1]
    assert not [key for key in (*document, *Assists.__dataclass_fields__) if f"`{key}`" not in section]
    decisions = text.split("## decisions.jsonl")[1].split("\n## ")[0]
    assert not [name for name in Decision.__dataclass_fields__ if f"`{name}`" not in decisions]
