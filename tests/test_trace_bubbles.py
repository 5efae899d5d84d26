"""Bubbles and their causes, on schedules drawn by hand, on generated ones, and on those of the real driver."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digen.observe.bubbles import (
    CAUSES,
    TRAINING,
    StepTime,
    Wait,
    assists,
    by_name,
    gaps,
    step_times,
    training_window,
    union,
    waits,
)
from digen.observe.timeline import KIND_COLOURS
from digen.testing import SimulatedGroup, simulate, simulated_config
from digen.types import Decision, Span, SpanKind


def span(kind: SpanKind, worker: str, place: str, start: float, end: float, version: int = 0) -> Span:
    """`place` is step.micro-batch, or the step alone."""
    step, _, index = place.partition(".")
    return Span(kind, worker, int(step), int(index or -1), version, start, end, 4 if index else 0)


def drawn(spans: list[Span], worker: str) -> list[tuple[str, float, float]]:
    return [(wait.cause, wait.start, wait.end) for wait in waits(spans) if wait.worker == worker]


# One generator, one trainer, two micro-batches in step 0 and one in step 1.
GAP = [
    span("load", "generator", "0", -5, 0),
    span("load", "trainer", "0", -5, -1),
    span("generate", "generator", "0.0", 0, 4),
    span("score", "generator", "0.0", 4, 5),
    span("generate", "generator", "0.1", 5, 9),
    span("update", "trainer", "0.0", 5, 7),
    span("score", "generator", "0.1", 9, 10),
    span("update", "trainer", "0.1", 10, 12),
    span("sync", "trainer", "0", 12, 13, 1),
    span("pull", "generator", "1", 13, 14, 1),
    span("generate", "generator", "1.0", 14, 18, 1),
    span("score", "generator", "1.0", 18, 19, 1),
    span("update", "trainer", "1.0", 19, 21, 1),
    span("sync", "trainer", "1", 21, 22, 2),
    span("save", "trainer", "1", 22, 30, 2),
]


def test_a_gap_is_cut_where_its_cause_changes() -> None:
    assert drawn(GAP, "trainer") == [
        ("start-up", 0, 5),
        ("generator", 7, 9),
        ("scoring", 9, 10),
        ("sync", 13, 14),
        ("generator", 14, 18),
        ("scoring", 18, 19),
    ]
    assert drawn(GAP, "generator") == [("trainer", 10, 12), ("sync", 12, 13), ("trainer", 19, 21), ("sync", 21, 22)]


def test_loading_before_and_saving_after_training_are_no_part_of_it() -> None:
    assert training_window(GAP) == (0, 22)
    assert waits(GAP) == waits([s for s in GAP if s.kind not in ("load", "save")])


def test_a_save_between_two_steps_is_work_of_the_trainer_and_others_wait_for_it() -> None:
    spans = [
        span("generate", "generator", "0.0", 0, 1),
        span("update", "trainer", "0.0", 1, 2),
        span("save", "trainer", "0", 2, 5),
        span("update", "trainer", "0.1", 5, 6),
    ]
    assert drawn(spans, "generator") == [("trainer", 1, 6)]
    assert drawn(spans, "trainer") == [("start-up", 0, 1)]


def test_in_naive_mode_a_score_is_waited_for_only_when_nothing_is_left_to_generate() -> None:
    spans = [
        span("sync", "trainer", "0", 0, 1, 1),
        span("generate", "generator-0", "1.0", 0, 3),
        span("score", "generator-0", "1.0", 3, 4),
        span("generate", "generator-1", "1.1", 0, 6),
        span("score", "generator-1", "1.1", 6, 7),
        span("update", "trainer", "1.0", 7, 8),
    ]
    assert drawn(spans, "trainer") == [("generator", 1, 3), ("scoring", 3, 4), ("generator", 4, 6), ("scoring", 6, 7)]
    naive = [s for s in spans if s.kind != "update"] + [span("update", "trainer", "1.5", 7, 8)]
    assert drawn(naive, "trainer") == [("generator", 1, 6), ("scoring", 6, 7)]


def test_what_is_made_for_the_next_step_does_not_hide_the_score_of_this_one() -> None:
    spans = [
        span("sync", "trainer", "0", 0, 1, 1),
        span("generate", "generator-0", "1.1", 0, 3),
        span("score", "generator-0", "1.1", 3, 4),
        span("generate", "generator-1", "2.0", 0, 6),
        span("update", "trainer", "1.0", 4, 6),
    ]
    assert drawn(spans, "trainer") == [("generator", 1, 3), ("scoring", 3, 4)]


def test_an_idle_replica_waits_for_what_the_idle_trainer_waits_for() -> None:
    spans = [
        span("generate", "generator-0", "0.0", 0, 2),
        span("generate", "generator-1", "0.1", 0, 6),
        span("score", "generator-1", "0.1", 6, 7),
        span("sync", "trainer", "0", 7, 8, 1),
    ]
    assert drawn(spans, "generator-0") == [("generator", 2, 6), ("scoring", 6, 7), ("sync", 7, 8)]


def test_the_trainer_waits_for_a_generator_that_helps_and_for_the_sync_when_it_hands_over() -> None:
    spans = [
        span("update", "trainer", "0.0", 0, 2),
        span("help", "generator", "0.1", 0, 4),
        span("reduce", "generator", "0", 4, 5),
        span("sync", "trainer", "0", 5, 6, 1),
    ]
    assert drawn(spans, "trainer") == [("generator", 2, 4), ("sync", 4, 5)]


def test_what_is_generated_for_the_next_step_keeps_the_trainer_waiting_too() -> None:
    spans = [
        span("assist", "trainer", "0.1", 0, 2),
        span("generate", "generator", "1.0", 0, 5),
        span("score", "generator", "0.1", 5, 6),
        span("update", "trainer", "0.1", 6, 7),
    ]
    assert drawn(spans, "trainer") == [("generator", 2, 5), ("scoring", 5, 6)]


def test_when_nobody_works_the_driver_is_what_everybody_waits_for() -> None:
    spans = [
        span("update", "trainer", "0.0", 0, 1),
        span("generate", "generator", "0.1", 0, 1),
        span("update", "trainer", "0.1", 1.5, 2),
    ]
    assert drawn(spans, "trainer") == [("driver", 1, 1.5)]
    assert drawn(spans, "generator") == [("driver", 1, 1.5), ("trainer", 1.5, 2)]


def test_until_its_first_work_a_worker_starts_up_and_one_without_any_does_nothing_else() -> None:
    spans = [*GAP, span("load", "generator-2", "0", -5, -3), span("generate", "generator-3", "1.1", 13.5, 15)]
    assert drawn(spans, "generator-2") == [("start-up", 0, 22)]
    assert drawn(spans, "generator-3")[0] == ("start-up", 0, 13.5)


def test_workers_are_ordered_by_number() -> None:
    names = ["trainer", "generator-10", "generator-2", "generator"]
    assert sorted(names, key=by_name) == ["generator", "generator-2", "generator-10", "trainer"]


KINDS = st.sampled_from(sorted(KIND_COLOURS))
GRID = st.integers(0, 3).map(lambda quarter: quarter / 4)


@st.composite
def schedules(draw: st.DrawFn) -> list[Span]:
    """Any work on up to four workers, one piece at a time on each, with and without gaps."""
    spans = []
    for worker in ("trainer", "generator-0", "generator-1", "generator-2")[: draw(st.integers(1, 4))]:
        now = -draw(GRID)
        for _ in range(draw(st.integers(0, 6))):
            start = now + draw(GRID)
            now = start + draw(GRID)
            spans.append(Span(draw(KINDS), worker, draw(st.integers(0, 2)), draw(st.integers(-1, 1)), 0, start, now))
    return spans


def holds(spans: list[Span]) -> None:
    """Work and waits of every worker are the wall time of training: no second twice, none left out."""
    low, high = training_window(spans)
    found = waits(spans)
    for worker in {s.worker for s in spans}:
        own = [wait for wait in found if wait.worker == worker]
        work = union((max(s.start, low), min(s.end, high)) for s in spans if s.worker == worker and s.end > low)
        busy = sum(end - start for start, end in work if end > start)
        assert busy + sum(wait.length_s for wait in own) == pytest.approx(high - low)
        assert all(one.end <= other.start for one, other in pairwise(own))
        assert all(wait.cause in CAUSES and wait.length_s > 0 for wait in own)
        assert union((wait.start, wait.end) for wait in own) == gaps(
            [s for s in spans if s.worker == worker], (low, high)
        )


@given(schedules())
def test_every_second_of_every_worker_is_work_or_a_wait_of_one_cause(spans: list[Span]) -> None:
    holds(spans)


@pytest.mark.parametrize(
    "schedule",
    [
        {"mode": "naive"},
        {"mode": "pipelined"},
        {"mode": "pipelined", "tag": "static(1)"},
        {"mode": "pipelined", "tag": "bts", "staleness": 0.5},
    ],
)
def test_so_it_is_in_schedules_of_the_real_driver(schedule: dict[str, object]) -> None:
    config = simulated_config(steps=3, schedule=schedule)
    generators = [SimulatedGroup(f"generator-{k}", generate=4 + k, score=0.5, pull=0.25) for k in range(2)]
    spans = simulate(config, generators, SimulatedGroup("trainer", generate=5, update=1, sync=0.5)).spans
    holds(spans)
    assert not [wait for wait in waits(spans) if wait.cause == "driver"]


def test_the_trainer_of_a_naive_schedule_waits_exactly_for_generation_scores_and_sync() -> None:
    """Two micro-batches of 4 s, scores of 0.5 s, pull of 0.25 s: per step 8 s, 1 s (the last one alone) and 0.25 s."""
    config = simulated_config(steps=2, schedule={"mode": "naive"})
    generator = SimulatedGroup("generator", generate=4, score=0.5, pull=0.25)
    spans = simulate(config, [generator], SimulatedGroup("trainer", update=1, sync=0.5), prompts_per_step=2).spans
    own = [wait for wait in waits(spans) if wait.worker == "trainer"]
    seconds = {cause: sum(wait.length_s for wait in own if wait.cause == cause) for cause in CAUSES}
    assert seconds == {"start-up": 9, "generator": 8, "scoring": 1, "sync": 0.25, "trainer": 0, "driver": 0}


def test_a_step_lasts_from_one_sync_to_the_next() -> None:
    assert step_times(GAP) == [StepTime(0, 0, 13), StepTime(1, 13, 22)]
    resumed = [
        span("sync", "trainer", "3", 0, 1, 3),
        span("update", "trainer", "3.0", 2, 3),
        span("sync", "trainer", "3", 3, 4, 4),
    ]
    assert step_times(resumed) == [StepTime(3, 0, 4)]  # the first only published what was loaded


def test_decisions_are_counted_and_their_step_ends_held_against_the_real_ones() -> None:
    decisions = [
        Decision(0, "trainer", 0.0, 4, None),
        Decision(0, "trainer", 7.0, 0, 12.0),  # 1 s early in a step of 13 s
        Decision(1, "trainer", 13.0, 2, 25.0),  # 3 s late in a step of 9 s
        Decision(1, "trainer", 14.0, 0, 22.0),
        Decision(2, "trainer", 22.0, 4, 99.0),  # never ended
    ]
    found = assists(GAP, decisions)
    assert (found.taken, found.skipped, found.predicted) == (3, 2, 3)
    assert (found.median_error_s, found.max_error_s) == (1.0, 3.0)
    assert (found.median_error, found.max_error) == (pytest.approx(1 / 13), pytest.approx(3 / 9))


def test_a_run_without_decisions_counts_its_assists() -> None:
    found = assists([*GAP, span("assist", "trainer", "1.1", 15, 16)], [])
    assert (found.taken, found.skipped, found.predicted) == (1, 0, 0)
    assert math.isnan(found.median_error)
    assert math.isnan(found.max_error_s)


def test_no_training_no_bubbles() -> None:
    assert waits([]) == []
    assert waits([span("load", "trainer", "0", -1, 0)]) == []
    assert Wait("trainer", "sync", 1.0, 3.5).length_s == 2.5
    assert set(KIND_COLOURS) > TRAINING
