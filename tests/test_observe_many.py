"""Several sinks as one."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from digen.observe.base import Observer, StepRow
from digen.observe.console import PlainView
from digen.observe.files import AppendFile, RunFolder, read_rows, read_spans
from digen.observe.live import RunInfo
from digen.observe.many import ManyObservers, open_observer
from digen.types import Decision, Span

SPAN = Span("generate", "generator-0", 0, 0, 0, 0.0, 1.0)
DECISION = Decision(0, "trainer", 0.5, 0, None)


class Recorder:
    """Keeps what it is told; raises `error` when told of a step."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.told: list[object] = []

    def on_span(self, span: Span) -> None:
        self.told.append(span)

    def on_decision(self, decision: Decision) -> None:
        self.told.append(decision)

    def on_step(self, row: StepRow) -> None:
        if self.error:
            raise self.error
        self.told.append(row)

    def on_note(self, message: str) -> None:
        self.told.append(message)

    def close(self) -> None:
        self.told.append("closed")


def test_every_sink_is_told_everything_in_order() -> None:
    sinks = Recorder(), Recorder()
    many: Observer = ManyObservers(*sinks)
    many.on_span(SPAN)
    many.on_decision(DECISION)
    many.on_step({"step": 0})
    many.on_note("note")
    many.close()
    assert sinks[0].told == sinks[1].told == [SPAN, DECISION, {"step": 0}, "note", "closed"]


def test_a_sink_that_fails_is_left_out_and_the_others_are_told_once() -> None:
    first, lost, last = Recorder(), Recorder(RuntimeError("tracker is away")), Recorder()
    many = ManyObservers(first, lost, last)
    many.on_step({"step": 0})
    many.on_step({"step": 1})
    many.close()
    note = "Recorder failed and gets nothing more: RuntimeError: tracker is away"
    assert first.told == [{"step": 0}, note, {"step": 1}, "closed"]
    assert last.told == [note, {"step": 0}, {"step": 1}, "closed"]
    assert lost.told == []


def opened(folder: RunFolder, *, tensorboard: bool = True) -> tuple[Observer, io.StringIO]:
    output = io.StringIO()
    info = RunInfo("flowgrpo", "glyph", 0, folder.path, 2)
    return open_observer(info, folder, Console(file=output), tensorboard=tensorboard), output


def test_a_run_reports_to_the_terminal_json_lines_and_tensorboard(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "flowgrpo", "glyph")
    observer, output = opened(folder)
    observer.on_span(SPAN)
    observer.on_step({"step": 0, "reward/mean": 0.5})
    observer.on_note("careful")
    observer.close()
    assert read_spans(folder.events) == [SPAN]
    assert read_rows(folder.metrics) == [{"step": 0, "reward/mean": 0.5}]
    assert len(list(folder.tensorboard.glob("events.out.tfevents.*"))) == 1
    assert "careful" in (folder.logs / "driver.log").read_text()
    assert output.getvalue().splitlines()[1:] == ["step 1/2 reward=0.5000 eta=-", "note: careful"]


def test_without_tensorboard_there_is_no_such_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "flowgrpo", "glyph")
    observer, _ = opened(folder, tensorboard=False)
    observer.close()
    assert not folder.tensorboard.exists()


def test_a_file_that_cannot_be_written_is_said_on_the_terminal_once_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "flowgrpo", "glyph")
    folder.metrics.mkdir()
    observer, output = opened(folder)
    for step in range(2):
        observer.on_step({"step": step, "reward/mean": 0.5})
    observer.close()
    assert output.getvalue().count("metrics.jsonl cannot be written") == 1
    assert "step 2/2 reward=0.5000" in output.getvalue()


def test_built_in_sinks_are_observers(tmp_path: Path) -> None:
    sinks: list[Observer] = [PlainView(RunInfo("a", "b", 0, tmp_path, 1), Console(file=io.StringIO())), ManyObservers()]
    assert all(sink.close() is None for sink in sinks)
    AppendFile(tmp_path / "x").close()
