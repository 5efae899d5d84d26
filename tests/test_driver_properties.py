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

STEPS = 4
SAMPLES = 3


@dataclass(frozen=True)
class Plan:
    """One schedule to try."""

    mode: str
    num_prompts: int
    per_microbatch: int
    replicas: int
    staleness: float
    tag: str
    assist: str
    updates_per_rollout: int
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
        shares = self.assist if self.mode == "pipelined" else "none"
        schedule = {
            "mode": self.mode,
            "prompts_per_microbatch": self.per_microbatch,
            "staleness": self.staleness if self.mode == "pipelined" else 0.0,
            "tag": self.tag if self.mode != "colocated" and shares == "none" else "none",
            "assist": shares,
            "ordered": self.ordered and shares == "none",
            "max_in_flight": self.max_in_flight,
        }
        updates = {"updates_per_rollout": self.updates_per_rollout}
        config = simulated_config(steps=STEPS, samples_per_prompt=SAMPLES, schedule=schedule, trainer=updates)
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

    @property
    def shares(self) -> str:
        return self.plan.assist if self.plan.mode == "pipelined" else "none"

    def generated(self) -> list[tuple[MicroBatch, tuple[int, ...]]]:
        calls = [call for group in (*self.generators, self.trainer) for call in group.asked("generate")]
        return [(call.args[0], call.args[2]) for call in calls]

    def due(self, step: int) -> int:
        return step - step % self.plan.updates_per_rollout


plans = st.builds(
    Plan,
    mode=st.sampled_from(["pipelined", "pipelined", "pipelined", "naive", "colocated"]),
    num_prompts=st.integers(1, 6),
    per_microbatch=st.integers(1, 3),
    replicas=st.integers(1, 4),
    staleness=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    tag=st.sampled_from(["none", "static(1)", "static(3)", "bts"]),
    assist=st.sampled_from(["none", "none", "trainer", "generator", "both"]),
    updates_per_rollout=st.sampled_from([1, 1, 2, 4]),
    ordered=st.booleans(),
    max_in_flight=st.sampled_from([None, 1, 2]),
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    flaky=st.booleans(),
)


def every_sample_goes_once_through_each_stage(o: Outcome) -> None:
    last = o.plan.num_prompts - (math.ceil(o.plan.num_prompts / o.plan.per_microbatch) - 1) * o.plan.per_microbatch
    sizes = {(s, i): SAMPLES * min(o.plan.per_microbatch, o.plan.num_prompts) for s, i in o.all_microbatches}
    sizes |= {
        (s, i): SAMPLES * last for s, i in o.all_microbatches if (i + 1) * o.plan.per_microbatch >= o.plan.num_prompts
    }
    for kinds in (("generate", "assist"), ("score",), ("update", "help")):
        rows: Counter[tuple[int, int]] = Counter()
        for span in o.spans(*kinds):
            rows[span.step, span.index] += span.rows
        assert rows == sizes, kinds
    if o.shares == "none":
        assert all(span.rows == sizes[span.step, span.index] for span in o.spans("generate", "assist", "update"))


def stages_follow_one_another(o: Outcome) -> None:
    ends: dict[tuple[int, int], float] = {}
    for kinds in (("generate", "assist"), ("score",), ("update", "help")):
        for span in o.spans(*kinds):
            assert span.start >= ends.get((span.step, span.index), 0.0)
        for span in o.spans(*kinds):
            ends[span.step, span.index] = max(span.end, ends.get((span.step, span.index), 0.0))


def updates_of_a_step_lie_between_two_optimizer_steps(o: Outcome) -> None:
    syncs = {span.step: span for span in o.spans("sync")}
    for span in o.spans("update", "help", "reduce"):
        assert span.end <= syncs[span.step].start
        assert span.step == 0 or span.start >= syncs[span.step - 1].end
    if o.shares in ("none", "trainer"):
        lasts = [call.args[3] for call in o.trainer.asked("accumulate")]
        assert lasts == ([False] * (len(lasts) // STEPS - 1) + [True]) * STEPS


def a_generator_helps_only_when_told_to_and_under_the_trainers_weights(o: Outcome) -> None:
    assert not o.spans("help", "reduce") or o.shares in ("generator", "both")
    helped = {(s.worker, s.step) for s in o.spans("help")}
    assert {(s.worker, s.step) for s in o.spans("reduce")} == helped
    assert all(step == o.due(step) for _, step in helped)


def versions_lag_by_one_rollout_at_most_and_within_the_share(o: Outcome) -> None:
    policy = StalenessPolicy(o.plan.staleness if o.plan.mode == "pipelined" else 0.0)
    for step, row in enumerate(o.seen.rows):
        assert row["stale_share"] <= policy.share + 1e-9
        versions = {s.version for s in o.spans("generate", "assist") if s.step == step}
        assert versions <= {o.due(step), o.due(step) - policy.lag * o.plan.updates_per_rollout}


def one_version_goes_with_a_micro_batch_from_first_to_last(o: Outcome) -> None:
    made = {(s.step, s.index): s.version for s in o.spans("generate", "assist")}
    assert all(made[s.step, s.index] == s.version for s in o.spans("generate", "assist", "score", "update", "help"))


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
    if o.shares != "none":
        limit = 0 if o.shares == "generator" else o.plan.num_prompts * SAMPLES
    assists = o.spans("assist")
    assert all(count <= limit for count in Counter(s.step for s in assists).values())
    scores = o.spans("score")
    assert not [(a, s) for a in assists for s in scores if s.step == a.step and s.start < a.start < s.end]


def nothing_is_left_behind(o: Outcome) -> None:
    assert o.trainer.store.items == {}
    assert [row["step"] for row in o.seen.rows] == list(range(STEPS))


def the_samples_are_the_same_in_every_schedule(o: Outcome) -> None:
    made = Counter((b.step, b.identity(row)[0].id, b.identity(row)[1]) for b, rows in o.generated() for row in rows)
    n = o.plan.num_prompts
    assert made == Counter((step, step * n + p, k) for step in range(STEPS) for p in range(n) for k in range(SAMPLES))


INVARIANTS = [
    every_sample_goes_once_through_each_stage,
    stages_follow_one_another,
    updates_of_a_step_lie_between_two_optimizer_steps,
    a_generator_helps_only_when_told_to_and_under_the_trainers_weights,
    versions_lag_by_one_rollout_at_most_and_within_the_share,
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
    same["updates_per_rollout"] = one.updates_per_rollout
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
