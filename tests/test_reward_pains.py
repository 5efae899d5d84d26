"""Checks P51 to P53 on whole runs of the bundled model: scores that are none, that never come, that take long."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from digen import presets
from digen.observe.files import read_rows, read_spans
from digen.run import run

SMALL = (
    "engine.name=inline",
    "steps=1",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=8",
    "sampling.num_steps=4",
    "observe.tensorboard=false",
    "observe.grid_every=0",
    "schedule.ordered=true",
    "schedule.retries=0",
)
HEAD = "import math, threading\n\ncalls, gate = [], threading.Event()\n\ndef score(media, prompts, metadata):\n"
VALUES = "    values = [float(pixels.mean()) for pixels in media]\n"


def start(folder: Path, body: str, *overrides: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A run with a reward of this body: its rows, and the notes that it made."""
    path = folder / "reward.py"
    path.write_text(HEAD + VALUES + body)
    words = [*SMALL, f"run_dir={folder / 'run'}", f"reward={{'{path}:score': {{}}}}", *overrides]
    text = io.StringIO()
    run(presets.resolve("flowgrpo", "glyph", None, words, {}), console=Console(force_terminal=False, file=text))
    return [dict(row) for row in read_rows(folder / "run" / "metrics.jsonl")], text.getvalue().splitlines()


def weights(folder: Path) -> Any:
    (path,) = (folder / "run" / "checkpoints").glob("*/weights.safetensors")
    return load_file(path)


FIRST = "    if prompts[0] == (calls or calls.append(prompts[0]) or calls)[0]:\n"
BROKEN = FIRST + "        values[{rows}] = {bad}\n    return values\n"


@pytest.mark.parametrize(
    "bad", [":3, [math.nan, None, math.inf]", ":, [math.nan] * 8"], ids=["nan, None and inf", "all nan"]
)
def test_p51_a_group_with_scores_that_are_none_is_dropped_and_counted_and_changes_no_other(
    bad: str, tmp_path: Path
) -> None:
    rows, values = bad.split(", ", 1)
    (row,), notes = start(tmp_path, BROKEN.format(rows=rows, bad=values))
    assert row["groups_dropped"] == 1
    assert row["reward/failed"] == (8 if rows == ":" else 3)
    assert row["trained_samples"] == 8
    assert all(np.isfinite(value).all() for value in weights(tmp_path).values())
    assert all(np.isfinite(value) for value in row.values())
    assert any("failed for sample 1 of prompt" in note for note in notes), notes


STUCK = "    return gate.wait(3600)\n"


def test_p52_a_reward_that_never_answers_ends_the_step_by_the_rule_and_leaves_nothing_running(tmp_path: Path) -> None:
    children = set(psutil.Process().children(recursive=True))
    (row,), notes = start(tmp_path, STUCK, "scoring.timeout_s=1")
    assert (row["groups_dropped"], row["reward/failed"], row["trained_samples"], row["step_applied"]) == (2, 16, 0, 0)
    assert any("failed for sample 3 of prompt" in note for note in notes)
    assert 2 <= row["step_time_s"] < 60
    assert set(psutil.Process().children(recursive=True)) <= children


SLOW = "    return calls.append(0) or gate.wait(len(calls) == 1 and 3 or 0) or values\n"


def test_p53_while_a_slow_reward_scores_the_next_micro_batch_is_generated(tmp_path: Path) -> None:
    """With a worker of its own for rewards; whatever thread scores, the loop that gives out work goes on."""
    start(tmp_path, SLOW, "scoring.devices=cpu", "schedule.assist=none")
    spans = read_spans(tmp_path / "run" / "events.jsonl")
    first = min((span for span in spans if span.kind == "score"), key=lambda span: span.start)
    generated = [span for span in spans if span.kind == "generate"]
    assert first.end - first.start >= 3
    assert any(span.start < first.end and first.start < span.end for span in generated)
    scored = sorted((span.start, span.end) for span in spans if span.kind == "score")
    assert all(a[1] <= b[0] for a, b in pairwise(scored))  # one call at a time
