"""A run that was stopped and goes on is the run that was not: bit for bit, on the real bundled model."""

import json
import multiprocessing
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from digen import plugins, presets
from digen.checkpoint import manifest
from digen.checkpoint.tensors import Pieces
from digen.cli import app
from digen.errors import CheckpointError, ConfigError, DivergedError
from digen.export import export
from digen.observe.files import RunFolder, read_rows, read_spans
from digen.observe.trace import write_trace
from digen.run import make_engine, run, spec
from digen.schedule import gap
from digen.testing import (
    Recorder,
    SimulatedGroup,
    simulated_config,
    simulated_driver,
    simulated_prompts,
    virtual_run,
)
from digen.types import Start

HERE = Path(__file__).parent
SMALL = (
    "engine.name=inline",
    "steps=6",
    "checkpoint.every=1",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=2",
    "sampling.num_steps=4",
    "trainer.learning_rate=1e-3",
    "schedule.assist=none",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=2",
)
TIMES = ("time_s", "step_time_s", "busy/")


def start(folder: Path, *overrides: str) -> Path:
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True))
    return folder


def go_on(folder: Path, *overrides: str, allowed: Collection[str] = ()) -> Path:
    config = presets.load(RunFolder(folder).config, [*overrides, f"run_dir={folder}"])
    run(config, console=Console(quiet=True), resume=allowed)
    return folder


def stopped_at(version: int, whole: Path, folder: Path) -> Path:
    """The run as it was when it was killed some time after this checkpoint: what came later is there in part."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > version:
            shutil.rmtree(path)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMES)}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = {str(file.relative_to(checkpoint)): load_file(file) for file in checkpoint.rglob("*.safetensors")}
    return {f"{file}/{name}": tensor for file, found in files.items() for name, tensor in found.items()}


def assert_same(folder: Path, whole: Path, *, version: int = 6) -> None:
    assert rows(folder) == rows(whole)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(rows(whole))
    ours, theirs = (tensors(f / "checkpoints" / f"step_{version:06d}") for f in (folder, whole))
    assert ours.keys() == theirs.keys()
    assert any("exp_avg_sq" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    grids = [{p.name: p.read_bytes() for p in (f / "samples").iterdir()} for f in (folder, whole)]
    assert grids[0] == grids[1]


VARIANTS = {
    "full weights": [],
    "adapters": ["trainer.lora={rank: 4}", "algorithm.loss.kl=0.01"],
    "two updates per rollout": ["trainer.updates_per_rollout=2", "checkpoint.every=2", "schedule.staleness=0.5"],
    "stale samples": ["schedule.staleness=0.5"],
    "average of the weights": ["trainer.ema={decay: 0.9}", "trainer.lr_schedule=cosine", "trainer.warmup_steps=2"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a variant that nobody stopped; it is not to be written to."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = start(tmp_path_factory.mktemp("whole") / "run", *VARIANTS[name])
        return made[name]

    return of


@pytest.mark.parametrize("name", VARIANTS)
def test_p76_a_run_that_was_stopped_and_goes_on_is_the_run_that_was_not(
    name: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    version = 2 if "two updates" in name else 3
    torch.manual_seed(random.randrange(1 << 30))  # nothing reads torch's global random state
    assert_same(go_on(stopped_at(version, whole(name), tmp_path / "run")), whole(name))


def test_p76_weights_alone_do_not_make_the_same_run(whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = start(
        tmp_path / "run",
        f"checkpoint.init_from={stopped_at(3, whole('adapters'), tmp_path / 'old')}",
        "steps=3",
        *VARIANTS["adapters"],
    )
    ours = load_file(folder / "checkpoints" / "step_000003" / "weights.safetensors")
    theirs = load_file(whole("adapters") / "checkpoints" / "step_000006" / "weights.safetensors")
    assert any(not torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert [row["step"] for row in rows(folder)] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"checkpoint\.init_from: .* has trainer\.lora=rank=4.*this run has None"):
        start(tmp_path / "other", f"checkpoint.init_from={folder}")


def test_stale_samples_of_the_coming_step_are_made_again_with_the_weights_that_made_them(
    whole: Callable[[str], Path],
) -> None:
    """Half of each step: with two micro-batches that is the first, begun while the trainer is at the last of before."""
    assert [row["stale_share"] for row in rows(whole("two updates per rollout"))] == [0.0, 0.0, 0.5, 0.0, 0.5, 0.0]
    folder = whole("stale samples")
    assert [row["stale_share"] for row in rows(folder)] == [0.0] + [0.5] * 5
    checkpoint = folder / "checkpoints" / "step_000003"
    state = json.loads((checkpoint / "state.json").read_text())
    assert (state["stale"], state["stale_version"]) == ({"3": 2}, 2)
    old, now, two = (
        load_file(path / "weights.safetensors")
        for path in (checkpoint / "previous", checkpoint, folder / "checkpoints" / "step_000002")
    )
    assert all(torch.equal(tensor, old[name]) for name, tensor in two.items())
    assert any(not torch.equal(tensor, old[name]) for name, tensor in now.items())


def forked(program: str, **values: Any) -> Any:
    """A process that runs a program with these values as its globals; torch and what is slow has been imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["digen.cli", "digen.run", "digen.models.glyph", "digen.backends.training.local"])
    process = context.Process(target=runpy.run_path, args=(program, values))
    process.start()
    return process


DYING = """
import os, re, signal
from pathlib import Path
from rich.console import Console
from digen import presets
from digen.run import run

fsync = os.fsync

def dying(file):
    global times
    fsync(file)
    times -= bool(re.search(place, os.readlink(f"/proc/self/fd/{file}")))
    if times == 0:
        os.kill(os.getpid(), signal.SIGKILL)

os.fsync = dying
run(presets.load(Path(config)), console=Console(quiet=True), resume=resume)
"""
"""`os.fsync` is where what is written becomes lasting: the process kills itself when that is so of a path."""


@pytest.mark.slow
def test_p77_killed_while_it_saves_a_run_goes_on_and_ends_as_the_one_that_was_not(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, config, program = (tmp_path / name for name in ("run", "config.yaml", "dying.py"))
    config.write_text(presets.dump(presets.load(RunFolder(whole("adapters")).config, [f"run_dir={folder}"])))
    program.write_text(DYING)
    places = (
        (r"partial/weights.*s$", 3, "3.+partial"),
        (r"partial/\.manifest", 1, "3.+partial"),
        ("checkpoints$", 4, "6$"),
    )
    for number, (place, times, newest) in enumerate(places):
        died = forked(str(program), config=str(config), place=place, times=times, resume=() if number else None)
        died.join()
        assert died.exitcode == -signal.SIGKILL
        left = [path.name for path in (folder / "checkpoints").iterdir()]
        assert re.search(newest, max(left, key=lambda name: int(name.partition("step_")[2][:6]))), left
    assert_same(go_on(folder), whole("adapters"))  # all has been done, and nobody was told
    assert not list((folder / "checkpoints").glob(".step_*"))


def test_a_run_that_was_killed_after_its_last_checkpoint_ends_well_however_often_it_is_repeated(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, digen = tmp_path / "run", CliRunner()
    shutil.copytree(whole("adapters"), folder)
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"kind": "sav')
    (folder / "checkpoints" / ".step_000001.replaced").mkdir()  # the last save was about to delete old ones
    again = ["run", "--resume", str(folder), "checkpoint.keep=2", "--json"]
    for _ in range(2):
        done = digen.invoke(app, again)
        assert done.exit_code == 0, done.stderr
        assert "step_000006 is of the last step: nothing is left to do; to go on, set steps higher" in done.stderr
        assert json.loads(done.stdout)["num_steps"] == 6
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000005", "step_000006"]
    assert_same(folder, whole("adapters"))
    refused = digen.invoke(app, [*again, "steps=5"])
    assert (refused.exit_code, "has done 6 steps; to go on, set steps higher; got 5" in refused.stderr) == (2, True)
    changed = digen.invoke(app, [*again, "seed=5"])
    assert (changed.exit_code, "seed: 5, was 0" in changed.stderr) == (2, True)


def test_a_run_that_diverged_in_its_last_steps_is_no_success_when_it_is_repeated(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole("adapters"), folder)
    newest = folder / "checkpoints" / "step_000006"
    state = {**manifest.state(newest), "num_bad_steps": 3}
    files = [record for record in manifest.records(newest) if record.name.endswith(".safetensors")]
    config = (newest / manifest.CONFIG).read_text()
    aside = newest.rename(newest.with_name("aside"))
    manifest.seal(aside, newest, files, {manifest.STATE: json.dumps(state), manifest.CONFIG: config})
    with pytest.raises(DivergedError, match=r"the last 3 steps in a row had a gradient that is not finite"):
        go_on(folder, "trainer.max_bad_steps=3")
    go_on(folder, "trainer.max_bad_steps=4")


def test_p80_no_random_state_is_saved_and_none_is_missed_also_with_another_number_of_workers(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """Noise follows from seed, step, prompt and sample: there is no file of random state to lose, or to alter."""
    folder = stopped_at(3, whole("adapters"), tmp_path / "run")
    files = {path.name for path in (folder / "checkpoints" / "step_000003").iterdir()}
    assert files == {
        *("weights.safetensors", "optimizer-00000.safetensors"),
        *("state.json", "config.yaml", "manifest.json"),
    }
    for scrambled in (torch.manual_seed, random.seed, np.random.seed):
        scrambled(12345)
    go_on(folder, "generator.replicas=2", "schedule.ordered=true")
    assert_same(folder, whole("adapters"))


def test_p85_the_last_step_is_saved_whatever_the_interval_and_what_a_run_goes_on_from_is_not_saved_again(
    tmp_path: Path,
) -> None:
    def saved(folder: Path) -> list[str]:
        return sorted(path.name for path in (folder / "checkpoints").iterdir())

    folder = start(tmp_path / "run", *VARIANTS["adapters"], "steps=3", "checkpoint.every=2")
    assert saved(folder) == ["step_000002", "step_000003"]
    before = {path: path.stat().st_ino for path in (folder / "checkpoints").rglob("*")}
    go_on(folder, "steps=5", "checkpoint.every=100")
    assert saved(folder) == ["step_000002", "step_000003", "step_000005"]
    assert all(path.stat().st_ino == number for path, number in before.items())


def test_p86_an_export_is_no_run_to_go_on_with_and_the_message_says_what_is(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    export(whole("adapters"), tmp_path / "export", "live")
    refused = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "export")])
    assert refused.exit_code == 2
    assert "has weights alone" in refused.stderr
    assert "--init-from" in refused.stderr


def test_a_checkpoint_that_cannot_be_written_costs_a_note_and_only_the_last_one_the_run(
    whole: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = manifest.seal, {"step_000003", "step_000004"}

    def seal(aside: Path, path: Path, *args: Any) -> None:
        if path.name in full:
            raise OSError(28, "No space left on device", str(aside))
        real(aside, path, *args)

    monkeypatch.setattr(manifest, "seal", seal)
    folder = stopped_at(2, whole("adapters"), tmp_path / "run")
    go_on(folder, "steps=5", "checkpoint.keep=2")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002", "step_000005"]
    notes = (folder / "logs" / "driver.log").read_text()
    assert notes.count("No space left on device") == 2
    assert str(folder / "checkpoints" / "step_000003") in notes
    full.add("step_000006")
    with pytest.raises(CheckpointError, match=r"step_000006 cannot be written: .*No space left"):
        go_on(folder, "steps=6")
    full.clear()
    assert_same(go_on(folder), whole("adapters"))


MOUNTED = """
import json, subprocess, sys
from pathlib import Path
from typer.testing import CliRunner
from digen.cli import app

for commands, words, said in json.loads(sys.argv[1]):
    subprocess.run(["sh", "-ec", commands], check=True)
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    Path(said).write_text(json.dumps([done.exit_code, done.stderr]))
"""
PLACES_TO_WRITE = {
    "full": (
        "mount -t tmpfs -o size={size} tmpfs {run}/checkpoints; cp -r {source} {run}/checkpoints/",
        "No space left",
    ),
    "kept": (
        "mount --bind {run}/checkpoints {run}/checkpoints; mount -o remount,ro,bind {run}/checkpoints",
        "Read-only file",
    ),
    "shut": ("mount --bind {run} {run}; mount -o remount,ro,bind {run}", "cannot be written: Read-only file system"),
}


@pytest.mark.slow
def test_p84_a_full_disk_and_a_read_only_folder_are_named_and_nothing_is_lost(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """Real file systems, mounted for one process: not even root can write to them."""
    namespace = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a file system of their own")
    folders = {name: stopped_at(3, whole("adapters"), tmp_path / name) for name in PLACES_TO_WRITE}
    source = whole("adapters") / "checkpoints" / "step_000003"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    size = 5 * sum(map(len, before.values())) // 2  # for two of them, and half of a third
    tries = [
        (
            PLACES_TO_WRITE[name][0].format(size=size, run=folder, source=source),
            ["run", "--resume", str(folder), "checkpoint.keep=null"],
            str(tmp_path / f"{name}.json"),
        )
        for name, folder in folders.items()
    ]
    subprocess.run([*namespace, sys.executable, "-c", MOUNTED, json.dumps(tries)], check=True)
    for name, folder in folders.items():
        code, stderr = json.loads((tmp_path / f"{name}.json").read_text())
        assert code == (2 if name == "shut" else 1), stderr
        assert PLACES_TO_WRITE[name][1] in stderr
        assert str(folder) in stderr
        kept = folder / "checkpoints" / "step_000003"
        assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
        if name != "shut":
            assert len(rows(folder)) == 6  # training went on
            missing = f"{folder / 'checkpoints' / 'step_000005'} could not be written: "
            assert missing in (folder / "logs" / "driver.log").read_text()
        assert_same(go_on(folder), whole("adapters"))


@pytest.mark.slow
def test_saving_holds_training_up_for_less_than_a_twentieth_of_a_step_and_the_trace_shows_it(
    tmp_path: Path, warm: None
) -> None:
    """Full weights, their average and two moments: 17 MB that must be copied, hashed, written and fsynced each step."""
    longer = [
        "data.prompts_per_step=4",
        "algorithm.samples_per_prompt=8",
        "sampling.num_steps=6",
        "observe.grid_every=0",
    ]
    folder = start(tmp_path / "run", "trainer.ema={decay: 0.9}", *longer, *PROCESSES)  # as it is: threads share a lock
    newest = folder / "checkpoints" / "step_000006"
    assert sum(path.stat().st_size for path in newest.rglob("*")) > 16e6
    *saves, last = (span for span in read_spans(folder / "events.jsonl") if span.kind == "save")
    assert len(saves) == 5  # the last one is waited for
    held_up_s = min(span.end - span.start for span in saves)  # of five: what else the machine does is in the others
    assert held_up_s < 0.05 * median(row["step_time_s"] for row in read_rows(folder / "metrics.jsonl"))
    drawn = json.loads(write_trace(folder).trace.read_text())["traceEvents"]
    shown = [event["dur"] / 1e6 for event in drawn if event["ph"] == "X" and event["cat"] == "save"]
    assert shown == pytest.approx([span.end - span.start for span in (*saves, last)], abs=1e-5)


def test_going_on_says_where_from_cuts_what_is_done_again_and_refuses_what_makes_no_sense(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = stopped_at(3, whole("adapters"), tmp_path / "run")
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"kind": "upd')
    with pytest.raises(ConfigError, match=r"seed: 7, was 0"):
        go_on(folder, "seed=7")
    assert len(rows(folder)) == 6
    go_on(folder, "steps=4", "checkpoint.every=3", "schedule.mode=naive")
    notes = (folder / "logs" / "driver.log").read_text()
    assert f"going on from {folder / 'checkpoints' / 'step_000003'}" in notes
    assert rows(folder) == rows(whole("adapters"))[:4]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    spans = read_spans(folder / "events.jsonl")
    assert [span.kind for span in spans].count("load") == 4
    times = [row["time_s"] for row in read_rows(folder / "metrics.jsonl")]
    assert times == sorted(times)
    with pytest.raises(ConfigError, match=r"has done 4 steps; to go on, set steps higher; got 3"):
        go_on(folder, "steps=3")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a sign that says "ONE"\na sign that says "TWO"\n')
    with pytest.raises(ConfigError, match=r"data\.prompts: what it stands for"):
        go_on(folder, "steps=5", f"data.prompts={prompts}")
    go_on(folder, "steps=5", f"data.prompts={prompts}", allowed=["data.prompts"])
    go_on(folder, "steps=6")


def test_the_command_line_goes_on_with_a_run_and_begins_one_from_its_weights(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, digen = stopped_at(5, whole("adapters"), tmp_path / "run"), CliRunner()
    refused = digen.invoke(app, ["run", "--resume", str(folder), "seed=1", "trainer.learning_rate=1"])
    assert refused.exit_code == 2
    assert "2 settings differ" in refused.stderr
    assert "trainer.learning_rate: 1.0, was 0.001" in refused.stderr
    for words, message in (
        (["dancegrpo", "--resume", str(folder)], "got 'dancegrpo', but"),
        (["--resume", str(folder), "--run-dir", "x"], "--run-dir cannot be used with --resume"),
        (["--resume", str(tmp_path)], "is not a run folder"),
        ([], "got no ALGORITHM"),
    ):
        wrong = digen.invoke(app, ["run", *words])
        assert (wrong.exit_code, message in wrong.stderr) == (2, True), wrong.stderr
    done = digen.invoke(app, ["run", "--resume", str(folder), "--json"])
    assert json.loads(done.stdout)["num_steps"] == 6
    assert_same(folder, whole("adapters"))
    planned = digen.invoke(app, ["run", "flowgrpo", "--init-from", str(folder), "--dry-run", "--json"])
    assert json.loads(planned.stdout)["config"]["checkpoint"]["init_from"] == str(folder)


def test_stale_rollouts_that_a_run_begins_with_are_counted_and_not_made_twice() -> None:
    config = simulated_config(steps=4, schedule={"staleness": 0.5})
    generator, trainer, seen = SimulatedGroup("g", generate=1.0), SimulatedGroup("trainer", update=0.6), Recorder()
    trainer.version = generator.version = 2
    start = Start(3, loaded=True, num_bad_steps=1, elapsed_s=100.0)

    async def main() -> None:
        driver = simulated_driver(config, [generator], trainer, seen, start=start)
        microbatches = gap.cut(3, simulated_prompts(3, 4), 2, 1, config.seed)[:2]
        made = [await driver.calls.generate(generator, one, 2, (0, 1)) for one in microbatches]
        trainer.version, driver.start = 3, replace(start, rollouts=tuple(made))
        await driver.run()

    virtual_run(main)
    assert [row["stale_share"] for row in seen.rows] == [0.5]
    assert [(s.kind, s.index, s.version) for s in seen.spans if s.kind == "generate"] == [
        ("generate", 2, 3),
        ("generate", 3, 3),
    ]
    assert min(span.start for span in seen.spans) == 100.0  # the clock goes on


# Slow


COMMAND = """
import os
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
from digen.cli import app
app(words)
"""


@pytest.mark.slow
def test_p77_killed_at_twenty_random_moments_a_run_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    """The driver, with SIGKILL; inline that is the whole run, also while it saves, else its workers outlive it a bit.

    Each try is the command line in a process of its own, forked from one that has imported torch and little else. The
    moments are drawn from a span of about what a run takes here, which is adapted: shorter when one ended before it was
    killed, longer when one was killed before it had done a step.
    """
    draw, threads = random.Random(5), ["generator.threads=1", "trainer.threads=1"]
    script, log, folder, config = (tmp_path / name for name in ("command.py", "stderr.txt", "run", "config.yaml"))
    script.write_text(COMMAND)

    def attempt(words: Sequence[str], limit_s: float | None = None) -> int | None:
        process = forked(str(script), log=str(log), words=list(words))
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode

    def first(folder: Path) -> list[str]:
        settings = [*SMALL, *threads, "steps=8", f"run_dir={folder}"]
        config.write_text(presets.dump(presets.resolve("flowgrpo", "glyph", None, settings, {})))
        return ["run", "flowgrpo", "--config", str(config)]

    assert attempt(["list"]) == 0  # what all are forked from has started
    begun_s = monotonic()
    assert attempt(first(tmp_path / "whole")) == 0
    longest_s = {"inline": (monotonic() - begun_s) / 2, "process": monotonic() - begun_s}
    engines, words, finished = ["inline", "process", "inline", "inline", "inline"] * 4, first(folder), False
    while not finished:
        engine, before = engines[0] if engines else "inline", set(folder.glob("checkpoints/step_*"))
        code = attempt([*words, f"engine.name={engine}"], draw.uniform(0, longest_s[engine]) if engines else None)
        if code == 0:  # before it was killed often enough: then another run begins
            assert_same(folder, tmp_path / "whole", version=8)
            finished, longest_s[engine] = not engines, longest_s[engine] / 2
        else:
            assert code == -signal.SIGKILL, log.read_text()
            longest_s[engines.pop(0)] *= 1.0 if set(folder.glob("checkpoints/step_*")) - before else 1.3
        if code == 0 or (folder.exists() and not (folder / "run.json").exists()):
            shutil.rmtree(folder)
        words = ["run", "--resume", str(folder)] if folder.exists() else first(folder)
    assert "Traceback" not in log.read_text()


ZERO = ["trainer.backend=deepspeed", "trainer.ranks=2"]
PLACES = {
    "fsdp": ["trainer.backend=fsdp", "trainer.ranks=2"],
    "zero 2": [*ZERO, "trainer.zero_stage=2"],
    "zero 3": [*ZERO, "trainer.zero_stage=3"],
}
PROCESSES = [f"engine.name={HERE}/warm.py:WarmEngine", "generator.threads=1", "trainer.threads=1"]
FSDP = [*PROCESSES, *PLACES["fsdp"]]
SHARDED = {
    "full weights, average, stale samples": [*VARIANTS["average of the weights"], *VARIANTS["stale samples"]],
    "adapters, two updates per rollout": [*VARIANTS["adapters"], *VARIANTS["two updates per rollout"]],
}


BY_COMMAND = ("zero 3", "full weights, average, stale samples")
"""This one goes on by the command line, in processes that know nothing of the first half."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("place", PLACES)
def test_p76_a_sharded_run_that_was_stopped_goes_on_as_the_one_that_was_not(
    place: str, name: str, tmp_path: Path, warm: None
) -> None:
    if "zero" in place:
        pytest.importorskip("deepspeed", reason="extra deepspeed is not installed")
    reference = start(tmp_path / "whole", *SHARDED[name], *PROCESSES, *PLACES[place])
    newest = {path.name for path in (reference / "checkpoints" / "step_000006").iterdir()}
    assert ("optimizer-00001.safetensors" in newest) == (place == "fsdp")  # DeepSpeed's are whole
    assert max(row["stale_share"] for row in rows(reference)) == 0.5
    folder = stopped_at(2 if "two updates" in name else 3, reference, tmp_path / "run")
    if (place, name) == BY_COMMAND:
        script, log = tmp_path / "command.py", tmp_path / "stderr.txt"
        script.write_text(COMMAND)
        done = forked(str(script), log=str(log), words=["run", "--resume", str(folder), "engine.name=process"])
        done.join()
        assert done.exitcode == 0, log.read_text()
    else:
        go_on(folder)
    assert_same(folder, reference)


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights, average and moments, whoever wrote which part of them."""
    found = {kind: Pieces(checkpoint.glob(f"{kind}*.safetensors")) for kind in ("weights", "ema/", "optimizer")}
    return {f"{kind.strip('/')}/{name}": pieces.whole(name) for kind, pieces in found.items() for name in pieces.shapes}


def through(config: Any, source: Path, version: int, target: Path) -> Path:
    """Load a checkpoint into a trainer and save it again."""

    async def main() -> None:
        target_class = plugins.target("trainers", config.trainer.backend)
        async with make_engine(config).open([spec(config, "trainer", target_class, config.trainer, None)]) as groups:
            for method, *args in (("load",), ("resume", source, version), ("save", target)):
                await groups["trainer"].call(method, *args)

    anyio.run(main)
    return target


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_p46_a_checkpoint_of_two_ranks_passes_through_other_numbers_of_ranks_and_a_trainer_that_is_not_sharded(
    tmp_path: Path, warm: None
) -> None:
    name = "average of the weights"
    two = start(tmp_path / "run", *VARIANTS[name], *FSDP, "steps=2") / "checkpoints" / "step_000002"
    original = whole_tensors(two)
    assert any(name.startswith("ema/") for name in original)
    assert any(name.endswith("/exp_avg") for name in original)
    live = {name.partition("/")[2]: tensor for name, tensor in original.items() if not name.startswith("ema/")}
    found = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(two)), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in live.items())  # torch reads it too
    path, local = two, ["trainer.ranks=1", "trainer.backend=local"]
    for number, places in enumerate((["trainer.ranks=3"], ["trainer.ranks=1"], local, [])):
        config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, *VARIANTS[name], *FSDP, *places], {})
        path = through(config, path, 2, tmp_path / str(number))
        again = whole_tensors(path)
        assert again.keys() == original.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
    files = [{str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*.safetensors")} for f in (path, two)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_p46_a_run_goes_on_with_other_ranks_and_other_trainers_and_learns_the_same(tmp_path: Path, warm: None) -> None:
    """Two ranks, one, two of DeepSpeed, one that is not sharded, one of DeepSpeed, two: each goes on by one step."""
    pytest.importorskip("deepspeed", reason="extra deepspeed is not installed")
    rows_alike = ["trainer.batch_size=1", "generator.batch_size=1"]  # where ranks share samples, passes have fewer rows
    coarse = [f'reward={{"{HERE}/recording.py:brightness": {{}}}}', "trainer.adam_eps=1e-4"]  # no rounding made large
    exact = ["trainer.ema={decay: 0.9}", *rows_alike, *coarse]
    reference = start(tmp_path / "whole", *exact, *FSDP)
    folder = stopped_at(1, reference, tmp_path / "run")
    one = ["trainer.ranks=1"]
    places = (one, PLACES["zero 3"], [*one, "trainer.backend=local"], [*PLACES["zero 2"], *one], [])
    for version, place in enumerate(places, 2):
        go_on(folder, *FSDP, "trainer.zero_stage=null", *place, f"steps={version}")
    ours, theirs = (whole_tensors(f / "checkpoints" / "step_000006") for f in (folder, reference))
    before = whole_tensors(reference / "checkpoints" / "step_000001")
    for name in (name for name in theirs if name.startswith(("weights/", "ema/"))):
        assert float((ours[name] - theirs[name]).abs().max()) <= 1e-6, name
    assert max(float((theirs[n] - t).abs().max()) for n, t in before.items() if n.startswith("weights/")) > 5e-4
