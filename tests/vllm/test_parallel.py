"""The generator `vllm-omni` on the real engine, whose workers are processes: two that share a model, and two engines.

`make test-vllm` runs it, on CPU: gloo between the processes, each of which stands for a device.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from digen import credit, plugins
from digen.backends.generation.vllm_engine import EngineError
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import SyncError
from digen.presets import payload, resolve
from digen.types import MicroBatch, Prompt, Rollout

pytestmark = pytest.mark.vllm

PROMPTS = (Prompt(3, 'a sign that says "OPEN"'), Prompt(8, "a red cat"))
SMALL = (
    "algorithm.samples_per_prompt=4", "sampling.num_steps=6", "sampling.eval_num_steps=4", "sampling.guidance=3",
    "sampling.eval_guidance=3", "generator.batch_size=8", "steps=3", "reward={jpeg-incompressibility: {}}",
    "schedule.tag=static(1)", "schedule.assist=none", "trainer.lora=null",
)  # fmt: skip
APART = f"{Path(__file__).parent}/apart.py:Generator"

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Loaded workers in this process; the processes of a generator's engine end before the next one starts."""
    running: list[Any] = []

    def started(kind: plugins.Kind, backend: str, *settings: str, store: MemoryStore | None = None) -> Any:
        asked = [*SMALL, f"{kind.removesuffix('s')}.backend={backend}", *settings]
        config = resolve("flowgrpo", "tiny-qwen-image", None, asked, {})
        if backend == "vllm-omni":
            for old in running:
                old.close()
            running.clear()
        found: Any = plugins.find(kind, backend)
        worker = found({**payload(config), "reward": {}}, WorkerContext("w", 0, 1, "cpu", store or MemoryStore()))
        worker.load()
        running.append(worker)
        return worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIGEN_VLLM_CPU_DEVICES", "2")
        yield started
    for worker in running:
        worker.close()


@pytest.fixture(scope="module")
def engine(start: Start) -> Any:
    worker = start("generators", "vllm-omni", "generator.tensor_parallel=2")
    assert len(engine_processes(psutil.Process())) == 2
    return worker


@pytest.fixture
def microbatch() -> MicroBatch:
    return MicroBatch(0, 0, PROMPTS, 4, 0)


def generated(worker: Any, microbatch: MicroBatch, version: int = 0) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    shard = worker.generate(microbatch, version, tuple(range(microbatch.num_samples)))
    store = worker.context.store
    return store.get(shard.trajectory), store.get(shard.media)["media"]


def trained_on(trainer: Any, worker: Any, microbatch: MicroBatch, version: int) -> float:
    """Accumulate the gradients of a micro-batch that the worker generates; the largest log-prob gap."""
    rows = tuple(range(microbatch.num_samples))
    rollout = Rollout(microbatch, version, (worker.generate(microbatch, version, rows),), "w")
    scored = credit.credit(rollout, [float(row % 3) for row in rows], trainer.config.algorithm)
    stats = trainer.accumulate(scored, 1, 8.0, True)
    assert stats["log_prob_gap"].count > 0
    return float(stats["log_prob_gap"].high)


def engine_processes(parent: psutil.Process) -> list[psutil.Process]:
    """Of the engine that a process has."""
    return [child for child in parent.children(recursive=True) if "DiffusionWorker" in " ".join(child.cmdline())]


# --- one engine, two processes ---


def test_a_model_that_two_processes_share_samples_as_diffusers_does(
    start: Start, engine: Any, microbatch: MicroBatch
) -> None:
    texts, ids = [p.text for p in PROMPTS], [p.id for p in PROMPTS]
    diffusers = start("generators", "diffusers")
    media, pixels = (worker.sampler.evaluate(texts, ids, 0)[1] for worker in (engine, diffusers))
    assert (media.int() - pixels.int()).abs().max() <= 1
    assert media.float().std() > 1
    (ours, _), (theirs, _) = generated(engine, microbatch), generated(diffusers, microbatch)
    assert torch.equal(ours["steps"], theirs["steps"])
    assert (ours["log_probs"] - theirs["log_probs"]).abs().max() <= 5e-6
    assert engine.engine.call("digen_passes")["passes"] < 10  # of ten samples


def test_new_weights_reach_both_processes_and_the_old_ones_bring_the_image_back(
    start: Start, engine: Any, microbatch: MicroBatch
) -> None:
    trainer = start("trainers", "local", "trainer.learning_rate=3e-2", store=engine.context.store)
    first = generated(engine, microbatch)[1]
    published = trainer.push(0)
    assert engine.pull(published) == published.fingerprint
    assert torch.equal(generated(engine, microbatch)[1], first)
    original = {name: tensor.clone() for name, tensor in engine.host.items()}
    assert trained_on(trainer, engine, microbatch, 0) <= 5e-6
    trainer.optimizer_step(1.0)
    published = trainer.push(1)
    assert engine.pull(published) == published.fingerprint
    assert not torch.equal(generated(engine, microbatch, 1)[1], first)
    assert trained_on(trainer, engine, microbatch, 1) <= 1e-4  # a process with old weights would be far off
    engine._give(original, 0)
    assert torch.equal(generated(engine, microbatch)[1], first)


def test_an_engine_of_which_one_process_is_killed_is_lost(engine: Any, microbatch: MicroBatch) -> None:
    told = threading.Event()
    engine.engine._lost = lambda why: told.set()
    processes = engine_processes(psutil.Process())
    processes[1].kill()
    with pytest.raises(EngineError):
        engine.generate(microbatch, 0, (0,))
    assert told.wait(60)
    assert not psutil.wait_procs(processes, timeout=60)[1]


def test_adapters_are_divided_too_and_both_processes_sleep_between_calls(start: Start, microbatch: MicroBatch) -> None:
    store, lora = MemoryStore(), ("trainer.lora={rank: 8, alpha: 16}", "trainer.learning_rate=3e-2")
    rests = ("generator.tensor_parallel=2", "generator.offload_between_calls=true")
    worker = start("generators", "vllm-omni", *rests, *lora, store=store)
    trainer = start("trainers", "local", *lora, store=store)
    first = generated(worker, microbatch)[1]
    for version in (0, 1):
        assert trained_on(trainer, worker, microbatch, version) <= 1e-5
        trainer.optimizer_step(1.0)
        published = trainer.push(version + 1)
        assert worker.pull(published) == published.fingerprint
    assert not torch.equal(generated(worker, microbatch, 2)[1], first)
    with pytest.raises(SyncError, match=r"(?s)rank 0: .*rank 1: "):
        worker._give(dict(list(worker.host.items())[:2]) | {"no.such.lora_A.default.weight": torch.zeros(8, 4)}, 3)


# --- two engines in a run ---


def words(folder: Path, generator: str, *settings: str) -> list[str]:
    small = ("observe.grid_every=0", "observe.tensorboard=false", "trainer.threads=1", "generator.threads=1")
    run = ["run", "flowgrpo", "--model", "tiny-qwen-image", "--trainer", "fsdp", "--generator", generator]
    return [sys.executable, "-m", "digen", *run, "--run-dir", str(folder), *SMALL, *small, *settings]


def spans(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [span for line in lines if (span := json.loads(line)).get("kind")]


def environment() -> dict[str, str]:
    """This process's, without what is a setting of the test's platform alone; of `digen` it would be an unknown one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DIGEN_")}


class Watch:
    """A run in another process, of which events are waited for."""

    def __init__(self, folder: Path, *asked: str) -> None:
        self.folder, self.said = folder, folder.with_suffix(".log")
        with self.said.open("w") as said:
            self.process = subprocess.Popen(asked, stdout=said, stderr=said, env=environment())

    def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.poll() is None, self.said.read_text()
            time.sleep(0.02)

    def loads(self, name: str) -> list[float]:
        """When a group had loaded."""
        return [s["end"] for s in spans(self.folder) if s["kind"] == "load" and s["worker"] == name]

    def rank(self, name: str) -> psutil.Process:
        """The first process of a group: the one that writes its log."""
        log = self.folder.absolute() / "logs" / f"{name}-0.log"
        children = psutil.Process(self.process.pid).children()
        return next(p for p in children if Path(f"/proc/{p.pid}/fd/1").readlink() == log)


def test_a_killed_engine_and_a_killed_rank_are_rebuilt_and_cost_no_sample(tmp_path: Path) -> None:
    """Both in the middle of a micro-batch; the trainer stands still until both are there again."""
    prompts = "data.prompts_per_step=6"
    asked = words(tmp_path / "diffusers", "diffusers", prompts, "algorithm.old_log_prob=replay")
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    folder = tmp_path / "engines"
    run, names = Watch(folder, *words(folder, APART, prompts, "generator.replicas=2")), ("generator-0", "generator-1")
    try:
        run.until(lambda: all(run.loads(name) for name in names))
        workers = [engine_processes(run.rank(name)) for name in names]
        assert [len(found) for found in workers] == [1, 1]
        for (worker,) in workers:
            worker.suspend()
        run.until(lambda: any(span["kind"] == "assist" for span in spans(folder)))  # generators have work for long
        trainer = run.rank("trainer")
        trainer.suspend()
        workers[0][0].kill()
        run.rank(names[1]).kill()
        run.until(lambda: all(len(run.loads(name)) == 2 for name in names))
        trainer.resume()
        assert run.process.wait() == 0, run.said.read_text()
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs([worker for (worker,) in workers], timeout=10)[1]
    said = " ".join(run.said.read_text().split())
    for name in names:
        assert f"{name} is started again" in said
        assert max(s["step"] for s in spans(folder) if s["kind"] == "generate" and s["worker"] == name) > 0
    made = sorted((s["step"], s["index"], s["version"]) for s in spans(folder) if s["kind"] in ("generate", "assist"))
    assert made == [(step, index, step) for step in range(3) for index in range(6)]
    ours, theirs = (load_file(max(f.glob("checkpoints/*/*.safetensors"))) for f in (folder, tmp_path / "diffusers"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
