"""The planner: its predictions against formulas, hand-drawn schedules and runs of the driver; its command."""

import io
import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from digen import plan as planner
from digen import presets
from digen.bound import lower_bound
from digen.cli import app
from digen.errors import ConfigError, DataError
from digen.observe.files import JsonlObserver, RunFolder, read_decisions
from digen.observe.gantt import LOOKS, gantt
from digen.observe.planned import show_plan
from digen.plan import MODES, Plan, plan
from digen.run import known_costs, run
from digen.testing import SimulatedGroup, simulate
from digen.types import ScoredRollout, SpanKind
from digen.workload import generator_names, read

SYNCHRONOUS = tuple(mode for mode in MODES if mode != "tcss")


def planned(**flags: Any) -> Plan:
    return plan(read(None, {"samples": 4, **flags}))


def step_time(mode: str, **flags: Any) -> float:
    return planner.predict(read(None, {"samples": 4, **flags}), mode).step_time_s


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120", "TERM": "dumb"})


# Modes against what can be known without the driver


@pytest.mark.parametrize(
    ("count", "generate", "update"), [(4, 1.0, 0.6), (1, 2.0, 3.0), (7, 0.5, 2.0), (16, 1.0, 0.25)]
)
def test_naive_and_gap_take_what_the_formulas_say(count: int, generate: float, update: float) -> None:
    costs = {"microbatches": count, "generate": generate, "update": update}
    assert step_time("colocated", **costs) == pytest.approx(count * (generate + update))
    assert step_time("naive", **costs) == pytest.approx(count * (generate + update))
    gap = max(count * generate + update, generate + count * update)
    assert step_time("gap", **costs) == pytest.approx(gap)


def test_a_hand_drawn_step_of_four_micro_batches() -> None:
    """Generate 1 s, update 0.6 s: docs/design/driver.md."""
    found = planned(microbatches=4, generate=1, update=0.6)
    times = {mode.mode: mode.step_time_s for mode in found.modes}
    assert [times[m] for m in ("naive", "gap", "tag-static", "bts")] == pytest.approx([6.4, 4.6, 3.6, 3.6])
    assert 3.2 <= times["tcss"] <= 3.4
    assert found.mode("bts").assists == (1,) * 8
    assert found.mode("naive").busy_share == pytest.approx(0.5)
    assert found.mode("gap").busy_share == pytest.approx((4 + 2.4) / (2 * 4.6))
    assert found.mode("gap").total_s == pytest.approx(8 * 4.6)


def test_every_cost_has_its_place_in_the_step() -> None:
    """One micro-batch: the generator pulls, generates and scores, then the trainer updates and syncs."""
    costs = {"microbatches": 1, "generate": 1.0, "score": 0.1, "update": 0.3, "sync": 0.05, "pull": 0.02}
    assert step_time("tsp", **costs, steps=5) == pytest.approx(1.0 + 0.1 + 0.3 + 0.05 + 0.02)
    assert step_time("colocated", **costs, assist=4.0) == pytest.approx(4.0 + 0.1 + 0.3 + 0.05)


def test_two_replicas_generate_in_half_the_time_and_a_limit_in_flight_takes_that_away() -> None:
    costs = {"microbatches": 4, "generate": 1.0, "update": 0.5, "replicas": 2}
    assert step_time("naive", **costs) == pytest.approx(2.0 + 2.0)
    assert step_time("naive", **costs, max_in_flight=1) == pytest.approx(4.0 + 2.0)


def test_updates_without_tsp_count_in_the_modes_before_it_and_in_no_other() -> None:
    costs = {"microbatches": 6, "generate": 1.0, "update": 0.5}
    slow = planned(**costs, update_unstacked=1.5)
    fast, slower = planned(**costs), planned(**{**costs, "update": 1.5})
    for mode in MODES:
        expected = slower if mode in ("colocated", "naive", "gap") else fast
        assert slow.mode(mode).step_time_s == pytest.approx(expected.mode(mode).step_time_s), mode
    assert any("--update-unstacked" in note for note in fast.notes)
    assert not any("--update-unstacked" in note for note in slow.notes)


@pytest.mark.parametrize("seed", range(12))
def test_the_static_number_of_assists_is_the_best_there_is(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([2, 3, 5, 8])
    work = read(
        None,
        {
            "microbatches": count, "generate": draw.uniform(0.5, 1.5), "assist": draw.uniform(0.5, 2.0),
            "update": draw.uniform(0.1, 1.5), "score": draw.choice([0.0, 0.3]), "replicas": draw.choice([1, 2, 3]),
            "samples": 2,
        },
    )  # fmt: skip
    gap = planner.schedule_of(work, "gap")
    times = [
        planner.simulated(work, gap.model_copy(update={"tag": f"static({n})"}), 2).rows[-1]["step_time_s"]
        for n in range(count + 1)
    ]
    assert times[planner.best_static(work)] == pytest.approx(min(times), abs=1e-9)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.integers(1, 8),
    st.floats(0.1, 2.0),
    st.floats(0.5, 2.0),
    st.sampled_from([0.0, 0.2]),
    st.integers(1, 3),
)
def test_no_idea_makes_a_step_longer_and_nothing_goes_under_the_lower_bound(
    count: int, update: float, assist: float, score: float, replicas: int
) -> None:
    found = planned(
        microbatches=count, generate=1.0, update=update, assist=assist, score=score, sync=0.05, pull=0.02,
        replicas=replicas, update_unstacked=1.2 * update, steps=6, samples=2,
    )  # fmt: skip
    chain = [found.mode(mode).step_time_s for mode in ("naive", "gap", "tsp", "tag-static", "bts")]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(chain))
    for mode in found.modes:
        slack = 1e-9 if mode.mode in SYNCHRONOUS else 0.02  # under TCSS steps of the window may have taken work ahead
        assert mode.step_time_s >= found.lower_bound_s * (1 - slack), mode.mode
        assert 0 < mode.busy_share <= 1 + 1e-9


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"microbatches": 12, "generate": 1, "update": 0.5}, 9.0),  # (12 + 6) / 2
        ({"microbatches": 8, "generate": 1, "update": 2}, 12.0),  # (8 + 16) / 2: generators help
        ({"microbatches": 6, "generate": 1, "update": 1, "score": 0.5, "sync": 1}, 8.0),  # 6 + 1 against 9
        ({"microbatches": 8, "generate": 1, "update": 0.5, "assist": 2}, 6.666667),  # 4 + 16 x = 8 - 8 x
        ({"microbatches": 8, "generate": 1, "update": 1, "replicas": 3}, 4.0),  # four workers, all as fast: 16 / 4
        (
            {"microbatches": 2, "generate": 1, "update": 1, "assist": 0.5},
            1.5,
        ),  # the trainer generates better
        (
            {"microbatches": 1, "generate": 4, "update": 1, "assist": 3},
            15 / 7,
        ),  # 3 x = 4 - 4 x + 1: all updates are helps
    ],
)
def test_the_lower_bound_is_all_work_over_all_devices(costs: dict[str, float], expected: float) -> None:
    assert lower_bound(read(None, costs)) == pytest.approx(expected, abs=1e-6)


def test_steps_beyond_the_simulated_ones_go_on_as_they_did() -> None:
    long = planned(microbatches=3, generate=1, update=0.5, steps=1000)
    assert long.mode("naive").total_s == pytest.approx(1000 * 4.5)
    assert len(long.mode("naive").assists) == planner.MOST_STEPS
    assert any("1000 steps" in note for note in long.notes)


def test_a_stale_share_below_one_micro_batch_is_said_and_changes_nothing() -> None:
    found = planned(microbatches=3, generate=1, update=0.5, staleness=0.3)
    assert any("less than one micro-batch" in note for note in found.notes)
    assert found.mode("tcss").step_time_s == pytest.approx(found.mode("bts").step_time_s)


def test_a_plan_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_run(tmp_path / "run", "checkpoint.every=1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plan(read(made, {}))
    assert list(Path().iterdir()) == []


# Plans of finished runs


def write_run(folder: Path, *overrides: str, noise: float = 0.0, assist: float = 1.2) -> Path:
    """A run of the driver on simulated groups, with the files of a real one."""
    small = ("algorithm.samples_per_prompt=4", "data.prompts_per_step=6", "steps=8", f"run_dir={folder}")
    config = presets.resolve("flowgrpo", "glyph", None, [*small, *overrides], {})
    draws = iter(range(100))

    def seconds(usual: float) -> Any:
        draw = random.Random(next(draws))

        def taken(work: Any, *_: Any) -> float:
            whole = work.rollout.microbatch if isinstance(work, ScoredRollout) else getattr(work, "microbatch", work)
            part = whole.num_samples / (4 * config.schedule.prompts_per_microbatch) if whole else 1.0
            return usual * part * draw.uniform(1 - noise, 1 + noise)

        return taken

    names = () if config.schedule.mode == "colocated" else generator_names(config.generator.replicas)
    generators = [
        SimulatedGroup(name, generate=seconds(1.0 + 0.2 * k), score=seconds(0.15), update=seconds(0.5), pull=0.03)
        for k, name in enumerate(names)
    ]
    trainer = SimulatedGroup(
        "trainer", generate=seconds(assist), score=seconds(0.15), update=seconds(0.4), sync=0.06, save=0.1
    )
    recorder = simulate(config, generators, trainer, prompts_per_step=config.data.prompts_per_step, run_dir=folder)
    files = RunFolder.create(folder, "flowgrpo", "glyph")
    files.config.write_text(presets.dump(config))
    observer = JsonlObserver(files)
    for span in recorder.spans:
        observer.on_span(span)
    for row in recorder.rows:
        observer.on_step(row)
    observer.close()
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.mode=naive", "schedule.tag=none"],
        ["schedule.tag=none"],
        ["schedule.tag=static(2)"],
        ["schedule.tag=bts"],
        ["schedule.tag=bts", "schedule.staleness=0.5"],
        ["schedule.assist=both", "schedule.tag=none"],
        ["schedule.tag=bts", "schedule.ordered=true", "generator.replicas=2"],
        ["schedule.tag=bts", "generator.replicas=3", "schedule.max_in_flight=2"],
        ["schedule.tag=bts", "schedule.prompts_per_microbatch=4"],
        ["schedule.tag=none", "checkpoint.every=1"],
        ["schedule.mode=colocated", "schedule.tag=none"],
        ["schedule.tag=bts", "trainer.updates_per_rollout=2"],
    ],
)
def test_a_finished_run_is_predicted_as_it_was(overrides: list[str], tmp_path: Path) -> None:
    check = planner.check(read(write_run(tmp_path / "run", *overrides), {}))
    assert check is not None
    assert abs(check.error) < 0.005


def test_every_mode_is_planned_whatever_the_run_was(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", "schedule.ordered=true", "schedule.tag=bts", "schedule.staleness=0.7",
        "trainer.updates_per_rollout=2", "generator.replicas=2", "schedule.prompts_per_microbatch=4", "steps=4",
    )  # fmt: skip
    found = plan(read(folder, {}))
    assert [mode.mode for mode in found.modes] == list(MODES)
    assert all(mode.step_time_s > 0 for mode in found.modes)


@pytest.mark.parametrize("tag", ["none", "static(2)", "bts"])
def test_a_run_whose_costs_vary_by_a_fifth_is_predicted_within_five_percent(tag: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", f"schedule.tag={tag}", "steps=20", noise=0.2)
    check = planner.check(read(folder, {}))
    assert check is not None
    assert abs(check.error) < 0.05


def test_best_of_n_updates_on_fewer_samples_than_were_generated(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "algorithm.best_of_n={best: 1, worst: 1}", "schedule.tag=none")
    work = read(folder, {})
    assert work.seconds("trainer", "update", work.num_samples) == pytest.approx(0.2)
    found = planner.check(work)
    assert found is not None
    assert abs(found.error) < 0.005


def test_flags_replace_what_a_run_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "schedule.tag=static(1)", "schedule.prompts_per_microbatch=2")
    halves = planner.predict(read(folder, {"samples": 4}), "naive")
    assert halves.step_time_s == pytest.approx(3 * (0.5 + 0.075) + 3 * 0.2 + 0.06 + 0.03)
    assert [span.rows for span in halves.spans if span.kind == "generate" and span.step == 0] == [4, 4, 4]
    work = read(folder, {"microbatches": 9, "update": 0.7, "replicas": 2, "steps": 3, "samples": 16})
    assert (len(work.sizes), work.num_samples, work.steps) == (9, 16, 3)
    assert work.generators == ("generator-0", "generator-1")
    assert work.seconds("trainer", "update", 16) == pytest.approx(0.7)
    assert work.seconds("generator-1", "generate", 16) == pytest.approx(2 * 1.0)
    assert work.seconds("trainer", "assist", 16) == pytest.approx(2 * 1.2)


def test_what_a_run_never_did_is_assumed_and_said(tmp_path: Path) -> None:
    work = read(write_run(tmp_path / "run", "schedule.tag=none", "steps=1"), {})
    assert work.seconds("trainer", "assist", 4) == pytest.approx(1.0)
    assert any("an assist is taken" in note for note in work.notes)
    assert plan(work).mode("tsp").step_time_s > 6


def test_a_damaged_event_log_is_named_with_its_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "schedule.tag=none")
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join([*lines[:4], "{not json\n"]))
    with pytest.raises(DataError, match=r"events\.jsonl:5: not JSON"):
        read(folder, {})


# A run that starts with the costs of another


def test_a_real_run_with_costs_decides_its_first_bubble_by_search(tmp_path: Path) -> None:
    small = ("engine.name=inline", "steps=1", "data.prompts_per_step=3", "algorithm.samples_per_prompt=2")
    small += ("sampling.num_steps=2", "algorithm.steps={high: 1, size: 1}", "reward={jpeg-incompressibility: {}}")
    config = presets.resolve(
        "flowgrpo",
        "glyph",
        None,
        [*small, "schedule.tag=bts", "observe.tensorboard=false", f"run_dir={tmp_path}/b"],
        {},
    )
    folder = write_run(tmp_path / "a", "schedule.tag=bts")
    run(config, console=Console(quiet=True), costs=known_costs(config, folder))
    first = read_decisions(tmp_path / "b" / "decisions.jsonl")[0]
    assert first.predicted_end is not None


@pytest.mark.parametrize(("other", "sentence"), [("gone", "is not a run folder"), ("empty", "no finished update")])
def test_a_run_refuses_costs_of_no_run_before_anything_starts(other: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("steps: 1\n")
    arguments = ["run", "flowgrpo", "--costs", str(tmp_path / other), "--run-dir", str(tmp_path / "new")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert not (tmp_path / "new").exists()


# Splits


def test_the_best_split_gives_more_devices_to_the_side_with_more_work() -> None:
    """Generation is three times the work of updates: of eight devices it gets six."""
    work = read(None, {"microbatches": 12, "generate": 1.5, "update": 0.5, "measured_on": "4:4", "samples": 2})
    sweep = planner.splits(work, 8)
    assert [(split.generators, split.trainers) for split in sweep] == [(k, 8 - k) for k in range(1, 8)]
    naive = min(sweep, key=lambda split: split.step_times_s["bts"])
    assert naive.generators in (4, 5, 6)
    given = sweep[3].step_times_s
    assert given["naive"] == pytest.approx(12 * (1.5 + 0.5)), "the split that the costs are for"
    assert sweep[5].step_times_s["naive"] == pytest.approx(12 * (1.5 * 4 / 6 + 0.5 * 4 / 2))


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_split_does_more_work_than_its_devices_can(replicas: int) -> None:
    costs = {"microbatches": 8, "generate": 3, "update": 1, "measured_on": "4:4", "samples": 8, "steps": 3}
    work = read(None, {**costs, "replicas": replicas})
    device_seconds = 8 * 3 * 4 / replicas + 8 * 1 * 4
    for split in planner.splits(work, 8):
        assert split.best_s >= device_seconds / 8 * (1 - 1e-9), split
    assert lower_bound(work) == pytest.approx(device_seconds / 8)


def test_a_split_needs_a_device_for_each_group() -> None:
    work = read(None, {"microbatches": 2, "generate": 1, "update": 1, "replicas": 3})
    with pytest.raises(ConfigError, match=r"--devices: got 3; allowed: a whole number >= 4"):
        plan(work, split=True, devices=3)
    with pytest.raises(ConfigError, match=r"--devices: got 8 without --split"):
        plan(work, devices=8)


# What is printed

FLAGS = ("--microbatches", 4, "--generate", 1, "--assist", 1, "--update", 0.6)


def test_json_is_one_object_with_the_documented_keys() -> None:
    document = json.loads(call(*FLAGS, "--json").stdout)
    assert [mode["mode"] for mode in document["modes"]] == list(MODES)
    bts = document["modes"][5]
    assert bts["step_time_s"] == pytest.approx(3.6)
    assert bts["busy_share"] + bts["bubble_share"] == pytest.approx(1.0)
    assert bts["total_s"] == pytest.approx(8 * 3.6)
    assert bts["speedup"] == pytest.approx(6.4 / 3.6)
    assert bts["assists"] == [1] * 8
    assert document["lower_bound_s"] == pytest.approx(3.2)
    assert "run" not in document
    assert "splits" not in document


def test_a_finished_run_and_splits_are_in_the_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "schedule.tag=none", "data.prompts_per_step=2")
    document = json.loads(call("--costs", folder, "--split", "--devices", 3, "--json").stdout)
    assert document["run"]["predicted_s"] == pytest.approx(document["run"]["measured_s"], rel=0.005)
    assert [split["generators"] for split in document["splits"]] == [1, 2]


def test_the_table_names_every_mode_the_bound_and_what_was_assumed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "schedule.tag=none", "data.prompts_per_step=2")
    text = call("--costs", folder, "--gantt", "gap", "--split").stdout
    for words in (
        *MODES,
        "lower bound",
        "this run: predicted",
        "of gap",
        "best: 1 + 1 devices",
        "- an assist is",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_plan_fits_the_terminal(width: int) -> None:
    found = planned(microbatches=12, generate=1, update=0.5, score=0.05, sync=0.05, replicas=2)
    console = Console(width=width, record=True, file=io.StringIO())
    show_plan(found, console, found.mode("tcss"))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("generator-1") for line in lines)


def test_a_step_is_drawn_to_scale_and_neighbours_are_told_apart() -> None:
    found = planned(microbatches=2, generate=1, update=1, steps=1)
    naive = found.mode("naive")
    lines = [line.plain for line in gantt(naive.spans, naive.window, naive.typical, width=37)]
    assert lines == [
        "           0            4.000 s",
        "generator  gggggGGGGG··········   50%",
        "trainer    ··········uuuuuUUUUU   50%",
        "           g generate, u update, ·",
        "           idle",
    ]


def test_what_is_generated_ahead_is_drawn_as_such_and_every_kind_has_a_letter_of_its_own() -> None:
    tcss = planned(microbatches=4, generate=1, update=0.6).mode("tcss")
    assert "n" in gantt(tcss.spans, tcss.window, tcss.typical)[1].plain.lower().removeprefix("generator")
    assert set(LOOKS) == set(get_args(SpanKind))
    assert len({look.letter for look in LOOKS.values()}) == len(LOOKS)


def test_the_example_of_the_documentation_is_what_is_printed() -> None:
    """Its table up to the modes that search: those may become better."""
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
    command = page.partition("```sh\ndigen plan ")[2].partition("\n")[0]
    shown = page.partition("```text\n")[2].partition("tag-static")[0].splitlines()
    printed = CliRunner().invoke(app, ["plan", *command.split()], env={"COLUMNS": "80", "TERM": "dumb"}).stdout
    assert [line.rstrip() for line in printed.splitlines()][: len(shown)] == shown


# Words, files and mistakes


def test_a_file_says_what_flags_say_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text("microbatches: 4\ngenerate: 1\nassist: 1\nupdate: 6e-1\n")
    (tmp_path / "costs.json").write_text('{"microbatches": 4, "generate": 1, "assist": 1, "update": 0.6}')
    expected = call(*FLAGS, "--json").stdout
    for name in ("costs.yaml", "costs.json"):
        assert call("--costs", tmp_path / name, "--json").stdout == expected
    changed = json.loads(call("--costs", tmp_path / "costs.yaml", "--update", 1, "--json").stdout)
    assert changed["modes"][1]["step_time_s"] == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "microbatches: missing; allowed: --microbatches, or a costs file or a finished run (--costs)"),
        (["--microbatches", 4, "--generate", 1], "update: missing; allowed: --update"),
        ([*FLAGS, "--generate", -1], "generate: got -1.0; allowed: a number > 0 or null (--generate)"),
        ([*FLAGS, "--score", -1], "score: got -1.0"),
        ([*FLAGS, "--update", "nan"], "update: got nan"),
        ([*FLAGS, "--microbatches", 0], "microbatches: got 0; allowed: a whole number >= 1"),
        ([*FLAGS, "--samples", 1], "samples: got 1; allowed: a whole number >= 2"),
        ([*FLAGS, "--staleness", 2], "staleness: got 2.0"),
        ([*FLAGS, "--measured-on", "0:4"], "measured_on: got '0:4'; allowed: Devices that the costs are for"),
        ([*FLAGS, "--gantt", "bst"], "mode: got 'bst'. Did you mean 'bts'?"),
        ([*FLAGS, "--devices", 4], "--devices: got 4 without --split"),
        (["--costs", "gone.yaml"], "gone.yaml cannot be read: No such file"),
        (["--costs", "."], "is not a run folder"),
        (["--generte", 1], "--generate"),
        (["--microbatches", "x"], "--microbatches"),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(
    arguments: list[object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("microbatches: 4\ngenerte: 1\n", "costs.yaml:2: key: got 'generte'. Did you mean 'generate'?"),
        ("microbatches: 4\ngenerate: fast\nupdate: 1\n", "generate: got 'fast'; allowed: a number > 0"),
        ("microbatches: true\ngenerate: 1\nupdate: 1\n", "microbatches: got true; allowed: a whole number"),
        ("generate: 1\nupdate: 1\n", "microbatches: missing; allowed: --microbatches, or"),
        ("- 1\n", "costs.yaml: got [1]"),
        ("a: [\n", "costs.yaml:2:1"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_line(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(text)
    result = call("--costs", tmp_path / "costs.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_a_plan_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom digen.cli import app\n"
        f"try:\n    app({['plan', *map(str, FLAGS)]!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = ('torch', 'diffusers', 'transformers', 'ray', 'rapidocr', 'onnxruntime', 'tensorboard')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "tag-static" in done.stdout
