"""Sharing: idle sides take parts of each other's micro-batches; how close to the least possible time that comes."""

import math
import random
from collections.abc import Callable
from itertools import product
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digen.schedule.costs import Costs
from digen.schedule.share import Pace, Share, finish
from digen.schedule.tag import Activity, Bubble
from digen.testing import Recorder, SimulatedGroup, simulated_config, simulated_driver, virtual_run
from digen.types import Span, SpanKind

SAMPLES = 16


class Case:
    """Simulated steps: generators that take `g` seconds a micro-batch, a trainer that takes `helped` and `t`."""

    def __init__(
        self,
        b: int,
        t: float,
        *,
        g: tuple[float, ...] = (1.0,),
        helped: float | None = None,
        score: float = 0.0,
        sync: float = 0.0,
        steps: int = 1,
        noise: float = 0.0,
        known: bool = True,
        samples: int = SAMPLES,
        **schedule: object,
    ) -> None:
        rng = random.Random(0)

        def about(seconds: float) -> Callable[..., float] | float:
            return (lambda *_: seconds * rng.uniform(1 - noise, 1 + noise)) if noise else seconds

        own = g[0] if helped is None else helped
        generators = [
            SimulatedGroup(f"g{k}", generate=about(each), score=score, update=about(t)) for k, each in enumerate(g)
        ]
        self.trainer = SimulatedGroup("trainer", generate=about(own), update=about(t), sync=sync)
        self.seen = Recorder()
        config = simulated_config(steps=steps, samples_per_prompt=samples, schedule=schedule)
        spans = [span("trainer", "assist", own), span("trainer", "update", t), span("trainer", "sync", sync, 0)]
        for k, each in enumerate(g):
            spans += [span(f"g{k}", "generate", each), span(f"g{k}", "score", score)]
        costs = Costs.of(spans) if known else Costs()
        virtual_run(simulated_driver(config, generators, self.trainer, self.seen, prompts_per_step=b, costs=costs).run)

    @property
    def end(self) -> float:
        return self.seen.end_s

    @property
    def busy(self) -> float:
        workers = {s.worker for s in self.seen.spans}
        return sum(s.end - s.start for s in self.seen.spans) / self.end / len(workers)

    def rows(self, kind: str) -> int:
        return sum(s.rows for s in self.seen.spans if s.kind == kind)


def span(worker: str, kind: SpanKind, seconds: float, rows: int = SAMPLES) -> Span:
    return Span(kind, worker, 0, 0, 0, 0.0, seconds, rows)


def least(b: int, t: float, helped: float = 1.0) -> float:
    """k assists: the trainer works k * helped + b * t, the generator b - k, and one update is left after it."""
    return min(max(k * helped + b * t, b - k + t) for k in range(b + 1))


# How close to what is possible


@pytest.mark.parametrize(("b", "t"), list(product((3, 4, 6, 8), (0.3, 0.5, 1.0))))
def test_with_few_micro_batches_at_least_half_of_what_whole_ones_lose_is_won_back(b: int, t: float) -> None:
    half = b * (1 + t) / 2
    whole, shared = Case(b, t, tag="bts").end, Case(b, t, assist="both").end
    assert 1.03 * half < whole < 1.34 * half
    assert shared - half <= 0.5 * (whole - half)


@pytest.mark.parametrize("t", [0.2, 0.5, 1.0, 2.0, 4.0])
def test_no_ratio_of_the_two_costs_leaves_a_device_idle(t: float) -> None:
    """Not even the first generation and the last update do: they are shared too."""
    assert Case(16, t, assist="both").end <= 1.03 * 16 * (1 + t) / 2


@pytest.mark.parametrize("helped", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("t", [0.1, 0.2, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("b", [16, 32, 64, 128])
def test_a_trainer_that_generates_slowly_stays_within_two_percent_of_the_bound_for_whole_micro_batches(
    b: int, t: float, helped: float
) -> None:
    assert Case(b, t, helped=helped, assist="trainer").end <= 1.02 * least(b, t, helped)
    assert Case(b, t, helped=helped, assist="both").end <= 1.02 * least(b, t, helped)


@pytest.mark.parametrize(
    ("b", "t", "helped", "assist"),
    [
        *product((16,), (0.1, 0.3, 1.0), (1.0, 1.5, 2.0), ("trainer", "both")),
        (64, 0.3, 1.5, "both"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product((64,), (0.1, 1.0), (1.0, 2.0), ("both",))),
    ],
)
def test_costs_that_vary_by_a_fifth_and_are_learned_on_the_way_cost_less_than_five_percent(
    b: int, t: float, helped: float, assist: str
) -> None:
    case = Case(b, t, helped=helped, noise=0.2, steps=20, known=False, assist=assist)
    assert case.end <= 1.05 * 20 * least(b, t, helped)


@pytest.mark.parametrize("how", [{"tag": "bts"}, {"assist": "both"}])
@pytest.mark.parametrize("t", [0.25, 0.5, 1.0])
def test_with_tcss_all_devices_are_busy_over_twenty_steps(t: float, how: dict[str, str]) -> None:
    assert Case(16, t, sync=0.02, steps=20, known=False, staleness=0.5, **how).busy >= 0.97


@pytest.mark.parametrize("t", [0.05, 0.25, 1.0])
def test_with_tcss_four_helping_replicas_hand_over_before_they_begin_the_next_step(t: float) -> None:
    """The trainer would wait for them through a whole micro-batch else (busy 0.93 to 0.97)."""
    case = Case(16, t, g=(1.0,) * 4, sync=0.05, steps=20, known=False, staleness=0.5, assist="both")
    assert case.busy >= 0.98
    for handed in (s for s in case.seen.spans if s.kind == "reduce"):
        ahead = [s for s in case.seen.spans if s.worker == handed.worker and s.step > handed.step]
        assert not [s for s in ahead if s.kind == "generate" and s.end <= handed.start]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    b=st.integers(3, 20),
    t=st.floats(0.1, 4.0),
    g=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4).map(tuple),
    score=st.sampled_from([0.0, 0.05]),
)
def test_replicas_of_any_speed_come_close_to_all_work_divided_by_all_speeds(
    b: int, t: float, g: tuple[float, ...], score: float
) -> None:
    """What is lost is less than the longest single call: nobody is left with more than a part of one."""
    case = Case(b, t, g=g, score=score, assist="both")
    rate = sum(1 / each for each in (*g, g[0]))
    ideal = least_of_fluid(b, t, rate, len(g) + 1)
    assert case.end <= ideal + max(*g, t) + b * score + 1e-6


def least_of_fluid(b: int, t: float, rate: float, workers: int) -> float:
    """All generate, then all train: an upper bound of the best, since it uses no difference in speed."""
    return b / rate + b * t / workers


# What each side takes


def test_each_name_lets_only_its_side_take_the_others_work() -> None:
    for assist, trainer, generators in (
        ("none", False, False),
        ("trainer", True, False),
        ("generator", False, True),
        ("both", True, True),
    ):
        slow_generation, slow_updates = Case(8, 0.3, assist=assist), Case(8, 3.0, assist=assist)
        assert (slow_generation.rows("assist") > 0) == trainer
        assert (slow_updates.rows("help") > 0) == generators
        assert (slow_updates.rows("help") > 0) == bool(slow_updates.trainer.asked("add_gradients"))


def test_whoever_computes_the_gradients_the_weights_are_the_same() -> None:
    weights = {Case(8, t, g=(1.0, 0.7), steps=3, assist=assist).trainer.weights for t in (0.3, 3.0) for assist in
               ("none", "trainer", "generator", "both")}  # fmt: skip
    assert len(weights) == 1


def test_groups_stay_whole_a_micro_batch_is_scored_once_and_after_its_last_part() -> None:
    case = Case(5, 0.6, g=(1.0, 0.7), score=0.1, assist="both")
    generated = [s for s in case.seen.spans if s.kind in {"generate", "assist"}]
    assert any(s.rows < SAMPLES for s in generated)
    scores = [s for s in case.seen.spans if s.kind == "score"]
    assert sorted(s.index for s in scores) == list(range(5))
    assert all(score.start >= g.end for score in scores for g in generated if g.index == score.index)


def test_without_measured_costs_everything_stays_whole_until_there_are_some() -> None:
    case = Case(4, 0.5, steps=3, known=False, assist="both")
    first = [s for s in case.seen.spans if s.step == 0 and s.kind == "generate"]
    assert first[0].rows == SAMPLES
    assert any(0 < s.rows < SAMPLES for s in case.seen.spans if s.step == 2)


def test_no_part_is_smaller_than_an_eighth_of_a_micro_batch() -> None:
    for b, t in product((3, 5, 8), (0.13, 0.37, 1.7)):
        case = Case(b, t, g=(1.0, 0.6), assist="both", samples=24)
        rows = [s.rows for s in case.seen.spans if s.kind in {"generate", "assist", "update", "help"}]
        assert min(rows) >= 3


def test_a_decision_predicts_when_the_step_ends() -> None:
    case = Case(16, 0.3, sync=0.5, assist="both")
    end = max(s.end for s in case.seen.spans if s.kind == "sync")
    assert case.seen.decisions
    for decision in case.seen.decisions:
        assert decision.predicted_end == pytest.approx(end, rel=0.05)


# The two rules, alone


@settings(deadline=None, derandomize=True)
@given(
    st.floats(0, 100),
    st.lists(st.builds(Pace, st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=6),
)
def test_work_flows_to_whoever_is_free_until_exactly_all_is_done(samples: float, paces: list[Pace]) -> None:
    end = finish(samples, paces)
    assert end >= min(pace.free for pace in paces) - 1e-9
    done = math.fsum(max(0.0, end - pace.free) / pace.each for pace in paces)
    assert done == pytest.approx(samples, abs=1e-6)


def test_nobody_to_work_never_ends() -> None:
    assert finish(1.0, []) == math.inf


def bubble(trainer: Activity, *generators: Activity, **facts: int) -> Bubble:
    return Bubble(0, 8, 1, 0, 0, 0, 0, trainer, generators, 3, 0, naive=False, rows=16, kept=16, **facts)


def test_a_generator_leaves_at_the_end_what_another_one_can_do_by_then() -> None:
    """One micro-batch is left; the other replica is free in 0.4 s: 0.7 of it by 0.7 s, 0.3 by the other."""
    costs = Costs.of([span("g0", "generate", 1.0), span("g1", "generate", 1.0), span("trainer", "update", 4.0)])
    doing = Activity("g0"), Activity("g1", "generate", 0, 0.6, rows=16)
    facts = bubble(Activity("trainer", "update", 0, 0.0, rows=16), *doing, pending_rows=16, next_rows=16, untaken=64)
    assert Share(trainer=False, generators=True).generate("g0", facts, costs) == 11


def test_a_trainer_does_not_start_what_would_keep_it_from_its_updates() -> None:
    costs = Costs.of([span("g0", "generate", 1.0), span("trainer", "update", 2.0), span("trainer", "assist", 1.0)])
    doing = Activity("g0", "generate", 0, 0.9, rows=16)
    facts = bubble(Activity("trainer"), doing, pending_rows=16, next_rows=16, untaken=48)
    assert Share(trainer=True, generators=False).choose(facts, costs).rows == 2  # what fits until the next is ready


def test_costs_are_the_mean_of_the_replicas_where_one_is_new() -> None:
    costs = Costs.of([span("g0", "generate", 1.0), span("g1", "generate", 3.0), span("trainer", "update", 4.0)])
    known = Costs.of([*(span(f"g{k}", "generate", s) for k, s in enumerate((1.0, 3.0, mean((1.0, 3.0)))))])
    known = known.add(span("trainer", "update", 4.0))
    doing = [Activity(f"g{k}") for k in range(3)]
    facts = bubble(Activity("trainer"), *doing, pending_rows=16, next_rows=16, untaken=64)
    share = Share(trainer=False, generators=False)
    assert share.generate("g2", facts, costs) == share.generate("g2", facts, known) < 16
