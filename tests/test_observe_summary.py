"""A run in numbers, from rows and spans made by hand."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from digen.observe.bubbles import union
from digen.observe.files import JsonlObserver, RunFolder
from digen.observe.summary import Worker, print_summary, summarise, summarise_folder
from digen.types import Decision, Span

# generator: 0-4 and 3-6 overlap, then idle until 10; trainer: 6-8 of 0-10; loading before 0 does not count.
SPANS = [
    Span("load", "trainer", 0, 0, 0, -5.0, 0.0),
    Span("generate", "generator-0", 0, 0, 0, 0.0, 4.0),
    Span("score", "generator-0", 0, 0, 0, 3.0, 6.0),
    Span("update", "trainer", 0, 0, 0, 6.0, 8.0),
    Span("pull", "generator-0", 0, 0, 1, 9.0, 10.0),
    Span("save", "trainer", 0, 0, 1, 10.0, 12.0),
]


def rows(rewards: list[float]) -> list[dict[str, float]]:
    return [
        {"step": step, "samples": 8, "trained_samples": 6, "reward/mean": reward, "reward/ocr/mean": reward / 2}
        for step, reward in enumerate(rewards)
    ]


def printed(rewards: list[float], spans: list[Span] = SPANS, **extra: float) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    print_summary(summarise([{**row, **extra} for row in rows(rewards)], spans), console, Path("runs/x"))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_first_and_last_reward_are_means_over_a_tenth_of_the_steps() -> None:
    summary = summarise(rows([1.0, 3.0, *[9.0] * 15, 20.0, 5.0, 7.0]), [])
    mean, ocr = summary.rewards["mean"], summary.rewards["ocr"]
    assert (mean.first, mean.last, mean.best, mean.best_step, mean.gain) == (2.0, 6.0, 20.0, 17, 4.0)
    assert (ocr.first, ocr.last, ocr.best) == (1.0, 3.0, 10.0)


def test_steps_whose_reward_is_unknown_do_not_count_for_it() -> None:
    (mean, _) = summarise(rows([math.nan, 1.0, 2.0, math.nan]), []).rewards.values()
    assert (mean.first, mean.last, mean.best_step) == (1.0, 2.0, 2)


def test_overlapping_spans_of_a_worker_count_once() -> None:
    summary = summarise(rows([1.0]), SPANS)
    assert summary.training_s == 10.0
    assert summary.total_s == 17.0
    assert summary.workers["generator-0"].busy == pytest.approx(0.7)
    assert summary.workers["trainer"].busy == pytest.approx(0.2)
    assert summary.samples_per_s == pytest.approx(0.8)


def test_a_bubble_is_a_gap_of_a_worker_while_the_run_is_not_done() -> None:
    workers = summarise([], SPANS).workers
    causes = {"trainer": pytest.approx(0.2), "driver": pytest.approx(0.1)}
    assert workers["generator-0"] == Worker(pytest.approx(0.7), bubbles=1, bubble_s=pytest.approx(3.0), causes=causes)
    causes = {"sync": pytest.approx(0.1), "start-up": pytest.approx(0.6), "driver": pytest.approx(0.1)}
    assert workers["trainer"] == Worker(pytest.approx(0.2), bubbles=2, bubble_s=pytest.approx(8.0), causes=causes)


def test_union_of_intervals_covers_the_same_seconds() -> None:
    assert union([(5, 9), (6, 7), (0, 2), (1, 3), (3, 4), (0.5, 1)]) == [(0, 4), (5, 9)]


def test_wasted_are_rollouts_done_again_and_those_that_no_update_used() -> None:
    spans = [
        Span("generate", "generator-0", 0, 0, 0, 0.0, 1.0),  # done again after a resume
        Span("assist", "trainer", 0, 0, 0, 1.0, 4.0),
        Span("score", "generator-0", 0, 0, 0, 4.0, 4.5),
        Span("update", "trainer", 0, 0, 0, 4.5, 5.0),
        Span("generate", "generator-0", 0, 1, 0, 5.0, 7.0),  # the run stopped before its update
        Span("score", "generator-0", 0, 1, 0, 7.0, 7.25),
    ]
    assert summarise([], spans).wasted_s == pytest.approx(1.0 + 2.0 + 0.25)


def test_a_rollout_made_in_parts_is_of_use_when_it_is_whole() -> None:
    spans = [
        Span("generate", "generator-0", 0, 0, 0, 0.0, 1.0, rows=8),  # done again after a resume, now in two parts
        Span("score", "generator-0", 0, 0, 0, 1.0, 1.5, rows=8),
        Span("generate", "generator-0", 0, 0, 0, 2.0, 6.0, rows=6),
        Span("assist", "trainer", 0, 0, 0, 2.0, 5.0, rows=2),
        Span("score", "generator-0", 0, 0, 0, 6.0, 7.0, rows=8),
        Span("help", "generator-0", 0, 0, 0, 7.0, 8.0, rows=3),
        Span("update", "trainer", 0, 0, 0, 7.0, 8.0, rows=5),
        Span("generate", "generator-0", 0, 0, 0, 8.0, 8.25, rows=8),  # again, and cut off
    ]
    assert summarise([], spans).wasted_s == pytest.approx(1.0 + 0.5 + 0.25)


def test_counts_are_summed_over_the_steps() -> None:
    extra = {"groups_dropped": 1, "reward/failed": 2, "step_applied": 0, "stale_share": 0.5, "ratio/max_error": 1e-7}
    summary = summarise([{**row, **extra} for row in rows([1.0, 2.0])], SPANS)
    assert (summary.samples, summary.trained_samples, summary.groups_dropped, summary.rewards_failed) == (16, 12, 2, 4)
    assert (summary.steps_not_applied, summary.stale_share, summary.max_ratio_error) == (2, 0.5, 1e-7)
    assert summary.spans == {"generate": 1, "load": 1, "pull": 1, "save": 1, "score": 1, "update": 1}


def test_a_run_that_did_nothing_has_a_summary_too() -> None:
    summary = summarise([], [])
    assert (summary.num_steps, summary.samples, summary.rewards, summary.workers) == (0, 0, {}, {})
    assert math.isnan(summary.samples_per_s)
    print_summary(summary, Console(file=io.StringIO()), Path("runs/x"))


def test_a_folder_is_summed_up_from_its_files_also_when_one_was_never_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "flowgrpo", "glyph")
    assert summarise_folder(folder).num_steps == 0
    sink = JsonlObserver(folder)
    for span in SPANS:
        sink.on_span(span)
    assert summarise_folder(folder).training_s == 10.0
    for row in rows([0.5, 0.75]):
        sink.on_step(row)
    sink.close()
    assert summarise_folder(folder).assists.skipped == 0
    folder.decisions.write_text('{"step": 0, "worker": "trainer", "at": 8.0, "rows": 0, "predicted_end": null}\n')
    decisions = [Decision(0, "trainer", 8.0, 0, None)]
    summary = summarise_folder(folder)
    assert summary.assists.skipped == 1
    assert summary.as_json() == summarise(rows([0.5, 0.75]), SPANS, decisions).as_json()


def test_the_summary_as_json_has_null_for_the_unknown() -> None:
    record = json.loads(json.dumps(summarise(rows([1.0, 2.0]), []).as_json(), allow_nan=False))
    assert record["samples_per_s"] is None
    assert record["rewards"]["mean"] == {"first": 1.0, "last": 2.0, "best": 2.0, "best_step": 1}


def test_the_closing_block_says_what_improved_where_the_files_are_and_what_to_try() -> None:
    assert printed([0.5, 0.75]) == [
        "",
        "2 steps in 17s, training 10s, 16 samples, 1.600 samples/s",
        "  reward    0.5000 -> 0.7500  (+0.2500; best 0.7500 in step 2)",
        "  ocr       0.2500 -> 0.3750  (+0.1250; best 0.3750 in step 2)",
        "  busy      generator-0 70%  trainer 20%",
        "  bubbles   generator-0 30%: waits for trainer 20%, driver 10%",
        "            trainer 80%: start-up 60%, sync 10%, driver 10%",
        "  files     runs/x",
        "            metrics.jsonl  events.jsonl  samples/  checkpoints/  logs/",
        "  next      digen eval runs/x",
        "            digen trace runs/x",
    ]


def test_the_closing_block_counts_assists_and_says_how_well_steps_were_foreseen() -> None:
    spans = [Span("assist", "trainer", 0, 1, 0, 0.0, 4.0, 8), Span("sync", "trainer", 0, -1, 1, 9.0, 10.0)]
    assert "  assists   1 taken, 0 skipped" in printed([1.0], spans)
    decisions = [Decision(0, "trainer", 0.0, 8, 10.5), Decision(0, "trainer", 4.0, 0, 8.0)]
    console = Console(file=io.StringIO(), width=80)
    print_summary(summarise(rows([1.0]), spans, decisions), console, Path("runs/x"))
    line = "  assists   1 taken, 1 skipped; step ends predicted within 12% (median), 20% (largest)"
    assert line in console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_bubbles_of_many_replicas_are_told_as_a_mean() -> None:
    spans = [Span("generate", f"generator-{k}", 0, k, 0, 0.0, 1.0 + k % 2) for k in range(32)]
    spans.append(Span("update", "trainer", 0, 0, 0, 2.0, 4.0))
    lines = printed([1.0], spans)
    assert "  bubbles   32 generators 62%: waits for trainer 50%, waits for generator 12%" in lines
    assert "            trainer 50%: start-up 50%" in lines


def test_the_closing_block_warns_of_what_was_lost() -> None:
    lines = printed([0.5, 0.25], **{"groups_dropped": 1, "reward/failed": 3, "step_applied": 0})
    assert "  reward    0.5000 -> 0.2500  (-0.2500; best 0.5000 in step 1)" in lines
    assert [line for line in lines if line.startswith("  watch")] == [
        "  watch     2 groups were dropped",
        "  watch     6 samples had a reward that failed (they are not counted as 0)",
        "  watch     2 steps were not applied (zero or non-finite gradient)",
    ]


def test_a_long_path_is_not_broken_into_lines() -> None:
    console = Console(file=io.StringIO(), width=40)
    print_summary(summarise(rows([1.0]), SPANS), console, Path("runs/" + "x" * 100))
    assert f"digen eval runs/{'x' * 100}\n" in console.file.getvalue()  # type: ignore[attr-defined]
