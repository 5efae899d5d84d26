"""Generators that come and go (`generator.min_replicas`): the run goes on with those there are, and learns the same."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import ConfigError, WorkerDied
from digen.presets import resolve
from digen.run import run, specs
from digen.supervision import LONGEST_BACK_OFF_S
from digen.testing import Recorder, simulated_config, simulated_driver, virtual_run
from digen.testing.faults import END_OF_TIME_S, Books

Make = Callable[..., RunConfig[Any]]
Absences = Sequence[tuple[float, float]]
"""From when until when, in seconds of the run."""

SEEDS = 120
PROMPTS = 6
LOOK_S, LOAD_S = 1.0, 2.0
"""How long it takes to see that there is no room, and to load where there is."""
NEVER = ((0.0, END_OF_TIME_S),)


class Passing(Books):
    """A simulated generator that is lost whenever one of its absences begins, and cannot be started during one."""

    def __init__(self, name: str, absences: Absences = (), **seconds: float) -> None:
        super().__init__(name, 2 * PROMPTS, **seconds)
        self.absences, self.tries = absences, list[float]()
        if self.absent():
            self._lost = self.no_room()

    def absent(self, now: float = 0.0) -> bool:
        return any(start <= now < end for start, end in self.absences)

    def no_room(self) -> WorkerDied:
        return WorkerDied(self.name, 0, "__init__", "no node has room")

    async def call(self, method: str, /, *args: Any) -> tuple[Any, ...]:
        if self.lost:
            raise self.lost
        values = await super().call(method, *args)
        if self.lost:
            raise self.lost
        return values

    async def pass_by(self) -> None:
        for start, _ in self.absences:
            if start > 0:
                await anyio.sleep_until(start)
                self.die()

    async def begin_again(self) -> None:
        self.tries.append(anyio.current_time())
        for seconds in (LOOK_S, LOAD_S):
            await anyio.sleep(seconds)
            if self.absent(anyio.current_time()):
                raise self.no_room()
        self.renew()


async def revive(group: WorkerGroup) -> None:
    await cast("Passing", group).begin_again()


@dataclass
class Case:
    """A run and who is absent when."""

    absences: Sequence[Absences]
    least: int | None = 1
    restarts: int = 1
    steps: int = 4
    schedule: dict[str, Any] = field(default_factory=lambda: {"mode": "pipelined"})
    seconds: Callable[[int], dict[str, float]] = lambda _: {"generate": 1.0, "score": 0.1, "pull": 0.1}

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        rng = random.Random(f"elastic/{seed}")
        replicas = rng.randint(2, 4)
        least = rng.randint(1, replicas - 1)
        absences = [() if k < least and rng.random() < 0.8 else drawn_absences(rng) for k in range(replicas)]
        schedule: dict[str, Any] = {"mode": rng.choice(["pipelined"] * 3 + ["naive"])}
        if schedule["mode"] == "pipelined":
            schedule["assist"] = rng.choice(["none", "trainer", "generator", "both"])
        if schedule.get("assist", "none") == "none":
            schedule["tag"] = rng.choice(["none", "static(1)", "bts"])
        costs = [{kind: rng.uniform(0.0, 3.0) for kind in ("generate", "score", "pull", "update")} for _ in absences]
        return cls(absences, least, rng.randint(0, 2), schedule=schedule, seconds=costs.__getitem__)

    def run(self) -> tuple[float, Recorder, list[Passing]]:
        """The weights at the end, what was seen, and the generators."""
        config = simulated_config(
            steps=self.steps,
            schedule=self.schedule,
            engine={"restarts": self.restarts},
            generator={"replicas": len(self.absences), "min_replicas": self.least},
        )
        generators = [Passing(f"generator-{k}", gone, **self.seconds(k)) for k, gone in enumerate(self.absences)]
        trainer, recorder = Books("trainer", 2 * PROMPTS, generate=1.5, update=0.5, sync=0.1), Recorder()

        async def main() -> None:
            options: dict[str, Any] = {"prompts_per_step": PROMPTS, "revive": revive}
            with anyio.fail_after(END_OF_TIME_S):
                async with anyio.create_task_group() as tasks:
                    for generator in generators:
                        tasks.start_soon(generator.pass_by)
                    try:
                        await simulated_driver(config, generators, trainer, recorder, **options).run()
                    except WorkerDied as died:
                        recorder.on_note(f"ended: {died}")
                    tasks.cancel_scope.cancel()

        virtual_run(main)
        return trainer.weights, recorder, generators


def drawn_absences(rng: random.Random) -> Absences:
    """Up to three, the first of which may be from the beginning."""
    found, now = list[tuple[float, float]](), rng.choice([0.0, rng.uniform(0.1, 20.0)])
    for _ in range(rng.randint(1, 3)):
        end = now + rng.choice([0.5, 10.0, rng.uniform(0.0, 60.0)])
        found.append((now, end))
        now = end + rng.uniform(1.0, 20.0)
    return found


def test_whoever_comes_and_goes_each_sample_is_trained_once_and_the_weights_are_those_of_all_being_there() -> None:
    """That each sample of each step is trained exactly once is asserted by the trainer's books."""
    undisturbed = Case([(), ()]).run()[0]  # of any schedule: without staleness they are all the same
    found = Counter[str]()
    for seed in range(SEEDS):
        case = Case.drawn(seed)
        weights, seen, _ = case.run()
        notes = "\n".join(seen.notes)
        found.update(word for word in ("is away", "is there") if word in notes)
        if "ended: " in notes:
            assert f"generator.min_replicas={case.least}" in seen.notes[-1], seed
            found["too few"] += 1
            continue
        assert weights == undisturbed, seed
        found["equal"] += 1
    assert found["equal"] > 0.7 * SEEDS
    assert min(found["too few"], found["is there"]) > 0.05 * SEEDS
    assert found["is away"] > 0.3 * SEEDS


def test_a_run_begins_with_those_that_are_there_and_one_that_comes_later_pulls_and_takes_work() -> None:
    weights, seen, (_, late) = Case([(), [(0.0, 9.0)]], least=1).run()
    assert weights == Case([(), ()]).run()[0]
    assert late.tries[0] == 0.0
    away, there = seen.notes
    assert "generator-1 is away: the run goes on with 1 of 2 generators" in away
    assert there == "generator-1 is there: the run has 2 of 2 generators"
    kinds = [span.kind for span in seen.spans if span.worker == "generator-1"]
    assert kinds[:3] == ["load", "pull", "generate"]
    assert seen.rows[0]["busy/generator-1"] == 0.0


def test_one_that_never_comes_costs_the_others_nothing() -> None:
    alone, together = Case([()]), Case([(), NEVER])
    assert [row["time_s"] for row in together.run()[1].rows] == [row["time_s"] for row in alone.run()[1].rows]


def test_it_is_looked_for_as_long_as_the_run_lasts_ever_more_rarely_and_said_once() -> None:
    _, seen, (_, missing) = Case([(), NEVER], steps=60).run()
    gaps = [later - earlier for earlier, later in pairwise(missing.tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(LONGEST_BACK_OFF_S + LOOK_S)
    assert missing.tries[-1] > seen.end_s - 2 * LONGEST_BACK_OFF_S
    assert len(seen.notes) == 1


def test_one_that_is_lost_again_and_again_is_away_when_its_restarts_are_used_up() -> None:
    _, seen, _ = Case([(), [(0.5, 20.0)]], restarts=2, steps=8).run()
    assert [note.rpartition("; ")[2] for note in seen.notes] == [
        "generator-1 is started again",
        "generator-1 is started again",
        "generator-1 is away: the run goes on with 1 of 2 generators",
        "generator-1 is there: the run has 2 of 2 generators",
    ]


def test_with_fewer_than_are_needed_the_run_ends_and_says_so() -> None:
    _, seen, _ = Case([[(5.0, 90.0)], (), NEVER], least=2, restarts=0).run()
    said = "ended: generator-0 rank 0 failed in wait(): generators left: 1, generator.min_replicas=2: killed"
    assert seen.notes[-1] == said


def test_without_the_setting_a_generator_that_is_given_up_stays_away() -> None:
    weights, seen, _ = Case([(), [(3.0, 9.0)]], least=None, restarts=1, steps=8).run()
    assert "the run goes on without generator-1, which was started again 1 times" in seen.notes[-1]
    assert weights == Case([(), ()], steps=8).run()[0]


def test_replicas_beyond_the_least_number_are_optional_for_the_engine(make_config: Make, tmp_path: Path) -> None:
    for overrides, optional in (
        (["generator.replicas=3", "generator.min_replicas=1"], [False, True, True, False]),
        (["generator.replicas=2"], [False, False, False]),
    ):
        assert [spec.optional for spec in specs(make_config(*overrides), tmp_path)] == optional


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["generator.replicas=2", "generator.min_replicas=3"], r"min_replicas=3 is more .*: generator\.replicas=2"),
        (["schedule.mode=colocated"], r"min_replicas=1 needs generators, got schedule\.mode=colocated"),
        (["weights.transport=collective"], r"min_replicas=1: who comes late cannot join weights\.transport=collective"),
    ],
)
def test_settings_that_have_nobody_who_can_come_and_go_are_refused(
    overrides: list[str], said: str, make_config: Make
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config("generator.min_replicas=1", *overrides)


# Processes -----------------------------------------------------------------------------------------------------------

SMALL = (
    "engine.name=process", "engine.restarts=0", "steps=3", "data.prompts_per_step=4", "algorithm.samples_per_prompt=2",
    "sampling.num_steps=4", "schedule.assist=none", "schedule.ordered=true", "generator.threads=1", "trainer.threads=1",
    "generator.replicas=2", "generator.min_replicas=1", "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false", "observe.grid_every=0",
)  # fmt: skip


def train(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    config = resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True))
    return load_file(folder / "checkpoints" / "step_000003" / "weights.safetensors")


@pytest.mark.slow
def test_a_killed_replica_of_processes_comes_back_and_what_is_learned_is_the_same(tmp_path: Path) -> None:
    """In its first call; the other one waits for it in the second step."""
    whole, folder = train(tmp_path / "whole", "engine.name=inline"), tmp_path / "run"
    backend = f"generator.backend={Path(__file__).parent}/passing_generators.py:Passing"
    found = train(folder, backend, f"generator.env={{HOLD_IN: {tmp_path}, DIES: once}}")
    assert max(float((found[name] - whole[name]).abs().max()) for name in whole) <= 1e-6
    notes = (folder / "logs" / "driver.log").read_text()
    assert "was killed by SIGKILL" in notes
    assert "generator-1 is away: the run goes on with 1 of 2 generators" in notes
    assert "generator-1 is there: the run has 2 of 2 generators" in notes
