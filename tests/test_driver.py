"""The driver on simulated groups: schedules to the second, versions, failures, references, and what it costs itself."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.lowlevel import checkpoint

from digen.errors import ConfigError, DivergedError, RewardError, SyncError, WorkerDied, WorkerError
from digen.inflight import InFlight, Work
from digen.schedule.tag import Bubble, Choice
from digen.testing import (
    Fault,
    Recorder,
    Seconds,
    SimulatedGroup,
    identity_value,
    simulate,
    simulated_config,
    simulated_driver,
    simulated_prompts,
    virtual_run,
)
from digen.types import MicroBatch, Prompt, Span, Start, Stat, StepReport


class Case:
    """A run on simulated groups that has ended well, and what is left of it."""

    def __init__(
        self,
        *,
        mode: str = "pipelined",
        steps: int = 1,
        b: int = 4,
        g: Seconds | Sequence[Seconds] = 1.0,
        t: Seconds = 0.6,
        replicas: int = 1,
        samples: int = 2,
        generator: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        sections: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **schedule: Any,
    ) -> None:
        each = g if isinstance(g, Sequence) else [g] * replicas
        self.generators = [SimulatedGroup(f"g{k}", generate=s, **(generator or {})) for k, s in enumerate(each)]
        self.trainer = SimulatedGroup("trainer", **{"generate": each[0], "update": t, **(trainer or {})})
        self.generators = [] if mode == "colocated" else self.generators
        self.config = simulated_config(
            steps=steps, samples_per_prompt=samples, schedule={"mode": mode, **schedule}, **(sections or {})
        )
        self.seen = simulate(self.config, self.generators, self.trainer, prompts_per_step=b, **(options or {}))
        assert self.trainer.store.items == {}, "references were not dropped"

    @property
    def step_times(self) -> list[float]:
        return [round(row["step_time_s"], 6) for row in self.seen.rows]

    def spans(self, *kinds: str, step: int | None = None) -> list[Span]:
        return [s for s in self.seen.spans if s.kind in kinds and step in (None, s.step)]

    def timeline(self, kind: str) -> list[tuple[int, float, float]]:
        return [(s.index, round(s.start, 6), round(s.end, 6)) for s in self.spans(kind)]


def uniform(low: float, high: float, seed: int) -> Callable[..., float]:
    """Random seconds of one group."""
    rng = random.Random(seed)
    return lambda *_: rng.uniform(low, high)


# Schedules to the second


@pytest.mark.parametrize("b", [1, 2, 5, 8])
@pytest.mark.parametrize("g", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.5])
def test_naive_takes_the_sum_and_pipelined_the_longer_side_plus_the_other_s_one(b: int, g: float, t: float) -> None:
    assert Case(mode="naive", b=b, g=g, t=t).seen.end_s == pytest.approx(b * (g + t))
    assert Case(mode="pipelined", b=b, g=g, t=t).seen.end_s == pytest.approx(max(b * g + t, g + b * t))
    assert Case(mode="colocated", b=b, g=g, t=t).seen.end_s == pytest.approx(b * (g + t))


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_generate_side_by_side(replicas: int) -> None:
    b, g, t = 6, 1.0, 0.3
    assert Case(mode="naive", b=b, g=g, t=t, replicas=replicas).seen.end_s == pytest.approx(b / replicas * g + b * t)
    case = Case(b=b, g=g, t=t, replicas=replicas)
    assert case.seen.end_s == pytest.approx(b / replicas * g + replicas * t)
    assert Counter(s.worker for s in case.spans("generate")) == {f"g{k}": b // replicas for k in range(replicas)}


def test_scoring_goes_before_generation_on_the_generator() -> None:
    case = Case(b=2, generator={"score": 0.25}, t=0.5)
    assert case.timeline("generate") == [(0, 0.0, 1.0), (1, 1.25, 2.25)]
    assert case.timeline("score") == [(0, 1.0, 1.25), (1, 2.25, 2.5)]
    assert case.timeline("update") == [(0, 1.25, 1.75), (1, 2.5, 3.0)]


def test_colocated_generates_all_scores_all_and_then_updates() -> None:
    case = Case(mode="colocated", b=3, trainer={"score": 0.25})
    assert [s.kind for s in case.seen.spans] == ["generate", "score"] * 3 + ["update"] * 3 + ["sync"]
    assert case.seen.end_s == pytest.approx(3 * 1.0 + 3 * 0.25 + 3 * 0.6)


def test_the_hand_drawn_schedules_of_p99_each_no_slower_than_the_one_before() -> None:
    """Generate 1 s x 4, assist 1 s, update 0.6 s, two steps; drawn by hand, not by the driver."""
    naive = Case(steps=2, mode="naive")
    gap = Case(steps=2)
    helped = Case(steps=2, tag="static(1)")
    stale = Case(steps=2, tag="static(1)", staleness=0.5)
    assert naive.step_times == [6.4, 6.4]
    assert gap.step_times == [4.6, 4.6]
    assert helped.step_times == [3.6, 3.6]
    assert stale.step_times == [3.6, 3.4]
    assert helped.timeline("assist") == [(1, 0.0, 1.0), (0, 3.6, 4.6)]  # at 3.6 the generator pulls first
    assert helped.timeline("update")[:4] == [(0, 1.0, 1.6), (1, 1.6, 2.2), (2, 2.2, 2.8), (3, 3.0, 3.6)]
    assert stale.timeline("generate")[3:] == [(0, 3.0, 4.0), (2, 4.0, 5.0), (3, 5.0, 6.0)]
    assert stale.timeline("update")[4:] == [(0, 4.6, 5.2), (1, 5.2, 5.8), (2, 5.8, 6.4), (3, 6.4, 7.0)]


def test_staleness_alone_hides_the_last_update_behind_generation() -> None:
    assert Case(steps=3).step_times == [4.6, 4.6, 4.6]
    assert Case(steps=3, staleness=0.5).step_times == [4.6, 4.0, 4.0]


def test_too_many_assists_make_the_trainer_the_long_tail() -> None:
    """A slow assist (2.5 s): three of them end at 7.5 s, after generation alone would have ended it all."""
    few, many = (
        Case(b=6, t=0.2, tag=f"static({n})", trainer={"generate": 2.5}, max_in_flight=2).seen.end_s for n in (1, 3)
    )
    assert few == pytest.approx(5.2)
    assert many > few


def test_a_slow_sync_delays_synchronous_generation_and_hides_behind_stale_one() -> None:
    sync = {"trainer": {"sync": 2.0}, "generator": {"pull": 0.5}}
    assert Case(steps=2, t=0.5, **sync).step_times == [6.5, 7.0]  # 4 + 0.5 + 2, then a pull first
    assert Case(steps=2, t=0.5, staleness=0.5, **sync).step_times == [6.5, 5.0]  # two stale ones start at 4.0


# TAG


def test_no_bubble_is_filled_while_a_score_is_under_way() -> None:
    """Idle from 0.75 s on, the trainer waits for the score that runs from 1.0 to 1.5 s instead of helping again."""
    case = Case(b=5, t=0.25, generator={"score": 0.5}, trainer={"generate": 1.25}, tag="static(9)")
    scores, assists = case.spans("score"), case.spans("assist")
    assert len(assists) >= 2
    assert not [(a, s) for a in assists for s in scores if s.start <= a.start < s.end]


def test_a_rollout_of_the_trainer_waits_in_sq_behind_the_generators_task() -> None:
    case = Case(b=3, g=2.0, trainer={"generate": 0.5}, generator={"score": 0.25}, tag="static(1)")
    assert case.timeline("assist") == [(1, 0.0, 0.5)]
    assert case.timeline("score") == [(1, 2.0, 2.25), (0, 2.25, 2.5), (2, 4.5, 4.75)]
    assert case.timeline("update")[:2] == [(1, 2.25, 2.85), (0, 2.85, 3.45)]


def test_a_policy_is_asked_once_per_bubble_and_told_what_everybody_does() -> None:
    asked: list[Bubble] = []

    class Curious:
        def choose(self, bubble: Bubble, costs: object) -> Choice:
            asked.append(bubble)
            return Choice(0)

    generators = [SimulatedGroup(f"g{k}", generate=1.0 + k / 4, score=0.125) for k in range(2)]
    trainer = SimulatedGroup("trainer", update=0.125)
    driver = simulated_driver(simulated_config(), generators, trainer, Recorder(), prompts_per_step=6)
    driver.tag = Curious()
    virtual_run(driver.run)
    assert [(b.pending, b.trained, b.updates_left) for b in asked] == [(4, 0, 6), (2, 2, 4), (1, 3, 3)]
    doing = [[(a.worker, a.kind, a.elapsed_s) for a in b.generators] for b in asked]
    assert doing[0] == [("g0", "generate", 0.0), ("g1", "generate", 0.0)]  # at 0.0
    assert doing[1] == [("g0", "generate", 0.375), ("g1", "generate", 0.125)]  # at 1.5, after two updates
    assert doing[2] == [("g0", "generate", 0.125), ("g1", "generate", 1.0)]  # at 2.375


def test_measured_costs_are_there_for_the_policy() -> None:
    generators, trainer = [SimulatedGroup("g0", generate=1.5)], SimulatedGroup("trainer", update=0.5)
    driver = simulated_driver(simulated_config(), generators, trainer, Recorder())
    virtual_run(driver.run)
    assert driver.costs.seconds("g0", "generate", 2) == pytest.approx(1.5)
    assert driver.costs.seconds("trainer", "update", 2) == pytest.approx(0.5)


# Versions: P17, P18, P19, P21, P22, P24


def test_p17_staleness_zero_with_a_slow_sync_ends_and_every_sample_has_its_own_version() -> None:
    case = Case(steps=5, g=0.1, trainer={"sync": 2.0})
    assert len(case.seen.rows) == 5
    assert all(s.version == s.step for s in case.spans("generate"))
    assert len(case.spans("generate")) == len(case.spans("update")) == 20
    syncs = {s.step: s.end for s in case.spans("sync")}
    assert all(s.start >= syncs[s.step - 1] for s in case.spans("generate") if s.step > 0)


def test_p18_the_asynchronous_loop_with_staleness_zero_is_the_synchronous_one() -> None:
    cases = [
        Case(steps=4, mode="colocated"),
        Case(steps=4, mode="naive"),
        Case(steps=4),
        Case(steps=4, staleness=0.0, window=2, tag="static(2)", g=[uniform(0.1, 2.0, k) for k in range(3)]),
        Case(steps=4, staleness=0.2),  # less than one of four micro-batches
        Case(steps=4, prompts_per_microbatch=3),
    ]
    assert len({case.trainer.weights for case in cases}) == 1
    assert cases[0].trainer.weights != 0.0


def test_p19_a_sync_during_a_trajectory_neither_cancels_nor_changes_it() -> None:
    case = Case(steps=4, g=5.0, t=0.1, b=2, staleness=0.5, tag="none")
    overlapping = [
        (g, s)
        for g in case.spans("generate")
        for s in case.spans("sync")
        if g.start < s.end < g.end and g.step > s.step
    ]
    assert overlapping, "no sync ended during a generation: the case shows nothing"
    assert all(g.version == s.version - 1 for g, s in overlapping)
    assert Counter(s.step for s in case.spans("generate")) == dict.fromkeys(range(4), 2)


def test_p21_staleness_is_bounded_by_pacing_and_nothing_is_thrown_away() -> None:
    case = Case(steps=20, b=8, g=uniform(0.1, 2.0, 1), t=uniform(0.1, 2.0, 2), staleness=0.5)
    stale = Counter(s.step for s in case.spans("generate") if s.version < s.step)
    assert max(stale.values()) == 4
    assert all(row["stale_share"] == stale[row["step"]] / 8 for row in case.seen.rows)
    assert len(case.spans("generate")) == len(case.spans("update")) == 160


@pytest.mark.parametrize("seed", range(20))
def test_p22_a_fast_generator_and_a_slow_trainer_end_cleanly_every_time(seed: int) -> None:
    g, t = [uniform(0.0, 0.2, seed), uniform(0.0, 0.2, seed + 100)], uniform(1.0, 3.0, seed + 200)
    case = Case(steps=3, g=g, t=t, staleness=0.5)
    assert case.seen.end_s == pytest.approx(case.seen.rows[-1]["time_s"])


def test_p24_a_resumed_run_publishes_first_and_keeps_its_bounds() -> None:
    generator = SimulatedGroup("g0", generate=1.0, pull=0.5)
    trainer = SimulatedGroup("trainer", update=0.6, sync=1.0)
    trainer.version, trainer.weights = 50, 1.25
    config = simulated_config(steps=53, schedule={"staleness": 0.5, "max_in_flight": 1})
    seen = simulate(config, [generator], trainer, start=Start(50, loaded=True))
    assert [row["step"] for row in seen.rows] == [50, 51, 52]
    assert [(s.kind, s.version) for s in seen.spans[:3]] == [("sync", 50), ("pull", 50), ("generate", 50)]
    assert all(row["stale_share"] <= 0.5 for row in seen.rows)
    assert seen.rows[0]["stale_share"] == 0.0


def test_weights_that_nobody_will_pull_are_not_published() -> None:
    case = Case(steps=3)
    assert [call.args for call in case.trainer.asked("push")] == [(1,), (2,)]
    assert Case(steps=3, mode="colocated").trainer.asked("push") == []


def test_idle_replicas_do_not_keep_old_weights_alive() -> None:
    case = Case(steps=12, b=2, replicas=5, generator={"pull": 3.0})
    assert case.trainer.store.peak < 12


def test_a_replica_with_other_weights_after_a_pull_ends_the_run() -> None:
    with pytest.raises(SyncError, match=r"g0 rank 0 .* version 1.*fingerprint wrong"):
        Case(steps=2, generator={"alter": {"pull": lambda _: "wrong"}})


def test_max_in_flight_bounds_generation_calls_under_way() -> None:
    case = Case(b=6, replicas=3, max_in_flight=2, tag="static(3)")
    starts = case.spans("generate", "assist")
    at_once = [sum(o.start <= s.start < o.end for o in starts) for s in starts]
    assert max(at_once) == 2


# Data: P25, P26, P28, P32


def test_p25_every_step_has_its_prompts_and_whole_groups() -> None:
    case = Case(steps=50, b=6, samples=4, prompts_per_microbatch=4, g=0.0, t=0.0, staleness=0.5)
    for step in range(50):
        batches: list[MicroBatch] = [
            call.args[0] for call in case.generators[0].asked("generate") if call.args[0].step == step
        ]
        assert len({prompt.id for batch in batches for prompt in batch.prompts}) == 6
        assert sum(batch.num_samples for batch in batches) == 24


def test_p26_ranks_micro_batch_and_group_size_need_not_divide_each_other() -> None:
    case = Case(b=9, samples=5, prompts_per_microbatch=4, generator={"world_size": 3}, trainer={"world_size": 2})
    assert [row["samples"] for row in case.seen.rows] == [45]
    assert case.trainer.weights == Case(b=9, samples=5).trainer.weights


def test_p28_one_failed_sample_drops_its_group_and_changes_no_other() -> None:
    def broken(prompt: Prompt, sample: int, value: float) -> float:
        return math.nan if (prompt.id, sample) == (1, 2) else value

    sound, short = Case(samples=4), Case(samples=4, generator={"reward": broken})
    of = [
        {call.args[0].rollout.microbatch.index: call.args[0] for call in c.trainer.asked("accumulate")}
        for c in (sound, short)
    ]
    assert short.seen.rows[0]["groups_dropped"] == 1
    assert not any(of[1][1].keep)
    assert all(of[0][k].advantages == of[1][k].advantages for k in (0, 2, 3))
    assert {c.args[2] for c in sound.trainer.asked("accumulate")} == {
        c.args[2] for c in short.trainer.asked("accumulate")
    }
    assert any("prompt 1" in note and "dropped" in note for note in short.seen.notes)


def test_p32_prompts_are_asked_for_once_a_step_in_order_and_never_beyond_the_last() -> None:
    for staleness in (0.0, 0.5):
        asked: list[int] = []

        def prompts(step: int) -> tuple[Prompt, ...]:
            asked.append(step)  # noqa: B023 - a list per staleness
            return simulated_prompts(step, 4)

        Case(steps=5, staleness=staleness, options={"prompts": prompts})
        assert asked == [0, 1, 2, 3, 4]


def test_a_step_in_which_every_group_failed_applies_nothing_and_the_run_goes_on() -> None:
    def broken(prompt: Prompt, sample: int, value: float) -> float:
        return math.nan if prompt.id < 4 else value

    case = Case(steps=2, generator={"reward": broken})
    assert [row["step_applied"] for row in case.seen.rows] == [0, 1]
    assert [row["trained_samples"] for row in case.seen.rows] == [0, 8]


# Order of accumulation


def test_the_trainer_takes_the_smallest_index_that_is_ready() -> None:
    case = Case(b=6, g=1.0, t=1.5, replicas=3)
    assert [s.index for s in case.spans("update")] == [0, 1, 2, 3, 4, 5]
    assert [call.args[3] for call in case.trainer.asked("accumulate")] == [False] * 5 + [True]


def test_ordered_updates_wait_for_their_turn_and_others_do_not() -> None:
    def slow_first(batch: MicroBatch, *_: object) -> float:
        return 4.0 if batch.index == 0 else 1.0

    free, ordered = (Case(t=0.5, replicas=2, g=slow_first, ordered=o) for o in (False, True))
    assert [s.index for s in free.spans("update")] == [1, 2, 3, 0]
    assert [s.index for s in ordered.spans("update")] == [0, 1, 2, 3]
    assert (free.seen.end_s, ordered.seen.end_s) == (pytest.approx(4.5), pytest.approx(6.0))
    assert free.trainer.weights == ordered.trainer.weights


# Failures: P89 and rule R17, R18


@pytest.mark.parametrize("method", ["generate", "score"])
def test_p89_a_call_that_fails_once_is_repeated_and_the_step_is_whole(method: str) -> None:
    case = Case(generator={"faults": [Fault(method, "OSError: flaky", times=1)]})
    assert case.seen.rows[0]["trained_samples"] == 8
    assert case.seen.notes == [f"g0 rank 0 failed in {method}(): OSError: flaky; trying again (1)"]
    assert case.trainer.weights == Case().trainer.weights


def test_p89_a_call_that_always_fails_ends_the_run_with_its_first_cause() -> None:
    faults = [Fault("generate", f"RuntimeError: cause {k}", times=1) for k in range(9)]
    with pytest.raises(WorkerError) as caught:
        Case(generator={"faults": faults}, retries=2)
    assert caught.value.cause == "RuntimeError: cause 0"
    assert [fault.times for fault in faults[:4]] == [0, 0, 0, 1]


def test_a_dead_worker_is_not_called_again() -> None:
    fault = Fault("generate", "exit code 9", times=1, kind=WorkerDied)
    with pytest.raises(WorkerDied):
        Case(generator={"faults": [fault]})


@pytest.mark.parametrize("method", ["accumulate", "optimizer_step", "push"])
def test_an_update_that_fails_is_never_repeated(method: str) -> None:
    fault = Fault(method, times=5)
    with pytest.raises(WorkerError, match=rf"trainer rank 0 failed in {method}\(\)"):
        Case(steps=2, trainer={"faults": [fault]})
    assert fault.times == 4


def test_a_reward_that_fails_once_is_asked_for_again_and_nothing_is_dropped() -> None:
    failures = iter([math.nan, math.inf])

    def flaky(prompt: Prompt, sample: int, value: float) -> float:
        return next(failures, value)

    case = Case(generator={"reward": flaky})
    assert case.seen.rows[0]["groups_dropped"] == 0
    assert case.trainer.weights == Case().trainer.weights
    assert len(case.seen.notes) == 1


def test_what_was_scored_well_is_kept_when_another_attempt_fails_elsewhere() -> None:
    attempts = Counter[int]()

    def moving(prompt: Prompt, sample: int, value: float) -> float:
        attempts[sample] += 1
        return math.nan if attempts[sample] == 1 + sample else value  # sample 0 fails first, sample 1 the second time

    case = Case(b=1, generator={"reward": moving}, retries=1)
    assert case.seen.rows[0]["groups_dropped"] == 0


def test_a_reward_that_keeps_failing_stops_the_run_if_set_naming_prompt_and_reward() -> None:
    with pytest.raises(RewardError, match=r"reward 'value' failed for sample 0 of prompt 0 .*scoring\.on_failure=stop"):
        Case(generator={"reward": lambda *_: math.nan}, sections={"scoring": {"on_failure": "stop"}})


def test_gradients_that_stay_non_finite_stop_the_run_and_single_ones_do_not() -> None:
    reports = iter([False, True, False, False, False])

    def spoil(report: StepReport) -> StepReport:
        return StepReport(math.nan, report.learning_rate, 0.0, applied=False, finite=next(reports))

    with pytest.raises(DivergedError, match="3 steps in a row"):
        Case(steps=9, trainer={"alter": {"optimizer_step": spoil}}, sections={"trainer": {"max_bad_steps": 3}})


def gap_stats(_: dict[str, Stat]) -> dict[str, Stat]:
    return {"log_prob_gap": Stat(0.2, 1, 0.2, 0.2), "log_prob_gap/step4": Stat(0.2, 1, 0.2, 0.2)}


def test_a_log_prob_gap_is_noted_once_a_step() -> None:
    case = Case(steps=2, trainer={"alter": {"accumulate": gap_stats}})
    assert ["most at step4" in note for note in case.seen.notes] == [True, True]
    assert case.seen.rows[0]["log_prob_gap/max"] == 0.2


def test_a_log_prob_gap_stops_the_run_if_set() -> None:
    with pytest.raises(DivergedError, match="most at step4"):
        Case(trainer={"alter": {"accumulate": gap_stats}}, sections={"trainer": {"on_log_prob_gap": "stop"}})


def test_an_error_of_the_loop_itself_leaves_as_it_is() -> None:
    class FullError(Exception):
        pass

    def prompts(step: int) -> tuple[Prompt, ...]:
        if step == 1:
            raise FullError
        return simulated_prompts(step, 4)

    with pytest.raises(FullError):
        Case(steps=2, options={"prompts": prompts})


@pytest.mark.parametrize(("mode", "num"), [("colocated", 1), ("naive", 0), ("pipelined", 0)])
def test_a_mode_that_does_not_fit_the_groups_is_refused(mode: str, num: int) -> None:
    generators = [SimulatedGroup(f"g{k}") for k in range(num)]
    with pytest.raises(ConfigError, match=rf"schedule\.mode={mode}: got {num} generators"):
        simulated_driver(simulated_config(schedule={"mode": mode}), generators, SimulatedGroup("trainer"), Recorder())


# Files


def test_checkpoints_are_saved_every_so_many_steps_and_always_at_the_end(tmp_path: Path) -> None:
    case = Case(steps=5, sections={"checkpoint": {"every": 2}}, options={"run_dir": tmp_path}, trainer={"save": 0.5})
    names = [call.args[0].relative_to(tmp_path).as_posix() for call in case.trainer.asked("save")]
    assert names == ["checkpoints/step_000002", "checkpoints/step_000004", "checkpoints/step_000005"]
    assert [s.version for s in case.spans("save")] == [2, 4, 5]
    only_last = Case(steps=2, options={"run_dir": tmp_path})
    assert [s.version for s in only_last.spans("save")] == [2]


def test_the_first_micro_batch_of_every_so_many_steps_is_drawn_by_who_scored_it(tmp_path: Path) -> None:
    case = Case(steps=5, sections={"observe": {"grid_every": 2}}, options={"run_dir": tmp_path})
    drawn = [(call.args[0].microbatch.step, call.args[0].microbatch.index) for call in case.generators[0].asked("draw")]
    assert drawn == [(0, 0), (2, 0), (4, 0)]
    assert case.generators[0].asked("draw")[0].args[2].parent == tmp_path / "samples"


def test_a_grid_that_cannot_be_drawn_costs_a_note_and_not_the_run(tmp_path: Path) -> None:
    case = Case(generator={"faults": [Fault("draw", "OSError: disk full")]}, options={"run_dir": tmp_path})
    assert case.seen.notes == ["step 0: no sample grid: g0 rank 0 failed in draw(): OSError: disk full"]


# Rows


def test_busy_shares_are_of_the_step_s_own_time() -> None:
    case = Case(steps=2, staleness=0.5)
    assert [row["busy/g0"] for row in case.seen.rows] == pytest.approx([1.0, 3.4 / 4.0])  # at 4.0 a stale one starts
    assert [row["busy/trainer"] for row in case.seen.rows] == pytest.approx([2.4 / 4.6, 2.4 / 4.0])


# What the driver itself costs


def test_both_event_loops_train_the_same() -> None:
    weights = set()
    for backend in ("asyncio", "trio"):
        trainer = SimulatedGroup("trainer", update=0.001)
        generators = [SimulatedGroup(f"g{k}", generate=0.002) for k in range(2)]
        config = simulated_config(steps=3, schedule={"tag": "static(1)"})
        anyio.run(simulated_driver(config, generators, trainer, Recorder()).run, backend=backend)
        weights.add(trainer.weights)
    assert len(weights) == 1


class Silent(Recorder):
    """Keeps nothing."""

    def on_span(self, span: Span) -> None:
        pass

    def on_step(self, row: object) -> None:
        pass


def free_run(steps: int, replicas: int, microbatches: int, **schedule: Any) -> float:
    """Processor seconds of a run whose workers take no time, on the real event loop."""
    generators = [SimulatedGroup(f"g{k}", record=False) for k in range(replicas)]
    trainer, config = SimulatedGroup("trainer", record=False), simulated_config(steps=steps, schedule=schedule)
    driver = simulated_driver(config, generators, trainer, Silent(), prompts_per_step=microbatches)
    start = time.process_time()
    anyio.run(driver.run)
    return time.process_time() - start


def test_the_driver_costs_at_most_a_millisecond_a_micro_batch_with_64_replicas() -> None:
    assert any(free_run(3, 64, 128) / (3 * 128) < 1e-3 for _ in range(10))  # what else the machine does is in most


@pytest.mark.slow
def test_memory_stays_flat_over_5000_steps() -> None:
    process = psutil.Process()
    free_run(500, 1, 2, staleness=0.5)
    before = process.memory_info().rss
    free_run(5000, 1, 2, staleness=0.5)
    assert process.memory_info().rss - before < 4 * 2**20


# Work in flight


def work(group: SimulatedGroup, seconds: float, error: Exception | None = None, *, turns: int = 0) -> Work[float]:
    async def do() -> float:
        await anyio.sleep(seconds)
        for _ in range(turns):
            await checkpoint()
        if error:
            raise error
        return seconds

    return Work("generate", group, 0, 0, 0, do, lambda _: None)


def test_what_ends_at_one_instant_is_read_back_together_in_the_order_of_its_start() -> None:
    async def main() -> list[list[str]]:
        groups = [SimulatedGroup(name) for name in ("c", "a", "b")]
        async with InFlight() as flight:
            for group, seconds, turns in zip(groups, (1.0, 2.0, 1.0), (1, 0, 0), strict=True):
                flight.start(work(group, seconds, turns=turns))
            return [[done.work.group.name for done in await flight.finished()] for _ in range(2)]

    for _ in range(10):  # the event loop shuffles
        assert virtual_run(main) == [["c", "b"], ["a"]]


def test_an_error_of_work_cancels_the_rest_and_keeps_its_cause() -> None:
    error = RuntimeError("outer")
    error.__cause__ = ValueError("inner")

    async def main() -> None:
        async with InFlight() as flight:
            flight.start(work(SimulatedGroup("a"), 1.0, error))
            flight.start(work(SimulatedGroup("b"), 1e9))
            while True:
                await flight.finished()

    with pytest.raises(RuntimeError, match="outer") as caught:
        virtual_run(main)
    assert isinstance(caught.value.__cause__, ValueError)


def test_waiting_for_nothing_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        async with InFlight() as flight:
            await flight.finished()

    with pytest.raises(RuntimeError, match="the schedule is stuck"):
        virtual_run(main)


# The simulation itself


def test_a_simulated_sample_depends_on_its_identity_alone() -> None:
    whole = MicroBatch(3, 0, simulated_prompts(0, 4), 2, 7)
    part = MicroBatch(3, 1, simulated_prompts(0, 4)[2:], 2, 7)
    assert [identity_value(whole, row) for row in (4, 5, 6, 7)] == [identity_value(part, row) for row in range(4)]


def test_equal_sums_of_costs_are_one_instant() -> None:
    """0.1 three times and 0.3 once: what ends together on paper is settled together here."""
    case = Case(b=2, g=0.3, t=0.1, replicas=2)
    assert case.timeline("update") == [(0, 0.3, 0.4), (1, 0.4, 0.5)]
