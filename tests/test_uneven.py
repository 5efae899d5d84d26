"""Generators of different speed, in virtual time: work follows speed, a step takes what was predicted, one may go."""

from collections import Counter
from typing import Any

import pytest

from digen.engines.base import WorkerGroup
from digen.errors import WorkerDied
from digen.schedule.share import Pace, finish
from digen.testing import Fault, Recorder, SimulatedGroup, simulated_config, simulated_driver, virtual_run

FAST_S, SLOW_S, UPDATE_S = 1.0, 3.0, 0.1
MICROBATCHES, SAMPLES, STEPS = 24, 8, 4


async def never(group: WorkerGroup) -> None:
    raise WorkerDied(group.name, 0, "__init__", "there is no such node any more")


def trained(
    slow_faults: tuple[Fault, ...] = (), *, alone: bool = False, **schedule: Any
) -> tuple[Recorder, float, list[SimulatedGroup]]:
    """A run of a fast generator and one that is three times slower: what was seen, the weights, the generators."""
    fast = SimulatedGroup("fast", generate=FAST_S, update=UPDATE_S)
    slow = SimulatedGroup("slow", generate=SLOW_S, update=UPDATE_S, faults=slow_faults)
    trainer, seen = SimulatedGroup("trainer", generate=FAST_S, update=UPDATE_S), Recorder()
    engine = {"restarts": 0}
    config = simulated_config(steps=STEPS, samples_per_prompt=SAMPLES, schedule=schedule, engine=engine)
    generators = [fast] if alone else [fast, slow]
    driver = simulated_driver(config, generators, trainer, seen, prompts_per_step=MICROBATCHES, revive=never)
    virtual_run(driver.run)
    return seen, trainer.weights, generators


def predicted_s(*seconds: float) -> float:
    """All samples go to whoever is free first; the last micro-batch is then trained."""
    return finish(MICROBATCHES * SAMPLES, [Pace(0.0, each / SAMPLES) for each in seconds]) + UPDATE_S


@pytest.mark.parametrize("assist", ["none", "generator"])
def test_the_split_of_work_follows_speed_and_a_step_takes_what_was_predicted(assist: str) -> None:
    seen, _, _ = trained(assist=assist)
    rows = Counter[str]()
    for span in seen.spans:
        rows[span.worker] += span.rows if span.kind == "generate" else 0
    assert rows["fast"] / rows["slow"] == pytest.approx(3.0, rel=0.1)
    times = [row["step_time_s"] for row in seen.rows[1:]]
    assert times == pytest.approx([predicted_s(FAST_S, SLOW_S)] * len(times), rel=0.1)


def test_losing_the_slow_one_in_the_middle_of_the_run_only_slows_it() -> None:
    _, whole, _ = trained()
    dying = Fault("generate", "the node is gone", when=lambda microbatch, *_: microbatch.step >= 2, kind=WorkerDied)
    seen, weights, (fast, slow) = trained((dying,))
    assert weights == whole
    assert ["the run goes on without slow" in note for note in seen.notes] == [True]
    assert {call.args[0].step for call in slow.asked("generate")} == {0, 1}
    times = [row["step_time_s"] for row in seen.rows]
    assert times[1] == pytest.approx(predicted_s(FAST_S, SLOW_S), rel=0.1)
    assert times[3] == pytest.approx(predicted_s(FAST_S), rel=0.1)
    assert len(fast.asked("generate")) > MICROBATCHES * 3
