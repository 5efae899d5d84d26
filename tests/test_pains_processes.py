"""Troubles that users of other projects report, each as the check that was made of it, on workers that are processes.

P18, P21, P22, P24, P25 and P88 of processes are in test_faults_real.py too, P87 is in test_stopping.py.
"""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from threading import Event, Thread
from typing import Any

import anyio
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from digen import presets
from digen.cli import app
from digen.engines.base import WorkerSpec
from digen.engines.process import ProcessEngine
from digen.errors import WorkerError
from digen.observe.files import read_rows
from digen.run import run
from digen.testing import SimulatedGroup, simulate, simulated_config
from digen.testing.faults import STEPS, Ended, Planned, Setup, run_to_the_end
from digen.testing.faulty_processes import run_processes
from digen.types import Span

HERE = Path(__file__).parent
NUMBERS = f"{HERE}/workers_of_numbers.py"
WARM = f"engine.name={HERE}/warm.py:WarmEngine"


def spans(ended: Ended, kind: str) -> list[Span]:
    return [span for span in ended.spans if span.kind == kind]


# Versions -------------------------------------------------------------------------------------------------------------


def test_p17_staleness_zero_with_a_slow_sync_ends_and_every_sample_has_its_own_version(tmp_path: Path) -> None:
    setup = Setup(17, (), {"mode": "pipelined", "prompts_per_microbatch": 1}, replicas=2)
    ended = run_processes(setup, tmp_path / "run", f"{NUMBERS}:Late")
    assert ended.weights == run_to_the_end(setup).weights
    made, syncs = spans(ended, "generate"), {span.step: span for span in spans(ended, "sync")}
    assert all(span.version == span.step for span in made)
    assert len(made) == len(spans(ended, "update")) == STEPS * setup.prompts
    assert all(span.start >= syncs[span.step - 1].end for span in made if span.step)
    assert [row["stale_share"] for row in ended.rows] == [0.0] * STEPS


def test_p19_a_sync_during_a_trajectory_neither_cancels_nor_changes_it(tmp_path: Path) -> None:
    setup = Setup(19, (), {"mode": "pipelined", "prompts_per_microbatch": 1, "staleness": 0.5})
    ended = run_processes(setup, tmp_path / "run", f"{NUMBERS}:Held")
    made = spans(ended, "generate")
    across = [(g, s) for g in made for s in spans(ended, "sync") if g.start < s.end < g.end]
    assert {g.step for g, _ in across} == {1, 2}, "no sync ended during a generation: the case shows nothing"
    assert all(g.version == s.version - 1 == g.step - 1 for g, s in across)
    assert Counter(span.step for span in made) == dict.fromkeys(range(STEPS), setup.prompts)
    assert [row["trained_samples"] for row in ended.rows] == [8] * STEPS
    assert ended.notes == []
    assert ended.left == 0


@pytest.mark.slow
def test_p24_processes_that_go_on_from_a_checkpoint_keep_their_bounds(tmp_path: Path) -> None:
    schedule = {"mode": "pipelined", "prompts_per_microbatch": 1, "staleness": 0.5, "max_in_flight": 1}
    killed = Planned("kill", "trainer", "accumulate", 9, 1.0)
    ended = run_processes(Setup(24, (killed,), schedule, replicas=2), tmp_path / "run")
    assert ended.happened == [killed]
    assert ended.restarts == 1
    assert [row["step"] for row in ended.rows] == [0, 1, 1, 2]
    assert ended.rows[2]["stale_share"] == 0.0
    assert all(row["stale_share"] <= 0.5 for row in ended.rows)
    made = spans(ended, "generate")
    assert len(made) == 2 * 4
    assert not any(a.start < b.end and b.start < a.end for a, b in combinations(made, 2))


# Data -----------------------------------------------------------------------------------------------------------------


def test_p26_ranks_micro_batch_and_group_size_need_not_divide_each_other(tmp_path: Path) -> None:
    setup = Setup(26, (), {"mode": "pipelined", "prompts_per_microbatch": 4}, prompts=9, samples=5, ranks=3)
    ended = run_processes(setup, tmp_path / "run")
    assert [row["trained_samples"] for row in ended.rows] == [45] * STEPS
    assert ended.weights == run_to_the_end(setup).weights


@pytest.mark.slow
def test_p28_one_failed_sample_drops_its_group_and_changes_no_other(tmp_path: Path) -> None:
    setup = Setup(28, (), {"mode": "pipelined", "prompts_per_microbatch": 1}, samples=4)
    ended = run_processes(setup, tmp_path / "short", f"{NUMBERS}:Failing")
    run_processes(setup, tmp_path / "sound", f"{NUMBERS}:Writing")
    short, sound = (_trained(tmp_path / name) for name in ("short", "sound"))
    assert len(sound) == STEPS * 4
    assert short["trained-0-1.json"]["advantages"] == [None] * 4
    assert all(short[name] == sound[name] for name in sound if name.startswith("trained-0-") and name[10] != "1")
    assert short["trained-0-1.json"]["denominator"] == sound["trained-0-1.json"]["denominator"]
    assert [row["groups_dropped"] for row in ended.rows] == [1, 0, 0]
    assert any("prompt 1" in note and "dropped" in note for note in ended.notes)


def _trained(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("trained-*.json")}


# Failures -------------------------------------------------------------------------------------------------------------


def hit(*faults: Planned, **more: Any) -> Setup:
    return Setup(5, faults, {"mode": "pipelined", "prompts_per_microbatch": 1}, replicas=2, prompts=3, **more)


@pytest.mark.slow
def test_p88_a_killed_scorer_is_named_with_its_signal_and_its_log_and_costs_nothing(tmp_path: Path) -> None:
    setup = hit(Planned("kill", "scorer", "score", 1, 1.0), scorer=True)
    ended = run_processes(setup, tmp_path / "run")
    assert ended.weights == run_to_the_end(hit(scorer=True)).weights
    (note,) = ended.notes
    assert note.startswith("scorer rank 0 failed in score(): process ")
    assert f"was killed by SIGKILL; it wrote nothing to {tmp_path}/run/scorer-0.log; scorer is started again" in note


def test_p89_a_call_that_fails_once_is_repeated_and_the_step_is_whole(tmp_path: Path) -> None:
    ended = run_processes(hit(Planned("exception", "g0", "generate", 1, 1.0)), tmp_path / "run")
    assert ended.weights == run_to_the_end(hit()).weights
    assert ended.notes == ["g0 rank 0 failed in generate(): RuntimeError: an injected exception; trying again (1)"]
    assert [row["trained_samples"] for row in ended.rows] == [6] * STEPS


@pytest.mark.slow
def test_p89_a_call_that_always_fails_ends_the_run_with_its_first_cause(tmp_path: Path) -> None:
    setup = hit(*(Planned("exception", name, "generate", k, 1.0) for name in ("g0", "g1") for k in range(9)))
    ended = run_processes(setup, tmp_path / "run")
    assert type(ended.error) is WorkerError
    assert "failed in generate(): RuntimeError: an injected exception" in str(ended.error)
    assert all("trying again" in note for note in ended.notes)


# The bundled model ----------------------------------------------------------------------------------------------------

SMALL = (
    "steps=1",
    "data.prompts_per_step=4",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=6",
    "generator.threads=1",
    "trainer.threads=1",
    "schedule.assist=none",
    "schedule.ordered=true",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=0",
)


def train(folder: Path, *overrides: str, resume: bool = False) -> Path:
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True), resume=() if resume else None)
    return folder


@pytest.mark.slow
def test_p30_timesteps_that_are_stacked_give_the_same_gradient_in_fewer_calls(tmp_path: Path, warm: None) -> None:
    """Both micro-batches have samples of two prompts, all in one batch."""
    whole = ["schedule.prompts_per_microbatch=2", "trainer.batch_size=8", "algorithm.steps.type=all-but-last"]
    trainer = f"trainer.backend={HERE}/counting_trainer.py:Counting"
    gradients = {}
    for width, calls in ((1, 5), (2, 3), (0, 1)):
        folder = train(tmp_path / str(width), WARM, trainer, *whole, f"trainer.tsp={width}")
        assert int((folder / "calls-0").read_text()) == 2 * calls
        found = load_file(folder / "gradient-0.safetensors")
        gradients[width] = torch.cat([found[name].flatten().double() for name in sorted(found)])
    assert float(gradients[1].norm()) > 0
    for width in (2, 0):
        assert float((gradients[width] - gradients[1]).norm()) <= 1e-6 * float(gradients[1].norm())


@pytest.mark.slow
def test_p32_the_limit_of_epochs_holds_and_what_fills_no_step_sits_out(tmp_path: Path, warm: None) -> None:
    """10 prompts, 4 a step: 2 steps an epoch, whether samples may be stale or not."""
    prompts = tmp_path / "ten.txt"
    prompts.write_text("".join(f'a sign that says "{k}"\n' for k in range(10)))
    data = [f"data.prompts={prompts}", "epochs=2", "steps=null", "algorithm.samples_per_prompt=2"]
    for name, schedule in (("sync", "schedule.mode=naive"), ("async", "schedule.staleness=0.5")):
        rows = read_rows(train(tmp_path / name, WARM, *data, schedule) / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert [row["trained_samples"] for row in rows] == [8] * 4


def test_p95_a_run_that_goes_on_has_one_row_per_step_asks_nobody_and_lives_without_its_tracker(
    tmp_path: Path, warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: object, *_: object) -> None:
        assert self.family == socket.AF_UNIX, f"asked {address}"

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    few = [WARM, "data.prompts_per_step=1", "algorithm.samples_per_prompt=2", "observe.tensorboard=true"]
    folder = train(tmp_path / "run", *few, "steps=5", "checkpoint.every=3")
    (newest,) = (folder / "checkpoints").glob("step_000005")
    newest.rename(tmp_path / "away")
    tracked = folder / "tensorboard"
    tracked.rename(tmp_path / "events")
    tracked.touch()  # where its folder should be
    train(folder, *few, "steps=6", "checkpoint.every=3", resume=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    notes = (folder / "logs" / "driver.log").read_text()
    assert f"going on from {folder}/checkpoints/step_000003" in notes


def test_p93_what_waits_does_not_grow_with_the_steps_and_nothing_waits_at_the_end() -> None:
    peaks = []
    for steps in (20, 200):
        generators = [SimulatedGroup(f"g{k}", generate=1.0 + k, pull=0.2) for k in range(2)]
        trainer = SimulatedGroup("trainer", update=0.7, sync=0.5)
        simulate(simulated_config(steps=steps, schedule={"staleness": 0.5}), generators, trainer)
        peaks.append(trainer.store.peak)
        assert not trainer.store.items
    assert peaks[0] == peaks[1]


TINY = (
    "engine.name=process",
    "steps=200",
    "data.prompts_per_step=1",
    "algorithm.samples_per_prompt=2",
    "sampling.num_steps=2",
    "algorithm.steps.type=all-but-last",
)
Look = tuple[int, int, dict[str, tuple[float, int]]]
"""Steps that are done, files in the tensor store, and of every process its memory (MB) and its open files."""


@pytest.mark.slow
def test_p93_memory_open_files_and_what_waits_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    looks, over, before = list[Look](), Event(), stores()
    watcher = Thread(target=_watch, args=(tmp_path / "run", over, looks))
    watcher.start()
    try:
        train(tmp_path / "run", *TINY)
    finally:
        over.set()
        watcher.join()
    early, late = ([look for look in looks if a <= look[0] < b] for a, b in ((20, 110), (110, 199)))
    assert early
    assert late
    for name, (memory_mb, num_files) in early[0][2].items():
        assert late[-1][2][name][0] < memory_mb + 20
        assert late[-1][2][name][1] <= num_files
    assert max(look[1] for look in late) <= max(look[1] for look in early) + 2
    assert stores() == before


def stores() -> set[Path]:
    """Folders of this process's engines in shared memory."""
    return set(Path("/dev/shm").glob(f"digen-{os.getpid()}-*"))


def _watch(folder: Path, over: Event, looks: list[Look]) -> None:
    me = psutil.Process()
    others = set(me.children())
    metrics = folder / "metrics.jsonl"
    while not over.wait(0.05):
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in [me, *set(me.children()) - others]:
                if words := process.cmdline():  # a process that is just ending has none
                    found[words[-1]] = process.memory_info().rss / 2**20, process.num_fds()
            stored = len(list(Path("/dev/shm").glob(f"digen-{me.pid}-*/*.safetensors")))
            looks.append((steps, stored, found))


# Starting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        pytest.param("generator.devices=cuda:0-7", "wants 8 CUDA device(s); torch finds ", marks=pytest.mark.slow),
        ("generator.ranks=10000", "10001 ranks are wanted, but "),
        ("trainer.threads=10000", "10000 threads are wanted, "),
    ],
)
def test_p91_more_than_there_is_is_refused_at_once_with_wanted_and_available(
    wanted: str, said: str, tmp_path: Path
) -> None:
    words = ["run", "flowgrpo", "--engine", "process", "--run-dir", str(tmp_path / "run"), wanted]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2
    assert said in " ".join(ended.stderr.split())
    assert not list((tmp_path / "run").glob("logs/*-0.log")), "a worker was started"


@pytest.mark.slow
def test_p91_a_cluster_of_ray_that_has_no_such_devices_says_so_too(tmp_path: Path) -> None:
    words = ["run", "flowgrpo", "--engine", "ray", "--run-dir", str(tmp_path / "run")]
    wanted = ["generator.devices=cuda", "generator.ranks=8"]  # not in this process, which other tests connect to Ray
    ended = subprocess.run([sys.executable, "-m", "digen", *words, *wanted], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "generator: 8 rank(s) of " in ended.stderr
    assert "are wanted. Available in the cluster: " in " ".join(ended.stderr.split())


def test_p101_a_worker_that_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    async def imported() -> bool:
        spec = WorkerSpec("group", f"{HERE}/workers_for_engines.py:Worker", None, threads=1)
        async with ProcessEngine(tmp_path).open([spec]) as groups:
            return (await groups["group"].call("environment"))[0][1]

    assert not anyio.run(imported)
