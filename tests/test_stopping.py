"""Ctrl-C and SIGTERM, at every kind of work: the run saves, ends with the shell's exit code, and leaves nothing."""

import json
import multiprocessing
import os
import runpy
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from digen import presets
from digen.stopping import FINISH_S

HERE = Path(__file__).parent
COMMAND = """
import os, sys, tempfile
os.environ.update(environment)
tempfile.tempdir = None
sys.argv = ["digen", *words]
sys.stderr = sys.stdout = open(log, "a", buffering=1)
from digen.cli import main
main()
"""
SMALL = (
    "steps=3",
    "checkpoint.every=0",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=2",
    "sampling.num_steps=4",
    "schedule.assist=none",
    "schedule.ordered=true",
    f"generator.backend={HERE}/workers_that_signal.py:Generator",
    f"trainer.backend={HERE}/workers_that_signal.py:Trainer",
    "generator.threads=1",
    "trainer.threads=1",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=0",
)
NUMBERS = (
    *(setting for setting in SMALL if "backend" not in setting),
    f"generator.backend={HERE}/signalling.py:Numbers",
    f"trainer.backend={HERE}/signalling.py:Numbers",
)
WORK = ("load", "generate", "score", "update", "sync", "pull", "save")
QUICK = ("generate", "save")
TRAINED = ("pull", "save")
"""When it does this, a run has an optimizer step behind it."""
COMPLAINTS = ("Traceback", "Error", "Exception", "leaked", "Warning")
"""What is in a line of output that nobody should see."""
OF_LIBRARIES = (".ses", "torchinductor_")
"""What onnxruntime (which diffusers imports) and torch keep among temporary files: one for all processes."""
WITHIN_S = 300.0
"""A run that has not ended by then hangs."""
GONE_S = 60.0
"""How long a killed process of a Ray cluster may outlive that, on a machine that has a lot to do."""
Digen = Callable[..., tuple[int, str]]


@pytest.fixture
def digen(tmp_path: Path) -> Digen:
    """The command, in a process that has imported already what is slow to import: exit code and output.

    It leaves no process, no shared memory and nothing in the folder for temporary files.
    """
    program, log = tmp_path / "command.py", tmp_path / "log.txt"
    program.write_text(COMMAND)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["digen.cli", "digen.run", "digen.models.glyph", "digen.backends.training.local"])

    def call(*words: str, signals: str = "none:0:0", ray: bool = False) -> tuple[int, str]:
        with tempfile.TemporaryDirectory(prefix="d") as temp:  # a short path, for Ray's sockets
            environment = {"TEST_SIGNAL": signals, "TMPDIR": temp}
            values: dict[str, Any] = {"words": words, "log": str(log), "environment": environment}
            process = context.Process(target=runpy.run_path, args=(str(program), values))
            process.start()
            pid = process.pid
            process.join(WITHIN_S)
            if process.exitcode is None:
                process.kill()
                pytest.fail(f"it did not end: {log.read_text()}")
            assert not list(Path("/dev/shm").glob(f"*digen-{pid}-*"))
            limit = time.monotonic() + (GONE_S if ray else 0.0)
            while (left := processes(temp)) and time.monotonic() < limit:
                time.sleep(0.05)
            assert not left
            assert [path.name for path in Path(temp).iterdir() if not path.name.startswith(OF_LIBRARIES)] == []
        return process.exitcode, log.read_text()

    return call


def processes(temp: str) -> list[psutil.Process]:
    """Those whose temporary files go there."""
    found = psutil.process_iter(["environ", "status"])
    return [p for p in found if (p.info["environ"] or {}).get("TMPDIR") == temp and p.info["status"] != "zombie"]


def settings(folder: Path, engine: str, small: Sequence[str] = SMALL) -> list[str]:
    config = folder.with_name("config.yaml")
    overrides = [*small, f"run_dir={folder}", f"engine.name={engine}"]
    config.write_text(presets.dump(presets.resolve("flowgrpo", "glyph", None, overrides, {})))
    return ["run", "flowgrpo", "--config", str(config)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step_000003" / "weights.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What the run that nobody stops trains."""
    from rich.console import Console

    from digen.run import run

    folder = tmp_path_factory.mktemp("whole") / "run"
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", "engine.name=inline"], {})
    run(config, console=Console(quiet=True))
    return weights(folder)


def stop_and_go_on(digen: Digen, folder: Path, work: str, number: int, engine: str) -> None:
    code, said = digen(*settings(folder, engine), signals=f"{work}:{number}:1")
    assert (folder / "signalled").exists()
    assert code == 128 + number, said
    assert f"stopped by {signal.Signals(number).name}" in said
    assert f"to go on: digen run --resume {folder}" in (folder / "logs" / "driver.log").read_text()
    assert "Traceback" not in said
    code, said = digen("run", "--resume", str(folder))
    assert code == 0, said
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    "work", [work if work in QUICK else pytest.param(work, marks=pytest.mark.slow) for work in WORK]
)
def test_p87_the_first_signal_saves_and_ends_and_the_run_goes_on_as_if_nobody_had_stopped_it(
    work: str, digen: Digen, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    number = (signal.SIGINT, signal.SIGTERM)[WORK.index(work) % 2]
    stop_and_go_on(digen, tmp_path / "run", work, number, "inline")
    found = weights(tmp_path / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_what_is_trained_when_the_signal_comes_is_saved(digen: Digen, tmp_path: Path) -> None:
    digen(*settings(tmp_path / "run", "inline"), signals=f"pull:{signal.SIGINT:d}:1")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.slow
@pytest.mark.parametrize("work", ["load", "generate", "update"])
def test_p87_so_it_is_where_workers_are_processes(
    work: str, digen: Digen, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    number = signal.SIGTERM if work == "generate" else signal.SIGINT
    stop_and_go_on(digen, tmp_path / "run", work, number, "process")
    found = weights(tmp_path / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def stop(digen: Digen, folder: Path, work: str, number: int, engine: str) -> None:
    """A run of workers of numbers that is stopped at this work."""
    code, said = digen(*settings(folder, engine, NUMBERS), signals=f"{work}:{number}:1", ray=engine == "ray")
    assert (folder / "signalled").exists(), said
    assert code == 128 + number, said
    assert not [line for line in said.splitlines() if any(word in line for word in COMPLAINTS)], said
    notes = (folder / "logs" / "driver.log").read_text()
    assert f"to go on: digen run --resume {folder}" in notes
    saved = [path.name for path in (folder / "checkpoints").glob("step_*")]
    assert len(saved) == (work in TRAINED), notes


@pytest.mark.parametrize(
    ("engine", "work"),
    [
        *(("inline", work) for work in WORK),
        *(("process", work) for work in QUICK),
        *(pytest.param("process", work, marks=pytest.mark.slow) for work in WORK if work not in QUICK),
        *(pytest.param("ray", work, marks=pytest.mark.slow) for work in WORK),
    ],
)
def test_p87_no_engine_leaves_anything_whatever_a_run_does_when_it_is_stopped(
    engine: str, work: str, digen: Digen, tmp_path: Path
) -> None:
    number = (signal.SIGTERM, signal.SIGINT)[WORK.index(work) % 2]
    stop(digen, tmp_path / "run", work, number, engine)


@pytest.mark.slow
def test_three_starts_and_stops_in_a_row_leave_nothing(digen: Digen, tmp_path: Path) -> None:
    """benchmarks/starts.py does 30, of the bundled model."""
    for work in ("load", "score", "sync"):
        stop(digen, tmp_path / work, work, signal.SIGINT, "process")


@pytest.mark.parametrize("engine", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_p87_the_second_signal_ends_the_run_at_once(engine: str, digen: Digen, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, said = digen(*settings(folder, engine), signals=f"update:{signal.SIGTERM:d}:2:600")
    took_s = time.time() - (folder / "signalled").stat().st_mtime
    assert code == 143, said
    assert took_s < FINISH_S - 1, "it waited for the call, or to save"
    assert "Traceback" not in said


def test_a_signal_before_anything_runs_ends_the_command_with_its_exit_code(tmp_path: Path) -> None:
    """The prompt file is a pipe into which nobody writes: it is read when the config is checked."""
    pipe, program, log = (tmp_path / name for name in ("prompts.txt", "command.py", "log.txt"))
    os.mkfifo(pipe)
    program.write_text(COMMAND)
    words = [*settings(tmp_path / "run", "inline"), f"data.prompts={pipe}"]
    values = {"words": words, "log": str(log), "environment": {}}
    process = multiprocessing.get_context("forkserver").Process(target=runpy.run_path, args=(str(program), values))
    process.start()
    writer = opened(pipe)
    assert process.pid
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    os.close(writer)
    assert process.exitcode == 143, log.read_text()
    assert not (tmp_path / "run").exists()


def opened(pipe: Path) -> int:
    """The end to write to, as soon as somebody reads at the other."""
    limit = time.monotonic() + 30
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < limit, "nobody reads it"
            time.sleep(0.02)
