"""Plans for devices that are not alike: generators of different speed, and splits of two kinds of devices."""

import heapq
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from digen import plan as planner
from digen import presets
from digen.cli import app
from digen.errors import ConfigError
from digen.observe.files import JsonlObserver, RunFolder
from digen.plan import Split
from digen.testing import SimulatedGroup, simulate
from digen.workload import placed, read, two_kinds

COSTS = {
    "microbatches": 12,
    "generate": 3.0,
    "assist": 1.0,
    "update": 0.5,
    "measured_on": "4:4",
    "samples": 8,
    "steps": 3,
}
"""The trainer's kind of device is three times as fast."""


def asked_for(microbatches: int, *seconds: float) -> float:
    """When the last is there if each of several generators asks for the next one whenever it has none."""
    free = [(0.0, each) for each in seconds]
    heapq.heapify(free)
    ends = []
    for _ in range(microbatches):
        now, each = heapq.heappop(free)
        ends.append(now + each)
        heapq.heappush(free, (now + each, each))
    return max(ends)


def times(mode: str, **costs: Any) -> dict[tuple[int, int, int], float]:
    sweep = planner.splits(read(None, {**COSTS, **costs}), (4, 4))
    return {(split.generators, split.borrowed, split.trainers): split.step_times_s[mode] for split in sweep}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120", "TERM": "dumb"})


FLAGS = [word for name, value in COSTS.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_the_trainer_has_devices_of_its_own_kind_and_those_that_it_leaves_generate_as_fast_as_it_would() -> None:
    found = times("naive")
    assert list(found) == [(4, 3, 1), (4, 2, 2), (4, 1, 3), (4, 0, 4)]
    for (_, borrowed, trainers), seconds in found.items():
        generators = [3.0] + ([1.0 * 4 / borrowed] if borrowed else [])
        assert seconds == pytest.approx(asked_for(12, *generators) + 12 * 0.5 * 4 / trainers)


def test_devices_that_are_left_make_groups_of_as_many_as_a_generator_has() -> None:
    work = placed(two_kinds(read(None, {**COSTS, "replicas": 2})), 4, 1, borrowed=5)
    assert work.generators == ("generator-0", "generator-1", "borrowed-0", "borrowed-1", "borrowed-2")
    assert [work.seconds(name, "generate", 8) for name in work.generators] == pytest.approx([3.0, 3.0, 2.0, 2.0, 4.0])
    assert work.devices == (9, 1)


def test_what_a_slow_device_takes_for_an_update_is_taken_from_how_fast_it_generates() -> None:
    work = placed(two_kinds(read(None, {**COSTS, "score": 0.3})), 4, 2, borrowed=2)
    assert work.seconds("generator", "help", 8) == pytest.approx(3 * 0.5)
    assert work.seconds("borrowed-0", "help", 8) == pytest.approx(2 * 0.5)
    assert work.seconds("borrowed-0", "score", 8) == pytest.approx(2 * 0.3 / 3)
    assert work.seconds("trainer", "update", 8) == pytest.approx(2 * 0.5)


def test_devices_of_two_kinds_that_are_alike_do_what_their_number_says() -> None:
    """One replica of four and one of two devices, against one of four that is given its own speed."""
    alike = times("shared", assist=3.0)
    for (own, borrowed, trainers), seconds in alike.items():
        device_seconds = 12 * (3.0 + 0.5) * 4
        assert seconds >= device_seconds / (own + borrowed + trainers) * (1 - 1e-9)


def test_the_slower_the_generators_are_the_more_devices_of_the_trainer_generate() -> None:
    found = [times("naive", generate=each) for each in (0.6, 40.0)]
    best = [min(sweep, key=sweep.__getitem__)[1] for sweep in found]
    assert best == [0, 2]


def test_two_kinds_need_to_know_how_fast_the_trainers_kind_generates() -> None:
    with pytest.raises(ConfigError, match=r"^assist: missing; .*; allowed: --assist"):
        times("naive", assist=None)
    with pytest.raises(ConfigError, match=r"--devices: got 0:4; allowed: at least 1:1"):
        planner.splits(read(None, COSTS), (0, 4))


def test_each_generator_may_have_a_speed_of_its_own() -> None:
    costs = {"microbatches": 12, "generate": 1.0, "update": 0.5, "samples": 4}
    work = read(None, {**costs, "slower": "1,3"})
    assert work.generators == ("generator-0", "generator-1")
    naive = planner.predict(work, "naive").step_time_s
    assert naive == pytest.approx(asked_for(12, 1.0, 3.0) + 12 * 0.5)
    sweep = planner.splits(work, 6)
    assert [(split.generators, split.trainers) for split in sweep] == [(2, 4), (3, 3), (4, 2), (5, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"slower": "1,3", "replicas": 3}, r"^slower: got 1,3; allowed: a number > 0 for each of 3 generators"),
        ({"slower": "1,0"}, r"^slower: got 1,0; allowed: a number > 0 for each of 2 generators"),
        ({"slower": "1;3"}, r"^slower: got '1;3'"),
    ],
)
def test_speeds_that_fit_no_generators_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(None, {"microbatches": 2, "generate": 1.0, "update": 0.5, **words})


def test_the_table_and_the_json_name_the_devices_that_generate_beside() -> None:
    shown = call(*FLAGS, "--split", "--devices", "4:4").stdout
    assert "4 + 2" in shown
    document = json.loads(call(*FLAGS, "--split", "--devices", "4:4", "--json").stdout)
    assert [(s["generators"], s["borrowed"], s["trainers"]) for s in document["splits"]] == list(times("naive"))
    result = call(*FLAGS, "--split", "--devices", "4:4:4")
    assert result.exit_code == 2
    assert "--devices: got '4:4:4'; allowed: a whole number, or two of them as in 8:4 (two kinds)" in result.stderr


def test_a_run_on_two_kinds_of_nodes_is_split_as_such(tmp_path: Path) -> None:
    labels = ["engine.name=ray", "generator.node={kind: weak}", "trainer.node={kind: strong}", "generator.replicas=2"]
    small = ["algorithm.samples_per_prompt=4", "data.prompts_per_step=6", "steps=3", "schedule.tag=static(1)"]
    config = presets.resolve("flowgrpo", "glyph", None, [*small, *labels], {})
    generators = [SimulatedGroup(f"generator-{k}", generate=3.0 + 6.0 * k) for k in range(2)]
    recorder = simulate(config, generators, SimulatedGroup("trainer", generate=1.0, update=0.5), prompts_per_step=6)
    folder = RunFolder.create(tmp_path / "run", "flowgrpo", "glyph")
    folder.config.write_text(presets.dump(config))
    observer = JsonlObserver(folder)
    for span in recorder.spans:
        observer.on_span(span)
    for row in recorder.rows:
        observer.on_step(row)
    observer.close()

    work = read(folder.path, {})
    assert [work.seconds(name, "generate", work.num_samples) for name in work.generators] == pytest.approx([3.0, 9.0])
    made = planner.plan(work, split=True)
    assert [(s.generators, s.borrowed, s.trainers) for s in made.splits] == [(2, 0, 1)]
    assert made.check is not None
    assert made.check.error == pytest.approx(0.0, abs=0.1)
    with pytest.raises(ConfigError, match=r"--devices: got 4, but this run has two kinds; allowed: G:T"):
        planner.plan(work, split=True, devices=4)
    more: tuple[Split, ...] = planner.plan(work, split=True, devices=(4, 2)).splits
    assert [(s.generators, s.borrowed, s.trainers) for s in more] == [(4, 1, 1), (4, 0, 2)]
