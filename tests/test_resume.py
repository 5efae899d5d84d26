"""A run that was stopped and goes on is the run that was not: bit for bit, on the real bundled model."""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from digen import plugins, presets
from digen.checkpoint.tensors import Pieces
from digen.cli import app
from digen.errors import CheckpointError, ConfigError
from digen.observe.files import RunFolder, read_rows, read_spans
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
    "observe.grid_every=1",
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
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


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


def test_p77_killed_while_it_saves_a_run_goes_on_and_ends_as_the_one_that_was_not(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """`os.fsync` is where what is written becomes lasting: the process kills itself at the n-th call."""
    config = tmp_path / "config.yaml"
    config.write_text(presets.dump(presets.load(RunFolder(whole("adapters")).config, [f"run_dir={tmp_path / 'run'}"])))
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom rich.console import Console\n"
        "from digen import presets\nfrom digen.run import run\nleft, fsync = int(sys.argv[2]), os.fsync\n"
        "def dying(file):\n    global left\n    left -= 1\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if left == 0 else fsync(file)\n"
        "os.fsync = dying\n"
        "run(presets.load(Path(sys.argv[1])), console=Console(quiet=True), resume=() if sys.argv[3:] else None)"
    )
    for words in (["17"], ["20", "resume"]):
        died = subprocess.run([sys.executable, "-c", program, config, *words], capture_output=True, text=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert list((tmp_path / "run" / "checkpoints").glob(".step_*"))
    assert_same(go_on(tmp_path / "run"), whole("adapters"))
    assert not list((tmp_path / "run" / "checkpoints").glob(".step_*"))


def test_a_checkpoint_that_cannot_be_written_costs_a_note_and_only_the_last_one_the_run(
    whole: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from digen.checkpoint import manifest

    real, full = manifest.seal, {"step_000003", "step_000004"}

    def seal(aside: Path, path: Path, *args: Any) -> None:
        if path.name in full:
            raise OSError(28, "No space left on device", str(aside))
        real(aside, path, *args)

    monkeypatch.setattr(manifest, "seal", seal)
    folder = start(tmp_path / "run", *VARIANTS["adapters"], "steps=5", "checkpoint.keep=2")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002", "step_000005"]
    notes = (folder / "logs" / "driver.log").read_text()
    assert notes.count("No space left on device") == 2
    assert str(folder / "checkpoints" / "step_000003") in notes
    full.add("step_000006")
    with pytest.raises(CheckpointError, match=r"step_000006 cannot be written: .*No space left"):
        go_on(folder, "steps=6")
    full.clear()
    assert_same(go_on(folder), whole("adapters"))


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
    with pytest.raises(ConfigError, match=r"has done 4 of 4 steps; to go on, set steps higher"):
        go_on(folder)
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


@pytest.mark.slow
def test_p77_killed_at_twenty_random_moments_a_run_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    process, draw = ["engine.name=process", "steps=12", "data.prompts_per_step=2"], random.Random(5)
    reference = start(tmp_path / "whole", *process)
    command = [sys.executable, "-m", "digen", "run", "--resume", str(tmp_path / "run")]
    first = presets.resolve("flowgrpo", "glyph", None, [*SMALL, *process, f"run_dir={tmp_path / 'run'}"], {})
    config = tmp_path / "config.yaml"
    config.write_text(presets.dump(first))
    words: Sequence[str] = [*command[:4], "flowgrpo", "--config", str(config)]
    kills = 0
    while True:
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            running.wait(None if kills == 20 else draw.uniform(1.0, 30.0))
        except subprocess.TimeoutExpired:
            running.kill()
            kills += 1
        said = running.communicate()[1]
        assert "Traceback" not in said, said
        if running.returncode == 0:
            break
        if (tmp_path / "run" / "run.json").exists():
            words = command
        elif (tmp_path / "run").exists():
            shutil.rmtree(tmp_path / "run")
    assert_same(tmp_path / "run", reference, version=12)


FSDP = ["engine.name=process", "trainer.backend=fsdp", "trainer.ranks=2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full weights", "adapters", "stale samples", "average of the weights"])
def test_a_sharded_run_that_was_stopped_goes_on_as_the_one_that_was_not(name: str, tmp_path: Path) -> None:
    reference = start(tmp_path / "whole", *VARIANTS[name], *FSDP)
    names = {path.name for path in (reference / "checkpoints" / "step_000006").iterdir()}
    assert {"optimizer-00000.safetensors", "optimizer-00001.safetensors"} <= names
    assert_same(go_on(stopped_at(3, reference, tmp_path / "run")), reference)


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights, average and moments, whoever wrote which part of them."""
    found = {kind: Pieces(checkpoint.glob(f"{kind}*.safetensors")) for kind in ("weights", "ema", "optimizer")}
    return {f"{kind}/{name}": pieces.whole(name) for kind, pieces in found.items() for name in pieces.shapes}


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
def test_p46_a_checkpoint_of_two_ranks_passes_through_one_and_through_a_trainer_that_is_not_sharded(
    tmp_path: Path,
) -> None:
    name = "average of the weights"
    two = start(tmp_path / "run", *VARIANTS[name], *FSDP, "steps=2") / "checkpoints" / "step_000002"
    original = whole_tensors(two)
    assert any(name.startswith("ema/") for name in original)
    assert any(name.endswith("/exp_avg") for name in original)
    path = two
    for number, places in enumerate((["trainer.ranks=1"], ["trainer.ranks=1", "trainer.backend=local"], [])):
        config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, *VARIANTS[name], *FSDP, *places], {})
        path = through(config, path, 2, tmp_path / str(number))
        again = whole_tensors(path)
        assert again.keys() == original.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {
        p.name: p.read_bytes() for p in two.glob("*.safetensors")
    }


@pytest.mark.slow
def test_p46_a_run_goes_on_with_other_ranks_and_another_trainer_and_learns_the_same(tmp_path: Path) -> None:
    rows_alike = ["trainer.batch_size=1", "generator.batch_size=1"]  # where ranks share samples, passes have fewer rows
    coarse = [f'reward={{"{HERE}/recording.py:brightness": {{}}}}', "trainer.adam_eps=1e-4"]  # no rounding made large
    exact = ["trainer.ema={decay: 0.9}", *rows_alike, *coarse]
    reference = start(tmp_path / "whole", *exact, *FSDP)
    folder = stopped_at(1, reference, tmp_path / "run")
    for version, places in ((3, ["trainer.ranks=1"]), (4, ["trainer.ranks=1", "trainer.backend=local"]), (6, [])):
        go_on(folder, *FSDP, *places, f"steps={version}")
    ours, theirs = (whole_tensors(f / "checkpoints" / "step_000006") for f in (folder, reference))
    assert ours.keys() == theirs.keys()
    for name in (name for name in theirs if name.startswith(("weights/", "ema/"))):
        assert float((ours[name] - theirs[name]).abs().max()) <= 1e-5, name
