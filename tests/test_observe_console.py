"""The live view and the plain lines."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from digen.observe.console import LiveView, PlainView, open_view
from digen.observe.live import KEPT_NOTES, KEPT_REWARDS, Progress, RunInfo, draw, reward_terms
from digen.observe.show import bar, cut, duration, number, share, sparkline
from digen.types import Span

INFO = RunInfo("flowgrpo", "glyph", 7, Path("runs/20250131-142530-flowgrpo-glyph"), 60)
ROW = {
    "step": 11,
    "step_time_s": 4.0,
    "samples": 96,
    "groups_dropped": 1,
    "reward/mean": 0.5312,
    "reward/ocr/mean": 0.75,
    "reward/ocr/std": 0.21,
    "reward/path/to/mine.py:fine/mean": -2.5,
    "ratio/max_error": 3.2e-7,
    "clip_fraction/mean": 0.012,
    "kl/mean": 0.0012,
    "grad_norm": 0.0153,
    "learning_rate": 2e-4,
    "log_prob_gap/max": 1.5e-6,
    "stale_share": 0.25,
    "busy/trainer": 0.71,
    "busy/generator-0": 0.88,
}
KEYS = sorted({*ROW, "approx_kl/mean", "reward/std", "loss/mean"} - {"step"})


def span(kind: str, step: int = 0, worker: str = "trainer") -> Span:
    return Span(kind, worker, step, 0, step, 1.0, 4.2)  # type: ignore[arg-type]


def shown(progress: Progress, elapsed_s: float = 47.0, width: int = 80) -> str:
    console = Console(record=True, file=io.StringIO(), force_terminal=True, width=width)
    console.print(draw(progress, elapsed_s))
    return console.export_text()


def plain(*, encoding: str = "utf-8") -> tuple[PlainView, io.BytesIO]:
    raw = io.BytesIO()
    return PlainView(INFO, Console(file=io.TextIOWrapper(raw, encoding=encoding), width=20)), raw


def test_plain_output_is_one_exact_line_per_step_load_and_note() -> None:
    view, raw = plain()
    view.on_span(span("load"))
    view.on_span(span("generate"))
    view.on_step(ROW)
    view.on_note("generator-0 [red]failed\nand was retried")
    view.close()
    assert raw.getvalue().decode().splitlines() == [
        "digen flowgrpo glyph seed=7 steps=60 run=runs/20250131-142530-flowgrpo-glyph",
        "loaded trainer time=3.2s",
        (
            "step 12/60 reward=0.5312 reward/ocr=0.7500 reward/path/to/mine.py:fine=-2.500 ratio_error=3.20e-07 "
            "clip=1.2% kl=0.001200 grad_norm=0.01530 lr=2.00e-04 stale=25% dropped=1 busy/trainer=71% "
            "busy/generator-0=88% time=4.0s eta=3m12s"
        ),
        "note: generator-0 [red]failed and was retried",
    ]


def test_plain_output_leaves_out_what_a_row_lacks_and_shows_what_went_wrong() -> None:
    view, raw = plain()
    view.on_step({"step": 0, "grad_norm": math.nan, "approx_kl/mean": 0.5})
    assert raw.getvalue().decode().splitlines()[1] == "step 1/60 approx_kl=0.5000 grad_norm=nan eta=-"


def test_plain_output_survives_an_ascii_log_file() -> None:
    view, raw = plain(encoding="ascii")
    view.on_note("a sign that says “CAFÉ”")
    assert raw.getvalue().decode().splitlines()[1] == r"note: a sign that says \u201cCAF\xc9\u201d"


def test_plain_output_into_a_closed_pipe_does_not_stop_the_run() -> None:
    code = """if True:
    import sys
    from pathlib import Path
    from rich.console import Console
    from digen.observe.console import open_view
    from digen.observe.live import RunInfo
    view = open_view(RunInfo("flowgrpo", "glyph", 0, Path("runs/x"), 3), Console())
    view.on_step({"step": 0})
    print("went on", file=sys.stderr)
    """
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert b"went on" in ended.stderr


def test_the_live_view_fits_80_columns_and_shows_every_number() -> None:
    progress = Progress(INFO).after_step({**ROW, "step": 10, "reward/mean": 0.5}).after_step(ROW)
    progress = progress.after_span(span("generate", 12)).after_span(span("generate", 12)).after_note("x" * 200)
    text = shown(progress)
    assert {cell_len(line) for line in text.splitlines()} == {80}
    for part in [
        "flowgrpo  glyph  seed 7", "runs/20250131-142530-flowgrpo-glyph", "step 12/60", "47s  ETA 3m12s",
        "in step 13: 2 generate finished", "0.5312  ▁█  +0.0312  best 0.5312", "0.7500 ± 0.2100",
        "max |ratio-1|  3.20e-07",
        "1.2%", "KL", "0.001200", "0.01530", "2.00e-04", "1.50e-06", "25%", "groups dropped  1", "24.00", "trainer",
        "71%",
        "generator-0", "88%", "notes (1, all in logs/driver.log)", "xxx…",
    ]:  # fmt: skip
        assert part in text


def test_the_live_view_before_the_first_step_says_that_models_load() -> None:
    text = shown(Progress(INFO))
    assert "step 0/60" in text
    assert "loading models" in text
    assert "nan" not in text
    assert "in step 1: nothing finished" in shown(Progress(INFO).after_span(span("load")))


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), st.floats() | st.integers(-(10**9), 10**9)),
    st.integers(0, 10**6),
    st.integers(60, 200),
)
def test_the_live_view_draws_any_row_at_any_width(row: dict[str, float], step: int, width: int) -> None:
    progress = Progress(INFO).after_step({"step": step, **row}).after_step({"step": step + 1, **row})
    assert {cell_len(line) for line in shown(progress, width=width).splitlines()} == {width}


def test_many_groups_and_rewards_are_summed_up() -> None:
    row = {"step": 0, **{f"busy/generator-{i}": 0.5 for i in range(64)}, **{f"reward/r{i}/mean": 0.1 for i in range(9)}}
    text = shown(Progress(INFO).after_step(row))
    assert "mean of 58 more" in text
    assert "and 3 more in metrics.jsonl" in text
    assert len(text.splitlines()) < 30


def test_progress_does_not_grow_with_the_number_of_steps() -> None:
    progress = Progress(INFO)
    for step in range(500):
        progress = progress.after_span(span("generate", step)).after_note("n").after_step({**ROW, "step": step})
    assert (len(progress.rewards), len(progress.notes), len(progress.ended)) == (KEPT_REWARDS, KEPT_NOTES, 0)
    assert progress.num_notes == 500


def test_the_time_left_is_at_the_pace_of_the_last_steps() -> None:
    progress = Progress(INFO)
    for step in range(20):
        progress = progress.after_step({"step": step, "step_time_s": 100.0 if step < 10 else 2.0})
    assert progress.eta_s == 40 * 2.0
    assert progress.after_step({"step": 59}).eta_s == 0.0


def test_work_for_the_next_step_counts_once_that_step_begins() -> None:
    progress = Progress(INFO).after_span(span("generate", 1)).after_span(span("update", 0)).after_step({"step": 0})
    assert "in step 2: 1 generate finished" in shown(progress)


def test_the_reward_of_the_sum_is_not_listed_as_a_term() -> None:
    assert [name for name, *_ in reward_terms(ROW)] == ["ocr", "path/to/mine.py:fine"]


def test_no_color_takes_the_colours_and_leaves_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=80).print(draw(Progress(INFO).after_step(ROW), 0.0))
    assert "step 12/60" in file.getvalue()
    assert "\x1b[3" not in file.getvalue()


def test_a_live_view_gives_the_cursor_back_when_closed_twice_or_after_an_error() -> None:
    file = io.StringIO()
    stdout = sys.stdout
    view = LiveView(INFO, Console(file=file, force_terminal=True, width=80))
    view.on_step(ROW)
    with suppress(RuntimeError), closing(view):
        raise RuntimeError
    view.close()
    assert sys.stdout is stdout
    assert file.getvalue().count("\x1b[?25l") == 1
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("step 12/60")


def test_a_view_is_live_only_where_a_terminal_can_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_view(INFO, Console(file=io.StringIO())), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_view(INFO, Console(file=io.StringIO(), force_terminal=True)), PlainView)
    monkeypatch.setenv("TERM", "xterm")
    view = open_view(INFO, Console(file=io.StringIO(), force_terminal=True))
    view.close()
    assert isinstance(view, LiveView)


def test_a_program_that_dies_without_closing_leaves_a_usable_terminal() -> None:
    code = """if True:
    from pathlib import Path
    from rich.console import Console
    from digen.observe.console import open_view
    from digen.observe.live import RunInfo
    view = open_view(RunInfo("flowgrpo", "glyph", 0, Path("runs/x"), 3), Console())
    raise RuntimeError("on purpose")
    """
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    output = b""
    try:
        while chunk := os.read(leader, 65536):
            output += chunk
    except OSError:
        pass  # how a terminal says that its last writer is gone
    os.close(leader)
    assert child.wait() == 1
    assert b"on purpose" in output
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l")


def test_telling_the_live_view_takes_little_time() -> None:
    view = LiveView(INFO, Console(file=io.StringIO(), force_terminal=True, width=80))
    try:
        start = time.process_time()
        for _ in range(1000):
            view.on_span(span("generate"))
        assert time.process_time() - start < 0.5  # half a millisecond each; measured: some 10 microseconds
    finally:
        view.close()


def test_a_sparkline_spans_its_lowest_and_highest_value() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([math.nan]) == sparkline([]) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(0.84), "0.8s"), (duration(9.96), "10s"), (duration(59.7), "1m00s"), (duration(3720), "1h02m"),
        (duration(math.nan), "-"), (duration(None), "-"),
        (number(1e-6), "1.00e-06"), (number(0.0), "0"), (number(3), "3"),
        (number(None), "-"), (number(math.nan), "nan"),
        (number(0.53), "0.5300"), (number(-1234.56), "-1234.6"), (number(1e7), "1.00e+07"),
        (share(0.0), "0%"), (share(0.031), "3.1%"), (share(0.999), "100%"),
        (share(None), "-"), (share(math.nan), "nan"),
        (bar(0.5, 4), "██░░"), (bar(1.7, 4), "████"), (bar(math.nan, 4), "░░░░"),
        (cut("a  b\nc", 5), "a b c"), (cut("abcdef", 5), "abcd…"),
    ],
)  # fmt: skip
def test_numbers_are_shown_so_that_small_ones_stay_visible(text: str, expected: str) -> None:
    assert text == expected
