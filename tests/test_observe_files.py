"""Run folder, atomic files, append-only logs and how they are read back."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from digen.errors import ConfigError, DataError
from digen.observe.files import (
    AppendFile,
    JsonlObserver,
    RunFolder,
    read_rows,
    read_spans,
    replacing,
    sweep,
    write_atomic,
)
from digen.types import Span

SPAN = Span("generate", "generator-0", 3, 1, 3, 0.5, 1.25)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_new_run_folder_is_named_by_time_algorithm_and_model(tmp_path: Path) -> None:
    folder = RunFolder.create(None, "flowgrpo", "path/to/model.py:Mine", root=tmp_path)
    date, time, *rest = folder.path.name.split("-")
    assert (len(date), len(time), rest) == (8, 6, ["flowgrpo", "path", "to", "model.py", "Mine"])
    assert all(part.is_dir() for part in (folder.logs, folder.samples, folder.checkpoints))


def test_two_runs_started_in_the_same_second_get_two_folders(tmp_path: Path) -> None:
    folders = {RunFolder.create(None, "flowgrpo", "glyph", root=tmp_path).path for _ in range(5)}
    assert len(folders) == 5


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "events.jsonl"])
def test_a_folder_that_holds_a_run_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"run_dir: .* already holds a run"):
        RunFolder.create(tmp_path, "flowgrpo", "glyph")


def test_a_given_folder_may_exist_and_hold_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert RunFolder.create(tmp_path, "flowgrpo", "glyph").path == tmp_path
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir: .*cannot be made"):
        RunFolder.create(tmp_path / "file" / "run", "flowgrpo", "glyph")
    with pytest.raises(ConfigError, match=r"run_dir: .*cannot be made"):
        RunFolder.create(None, "flowgrpo", "glyph", root=tmp_path / "file")


def test_opening_a_folder_that_is_no_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no config\.yaml"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    assert RunFolder.open(tmp_path).sample_grid(7) == tmp_path / "samples" / "step_000007.png"


def test_what_a_killed_writer_left_is_swept_away_and_nothing_else(tmp_path: Path) -> None:
    killed = replacing(tmp_path / "samples" / "grid.png")
    killed.__enter__().write_bytes(b"half")
    write_atomic(tmp_path / "samples" / "other.png", b"whole")
    write_atomic(tmp_path / "notes.tmp", "mine")
    sweep(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == ["notes.tmp", "samples/other.png"]


def test_an_atomic_write_replaces_text_and_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, "grün")
    assert path.read_bytes() == "grün".encode()
    write_atomic(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert list(path.parent.iterdir()) == [path]


def test_who_reads_while_a_file_is_replaced_sees_all_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as reader:
        write_atomic(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"


def test_an_exception_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def stopped_in_between() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped_in_between()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    ended = python(
        """if True:
        import os, pathlib, signal, sys
        from digen.observe.files import replacing
        with replacing(pathlib.Path(sys.argv[1])) as temporary:
            temporary.write_text("ne")
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_rows_and_spans_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "flowgrpo", "glyph")
    sink = JsonlObserver(folder)
    sink.on_step({"step": 0, "reward/mean": 0.1 + 0.2, "samples": 96})
    sink.on_span(SPAN)
    assert read_rows(folder.metrics) == [{"step": 0, "reward/mean": 0.1 + 0.2, "samples": 96}]  # before close: flushed
    assert read_spans(folder.events) == [SPAN]
    sink.on_note("group 3 dropped")
    sink.close()
    sink.close()
    assert (folder.logs / "driver.log").read_text().endswith(" group 3 dropped\n")


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "flowgrpo", "glyph")
    sink = JsonlObserver(folder)
    sink.on_step({"step": 1, "grad_norm": math.nan, "kl/mean": math.inf, "clip_fraction/mean": 0.0})
    sink.close()
    written = json.loads(folder.metrics.read_text(), parse_constant=pytest.fail)
    assert written == {"step": 1, "grad_norm": None, "kl/mean": None, "clip_fraction/mean": 0.0}
    (row,) = read_rows(folder.metrics)
    assert math.isnan(row["grad_norm"])
    assert math.isnan(row["kl/mean"])


def test_of_two_rows_of_one_step_the_later_counts(tmp_path: Path) -> None:
    """A run that is resumed from step 1 after it had reached step 2."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {step}, "x": {x}}}\n' for step, x in [(0, 1), (1, 2), (2, 3), (1, 20), (2, 30)])
    )
    assert [(row["step"], row["x"]) for row in read_rows(path)] == [(0, 1), (1, 20), (2, 30)]


def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_rows(path) == [{"step": 0}]
    assert "metrics.jsonl:2: the last line is cut short" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "x:2: not JSON"), ("[1]", "x:2: expected an object, got list"), ('{"a": 1}', "x:2: a row of metrics needs")],
)
def test_a_line_that_is_no_row_is_an_error_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x").write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / "x")


def test_a_line_that_is_no_span_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"kind": "generate"}\n')
    with pytest.raises(DataError, match="x:1: not a span"):
        read_spans(tmp_path / "x")


def test_a_full_disk_is_warned_of_once_and_does_not_raise() -> None:
    warnings: list[str] = []
    file = AppendFile(Path("/dev/full"), warnings.append)
    for _ in range(3):
        file.append(b"line\n")
    file.close()
    assert warnings == ["/dev/full cannot be written (No space left on device); training goes on without it"]


def test_a_file_that_cannot_be_opened_is_tried_again_at_every_line(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = tmp_path / "later" / "metrics.jsonl"
    file = AppendFile(path, warnings.append)
    file.append(b"lost\n")
    path.parent.mkdir()
    file.append(b"kept\n")
    file.close()
    assert path.read_bytes() == b"kept\n"
    assert len(warnings) == 1


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ended = python(
        """if True:
        import pathlib, resource, signal, sys
        from digen.observe.files import AppendFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = AppendFile(pathlib.Path(sys.argv[1]), print)
        file.append(b"1" * 59 + b"\\n")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        file.append(b"2" * 59 + b"\\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        file.append(b"3" * 59 + b"\\n")
        file.close()
        """,
        path,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("cannot be written (File too large)") == 1
    assert path.read_text().split() == ["1" * 59, "3" * 59]


def test_observing_imports_neither_torch_nor_tensorboard() -> None:
    ended = python(
        """if True:
        import sys
        import digen.observe.many, digen.observe.summary, digen.observe.grid, digen.observe.curves
        heavy = {"torch", "tensorboard", "tensorflow", "diffusers", "transformers"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
        """
    )
    assert ended.returncode == 0, ended.stderr


def test_the_newest_checkpoint_is_found_by_number_and_only_among_whole_ones(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "flowgrpo", "glyph")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        folder.newest_checkpoint()
    for name in ("step_000002", "step_000009", "step_000010", "step_1000000", "step_000011.tmp", "other"):
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "weights.safetensors").touch()
    (folder.checkpoints / "step_2000000").mkdir()  # killed before its weights were there
    (folder.checkpoints / "notes.txt").touch()
    assert folder.newest_checkpoint() == folder.checkpoint(1000000)
