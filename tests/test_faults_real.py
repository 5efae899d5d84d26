"""Faults of real processes: signals, lost and repeated answers, and a whole run of the bundled model that is hit."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen import presets
from digen.errors import CheckpointError, SyncError, WorkerError
from digen.run import run
from digen.testing.faults import Planned, Setup, run_to_the_end
from digen.testing.faulty_processes import run_processes

SAMPLE = range(100, 106)
"""Some of the seeds that benchmarks/faults.py runs."""


def undisturbed(setup: Setup) -> float | None:
    """Of the same run without faults, in virtual time: processes train the same (below)."""
    return run_to_the_end(replace(setup, faults=())).weights


def judge(setup: Setup, folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    ended = run_processes(setup, folder / "faulty")
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list((folder / "faulty").glob("digen-*")) == []
    if ended.error is not None:
        assert isinstance(ended.error, WorkerError | SyncError | CheckpointError)
    elif not setup.schedule.get("staleness"):
        assert ended.weights == undisturbed(setup)


def hit(kind: str, group: str, method: str) -> Setup:
    fault = Planned(kind, group, method, 1, 1.0)
    return Setup(5, (fault,), {"mode": "pipelined", "prompts_per_microbatch": 1}, replicas=2, prompts=3)


@pytest.mark.parametrize(
    ("kind", "group", "method"),
    [("kill", "g0", "generate"), ("hang", "g0", "score"), ("kill", "trainer", "accumulate")],
)
def test_processes_that_are_killed_or_stopped_cost_time_and_change_nothing(
    kind: str, group: str, method: str, tmp_path: Path
) -> None:
    ended = run_processes(hit(kind, group, method), tmp_path / "faulty")
    assert [fault.kind for fault in ended.happened] == [kind]
    assert ended.restarts == (group == "trainer")
    assert ended.weights == undisturbed(hit(kind, group, method))


def test_an_answer_that_comes_twice_counts_once(tmp_path: Path) -> None:
    setup = hit("duplicated result", "trainer", "accumulate")
    ended = run_processes(setup, tmp_path / "faulty")
    assert ended.happened
    assert (ended.restarts, ended.notes) == (0, [])
    assert ended.weights == undisturbed(setup)


def test_p18_p25_processes_train_what_simulated_groups_train_and_each_sample_once(tmp_path: Path) -> None:
    """That each sample is trained once, under the right version, is asserted by the workers themselves."""
    setup = Setup(3, (), {"mode": "pipelined", "prompts_per_microbatch": 2, "assist": "both"}, replicas=2, prompts=5)
    ended = run_processes(setup, tmp_path / "run")
    assert ended.weights == run_to_the_end(setup).weights
    assert [row["trained_samples"] for row in ended.rows] == [10] * 3
    assert [row["stale_share"] for row in ended.rows] == [0.0] * 3
    assert ended.left == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_p21_p22_p24_stale_samples_of_processes_stay_within_their_share_and_the_run_ends(
    number: int, tmp_path: Path
) -> None:
    setup = Setup(number, (), {"mode": "pipelined", "staleness": 0.5}, replicas=2, prompts=4)
    ended = run_processes(setup, tmp_path / "run")
    assert [row["trained_samples"] for row in ended.rows] == [8] * 3
    assert all(row["stale_share"] <= 0.5 for row in ended.rows)
    assert ended.left == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", SAMPLE)
def test_runs_of_processes_under_faults_end_with_the_right_weights_or_a_clear_error(seed: int, tmp_path: Path) -> None:
    judge(Setup.drawn(seed), tmp_path)


# The bundled model ---------------------------------------------------------------------------------------------------

SMALL = (
    "engine.name=process",
    "steps=4",
    "checkpoint.every=1",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=2",
    "sampling.num_steps=4",
    "schedule.assist=none",
    "schedule.ordered=true",
    "generator.threads=1",
    "trainer.threads=1",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=0",
)


def train(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True))
    return load_file(folder / "checkpoints" / "step_000004" / "weights.safetensors")


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def kill_once(folder: Path, name: str, ready: Callable[[], bool]) -> Thread:
    """As soon as the run is `ready`, kill -9 its worker of this name."""
    others = children()  # of tests before this one

    def watch() -> None:
        while not ready():
            time.sleep(0.002)
        (victim,) = [p for p in children() - others if p.cmdline()[-1:] == [name]]
        os.kill(victim.pid, signal.SIGKILL)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    return thread


def rows(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_p88_a_killed_generator_and_a_killed_trainer_leave_the_weights_of_the_run_that_nobody_hit(
    tmp_path: Path,
) -> None:
    before, folder = children(), tmp_path / "run"
    whole = train(tmp_path / "whole", "engine.name=inline")
    threads = [
        kill_once(folder, "generator-0", lambda: len(rows(folder)) >= 1),
        kill_once(folder, "trainer-0", lambda: len(rows(folder)) >= 3),
    ]
    found = train(folder)
    assert not any(thread.is_alive() for thread in threads)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert rows(folder) == [0, 1, 2, 3]
    notes = (folder / "logs" / "driver.log").read_text()
    assert "was killed by SIGKILL" in notes
    assert "generator is started again" in notes
    assert "the run is started again from its newest checkpoint" in notes
    assert children() <= before


@pytest.mark.slow
def test_p88_a_run_that_cannot_go_on_says_why_and_how_it_can_be_resumed(tmp_path: Path) -> None:
    before, folder = children(), tmp_path / "run"
    kill_once(folder, "trainer-0", lambda: len(rows(folder)) >= 1)
    with pytest.raises(WorkerError, match=r"trainer rank 0 failed .* was killed by SIGKILL"):
        train(folder, "checkpoint.every=0")
    notes = (folder / "logs" / "driver.log").read_text()
    assert f"saved: 0 of 4 steps; to go on: digen run --resume {folder}" in notes
    assert children() <= before
