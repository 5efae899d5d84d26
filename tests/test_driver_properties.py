"""What holds in every schedule: random costs, replicas, cuts, staleness, help and modes; found by hypothesis."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digen.schedule.staleness import StalenessPolicy
from digen.testing import Fault, Recorder, SimulatedGroup, simulate, simulated_config
from digen.types import MicroBatch, Span

STEPS = 3
SAMPLES = 2


@dataclass(frozen=True)
class Plan:
    """One schedule to try."""

    mode: str
    num_prompts: int
    per_microbatch: int
    replicas: int
    staleness: float
    tag: str
    ordered: bool
    max_in_flight: int | None
    seed: int
    ties: bool
    flaky: bool

    def seconds(self, salt: int, *, often_zero: bool) -> Any:
        """Each group's own random costs: small whole numbers where results should fall together, else anything."""
        rng = random.Random(f"{self.seed}/{salt}")
        if often_zero and rng.random() < 0.5:
            return 0.0
        return (lambda *_: rng.randint(0, 2) / 2) if self.ties else (lambda *_: rng.uniform(0.0, 2.0))

    def group(self, number: int) -> SimulatedGroup:
        kinds = ("generate", "score", "update", "sync", "pull")
        seconds = {kind: self.seconds(10 * number + k, often_zero=k > 0) for k, kind in enumerate(kinds)}
        faults = [Fault("generate", times=1), Fault("score", times=2)] if self.flaky else []
        name = f"g{number}" if number else "trainer"
        return SimulatedGroup(name, world_size=1 + number % 2, faults=faults, **seconds)

    def run(self) -> "Outcome":
        trainer = self.group(0)
        generators = [self.group(1 + k) for k in range(self.replicas)] if self.mode != "colocated" else []
        schedule = {
            "mode": self.mode,
            "prompts_per_microbatch": self.per_microbatch,
            "staleness": self.staleness if self.mode == "pipelined" else 0.0,
            "tag": self.tag if self.mode != "colocated" else "none",
            "ordered": self.ordered,
            "max_in_flight": self.max_in_flight,
        }
        config = simulated_config(steps=STEPS, samples_per_prompt=SAMPLES, schedule=schedule)
        seen = simulate(config, generators, trainer, prompts_per_step=self.num_prompts)
        return Outcome(self, seen, generators, trainer)


@dataclass(frozen=True)
class Outcome:
    plan: Plan
    seen: Recorder
    generators: list[SimulatedGroup]
    trainer: SimulatedGroup

    def spans(self, *kinds: str) -> list[Span]:
        return [span for span in self.seen.spans if span.kind in kinds]

    @property
    def all_microbatches(self) -> set[tuple[int, int]]:
        b = math.ceil(self.plan.num_prompts / self.plan.per_microbatch)
        return {(step, index) for step in range(STEPS) for index in range(b)}

    def generated(self) -> list[MicroBatch]:
        return [call.args[0] for group in (*self.generators, self.trainer) for call in group.asked("generate")]


plans = st.builds(
    Plan,
    mode=st.sampled_from(["pipelined", "pipelined", "pipelined", "naive", "colocated"]),
    num_prompts=st.integers(1, 6),
    per_microbatch=st.integers(1, 3),
    replicas=st.integers(1, 4),
    staleness=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    tag=st.sampled_from(["none", "static(1)", "static(3)", "bts"]),
    ordered=st.booleans(),
    max_in_flight=st.sampled_from([None, 1, 2]),
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    flaky=st.booleans(),
)


def every_micro_batch_goes_once_through_each_stage(o: Outcome) -> None:
    for kinds in (("generate", "assist"), ("score",), ("update",)):
        assert Counter((s.step, s.index) for s in o.spans(*kinds)) == Counter(o.all_microbatches), kinds


def stages_follow_one_another(o: Outcome) -> None:
    ends: dict[tuple[int, int], float] = {}
    for kinds in (("generate", "assist"), ("score",), ("update",)):
        for span in o.spans(*kinds):
            assert span.start >= ends.get((span.step, span.index), 0.0)
            ends[span.step, span.index] = span.end


def updates_of_a_step_lie_between_two_optimizer_steps(o: Outcome) -> None:
    calls = [call for call in o.trainer.calls if call.method in ("accumulate", "optimizer_step")]
    step = 0
    for call in calls:
        if call.method == "optimizer_step":
            step += 1
        else:
            assert call.args[0].rollout.microbatch.step == step
    lasts = [call.args[3] for call in calls if call.method == "accumulate"]
    assert lasts == ([False] * (len(lasts) // STEPS - 1) + [True]) * STEPS


def versions_lag_by_one_at_most_and_within_the_share(o: Outcome) -> None:
    policy = StalenessPolicy(o.plan.staleness if o.plan.mode == "pipelined" else 0.0)
    for step, row in enumerate(o.seen.rows):
        assert row["stale_share"] <= policy.share + 1e-9
        versions = {s.version for s in o.spans("generate", "assist") if s.step == step}
        assert versions <= {step, step - policy.lag}


def one_version_goes_with_a_micro_batch_from_first_to_last(o: Outcome) -> None:
    made = {(s.step, s.index): s.version for s in o.spans("generate", "assist")}
    assert all(made[s.step, s.index] == s.version for s in o.spans("score", "update"))


def one_call_at_a_time_per_group(o: Outcome) -> None:
    for group in (*o.generators, o.trainer):
        calls = sorted((call.start, call.end) for call in group.calls)
        assert all(a[1] <= b[0] for a, b in pairwise(calls))


def generation_is_bounded(o: Outcome) -> None:
    limit = o.plan.max_in_flight or len(o.generators) + 1
    spans = o.spans("generate", "assist")
    assert all(sum(a.start <= s.start < a.end for a in spans) <= limit for s in spans)


def assists_are_bounded_and_no_score_was_under_way(o: Outcome) -> None:
    limit = {"none": 0, "static(1)": 1, "static(3)": 3, "bts": o.plan.num_prompts}[o.plan.tag]
    assists = o.spans("assist")
    assert all(count <= limit for count in Counter(s.step for s in assists).values())
    scores = o.spans("score")
    assert not [(a, s) for a in assists for s in scores if s.step == a.step and s.start < a.start < s.end]


def nothing_is_left_behind(o: Outcome) -> None:
    assert o.trainer.store.items == {}
    assert [row["step"] for row in o.seen.rows] == list(range(STEPS))


def the_samples_are_the_same_in_every_schedule(o: Outcome) -> None:
    made = Counter(
        (b.step, b.identity(row)[0].id, b.identity(row)[1]) for b in o.generated() for row in range(b.num_samples)
    )
    n = o.plan.num_prompts
    assert made == Counter((step, step * n + p, k) for step in range(STEPS) for p in range(n) for k in range(SAMPLES))


INVARIANTS = [
    every_micro_batch_goes_once_through_each_stage,
    stages_follow_one_another,
    updates_of_a_step_lie_between_two_optimizer_steps,
    versions_lag_by_one_at_most_and_within_the_share,
    one_version_goes_with_a_micro_batch_from_first_to_last,
    one_call_at_a_time_per_group,
    generation_is_bounded,
    assists_are_bounded_and_no_score_was_under_way,
    nothing_is_left_behind,
    the_samples_are_the_same_in_every_schedule,
]


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_every_schedule_keeps_every_invariant_and_ends(plan: Plan) -> None:
    outcome = plan.run()
    for invariant in INVARIANTS:
        invariant(outcome)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(plans, plans)
def test_two_synchronous_schedules_of_the_same_prompts_train_the_same_weights(one: Plan, other: Plan) -> None:
    same = {**vars(other), "num_prompts": one.num_prompts, "staleness": 0.0}
    first = Plan(**{**vars(one), "staleness": 0.0}).run()
    second = Plan(**same).run()
    assert first.trainer.weights == pytest.approx(second.trainer.weights, abs=1e-15)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(b=st.integers(1, 12), g=st.integers(1, 40), t=st.integers(1, 40))
def test_one_generator_and_one_trainer_meet_the_formula_exactly(b: int, g: int, t: int) -> None:
    """In tenths of a second: naive B(g + t), pipelined max(Bg + t, g + Bt)."""
    spent = {}
    for mode in ("naive", "pipelined"):
        groups = SimulatedGroup("g0", generate=g / 10), SimulatedGroup("trainer", update=t / 10)
        config = simulated_config(samples_per_prompt=SAMPLES, schedule={"mode": mode})
        spent[mode] = simulate(config, groups[:1], groups[1], prompts_per_step=b).end_s * 10
    assert spent["naive"] == pytest.approx(b * (g + t))
    assert spent["pipelined"] == pytest.approx(max(b * g + t, g + b * t))
