"""The cost profile: what it remembers of measured work, and how it is carried to another run."""

import math
from collections.abc import Iterable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digen.schedule.costs import CARRIED, RECENT, Costs
from digen.testing import SimulatedGroup, simulate, simulated_config
from digen.types import Span, SpanKind


def span(kind: SpanKind, seconds: float, worker: str = "generator", rows: int = 0) -> Span:
    return Span(kind, worker, 0, 0, 0, 10.0, 10.0 + seconds, rows)


def measured(seconds: Iterable[float], kind: SpanKind = "generate", rows: int = 8) -> Costs:
    return Costs.of(span(kind, each, rows=rows) for each in seconds)


# What is typical


def test_costs_are_known_by_group_and_kind_and_by_no_other() -> None:
    costs = Costs().add(span("generate", 1.0)).add(span("score", 7.0))
    assert costs.seconds("generator", "generate") == pytest.approx(1.0)
    assert costs.seconds("generator", "score") == pytest.approx(7.0)
    assert costs.seconds("trainer", "generate") is None
    assert costs.seconds("generator", "update") is None


def test_a_costs_value_does_not_change_when_another_is_made_of_it() -> None:
    before = Costs().add(span("generate", 1.0))
    before.add(span("generate", 3.0))
    assert before.seconds("generator", "generate") == pytest.approx(1.0)


def test_a_cold_first_call_counts_until_there_is_a_second_and_never_after() -> None:
    assert measured([60.0]).seconds("generator", "generate", 8) == pytest.approx(60.0)
    for warm in range(1, 4):
        assert measured([60.0] + [1.0] * warm).seconds("generator", "generate", 8) == pytest.approx(1.0)


def test_the_first_call_of_each_size_is_cold_by_itself() -> None:
    spans = [span("update", 9.0, rows=8), span("update", 1.0, rows=8), span("update", 5.0, rows=4)]
    costs = Costs.of(spans)
    assert costs.seconds("generator", "update", 8) == pytest.approx(1.0)
    assert costs.add(span("update", 0.5, rows=4)).seconds("generator", "update", 4) == pytest.approx(0.5)


@given(st.lists(st.floats(0.9, 1.1), min_size=2 * RECENT, max_size=60), st.integers(0, 1000))
def test_up_to_half_of_the_recent_calls_may_be_outliers(usual: list[float], seed: int) -> None:
    outliers = {(seed + 2 * k) % len(usual) for k in range(RECENT // 2)}
    calls = [1000.0 if k in outliers else each for k, each in enumerate(usual)]
    assert 0.9 <= (measured(calls).seconds("generator", "generate", 8) or math.nan) <= 1.1


def test_a_machine_that_becomes_slower_is_followed() -> None:
    assert measured([1.0] * 100 + [2.0] * RECENT).seconds("generator", "generate", 8) == pytest.approx(2.0)


def test_memory_is_bounded_however_long_the_run() -> None:
    costs = measured([0.1] * 5000)
    ((sizes),) = costs.measured.values()
    assert [len(calls.recent) for calls in sizes.values()] == [RECENT]


@given(st.lists(st.floats(0.001, 100.0), min_size=2, max_size=40))
def test_the_typical_call_is_the_median_of_the_recent_ones_without_the_first(calls: list[float]) -> None:
    expected = median(10.0 + each - 10.0 for each in calls[1:][-RECENT:])
    assert measured(calls).seconds("generator", "generate", 8) == pytest.approx(expected)


# Sizes


def test_a_size_that_was_measured_is_taken_as_measured_and_another_in_proportion_to_the_nearest() -> None:
    costs = Costs.of([span("update", 4.0, rows=16), span("update", 1.5, rows=4)])
    assert costs.seconds("generator", "update", 16) == pytest.approx(4.0)
    assert costs.seconds("generator", "update", 4) == pytest.approx(1.5)
    assert costs.seconds("generator", "update", 2) == pytest.approx(0.75)
    assert costs.seconds("generator", "update", 32) == pytest.approx(8.0)
    assert costs.seconds("generator", "update", 10) == pytest.approx(1.5 * 10 / 4), "of two equally near the smaller"


def test_work_on_no_samples_has_one_size() -> None:
    assert Costs().add(span("sync", 2.0)).seconds("generator", "sync", 16) == pytest.approx(2.0)
    assert measured([3.0], rows=16).seconds("generator", "generate") == pytest.approx(3.0)


# Of a whole run


def test_a_runs_profile_at_its_end_is_rebuilt_from_its_events() -> None:
    config = simulated_config(steps=3, schedule={"tag": "bts"})
    generator = SimulatedGroup("generator", generate=2.0, score=0.25, pull=0.5)
    recorder = simulate(config, [generator], SimulatedGroup("trainer", generate=3.0, update=1.0, sync=0.125))
    costs, rows = Costs.of(recorder.spans), 2
    assert costs.seconds("generator", "generate", rows) == pytest.approx(2.0)
    assert costs.seconds("generator", "score", rows) == pytest.approx(0.25)
    assert costs.seconds("generator", "pull") == pytest.approx(0.5)
    assert costs.seconds("trainer", "assist", rows) == pytest.approx(3.0)
    assert costs.seconds("trainer", "update", rows) == pytest.approx(1.0)
    assert costs.seconds("trainer", "sync") == pytest.approx(0.125)


def test_over_a_whole_run_old_calls_count_as_much_as_new_ones_and_the_first_and_the_tails_do_not() -> None:
    spans = [span("generate", each, rows=8) for each in [99.0, *[1.0] * 50, *[2.0] * 50, 500.0, 0.0]]
    assert Costs.over(spans).seconds("generator", "generate", 8) == pytest.approx(1.5, abs=0.02)
    assert Costs.over([span("sync", 4.0)]).seconds("generator", "sync") == pytest.approx(4.0)


# Carried over


def carried() -> Costs:
    costs = Costs()
    for worker, seconds in (("generator-0", 1.0), ("generator-1", 3.0)):
        costs = costs.fixed(worker, "generate", 8, seconds).fixed(worker, "pull", 0, seconds / 10)
    return costs.fixed("learner", "update", 8, 0.5).fixed("learner", "assist", 8, 2.0).fixed("learner", "sync", 0, 0.1)


def test_a_generator_of_the_same_name_keeps_its_costs_and_another_gets_the_mean() -> None:
    costs = carried().renamed(["generator-1", "generator-2"], "trainer")
    assert costs.seconds("generator-1", "generate", 8) == pytest.approx(3.0)
    assert costs.seconds("generator-2", "generate", 8) == pytest.approx(2.0)
    assert costs.seconds("generator-2", "pull") == pytest.approx(0.2)
    assert costs.seconds("generator-0", "generate", 8) is None


def test_who_updated_is_the_trainer_whatever_its_name() -> None:
    costs = carried().renamed(["generator"], "trainer")
    assert costs.seconds("trainer", "update", 8) == pytest.approx(0.5)
    assert costs.seconds("trainer", "assist", 8) == pytest.approx(2.0)
    assert costs.seconds("trainer", "sync") == pytest.approx(0.1)
    assert costs.seconds("trainer", "generate", 8) is None
    assert costs.seconds("generator", "update", 8) is None


def test_the_trainer_of_a_colocated_run_stands_for_both_sides() -> None:
    colocated = Costs().fixed("trainer", "generate", 8, 4.0).fixed("trainer", "update", 8, 1.0)
    costs = colocated.renamed(["generator"], "trainer")
    assert costs.seconds("generator", "generate", 8) == pytest.approx(4.0)
    assert costs.seconds("trainer", "assist", 8) == pytest.approx(4.0)
    assert costs.seconds("trainer", "update", 8) == pytest.approx(1.0)


def test_of_nothing_nothing_is_carried() -> None:
    assert Costs().renamed(["generator"], "trainer") == Costs()


def test_a_carried_cost_outlives_the_cold_first_call_and_yields_to_warm_ones() -> None:
    costs = carried().renamed(["generator-0"], "trainer")
    cold = costs.add(span("generate", 60.0, "generator-0", 8))
    assert cold.seconds("generator-0", "generate", 8) == pytest.approx(1.0)
    for _ in range(2 * CARRIED):
        cold = cold.add(span("generate", 5.0, "generator-0", 8))
    assert cold.seconds("generator-0", "generate", 8) == pytest.approx(5.0)


def test_a_fixed_cost_replaces_all_sizes_and_a_scaled_one_scales_them() -> None:
    costs = Costs.of([span("update", 4.0, rows=16), span("update", 1.5, rows=4), span("score", 1.0, rows=4)])
    assert costs.fixed("generator", "update", 8, 1.0).seconds("generator", "update", 16) == pytest.approx(2.0)
    scaled = costs.scaled({"update": 0.5})
    assert scaled.seconds("generator", "update", 16) == pytest.approx(2.0)
    assert scaled.seconds("generator", "update", 4) == pytest.approx(0.75)
    assert scaled.seconds("generator", "score", 4) == pytest.approx(1.0)


def test_with_carried_costs_the_first_bubble_of_a_run_is_searched_and_not_just_filled() -> None:
    """An update takes as long as eight generations: whatever the trainer generates makes the step longer."""
    config = simulated_config(steps=1, schedule={"tag": "bts"})

    def assists(costs: Costs) -> int:
        groups = SimulatedGroup("generator", generate=1.0), SimulatedGroup("trainer", generate=4.0, update=8.0)
        recorder = simulate(config, [groups[0]], groups[1], costs=costs)
        return sum(span.kind == "assist" for span in recorder.spans)

    known = Costs().fixed("generator", "generate", 2, 1.0).fixed("generator", "score", 2, 0.0)
    known = known.fixed("trainer", "assist", 2, 4.0).fixed("trainer", "update", 2, 8.0)
    assert (assists(Costs()), assists(known)) == (1, 0)
