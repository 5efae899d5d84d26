"""The generator `vllm-omni` on the real engine, on CPU: `make test-vllm` installs it and runs this folder.

One process can hold one engine at a time; starting one takes longer than all that is asked of it, so tests share it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from digen import credit, plugins
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import SyncError
from digen.presets import payload, resolve
from digen.types import MicroBatch, Prompt, Rollout

pytestmark = pytest.mark.vllm

PROMPTS = (Prompt(3, 'a sign that says "OPEN"'), Prompt(8, "a red cat"))
SMALL = (
    "algorithm.samples_per_prompt=4", "sampling.num_steps=6", "sampling.eval_num_steps=4", "sampling.guidance=3",
    "sampling.eval_guidance=3", "generator.batch_size=8", "data.prompts_per_step=2", "steps=3",
    "reward={jpeg-incompressibility: {}}", "schedule.tag=static(1)", "schedule.assist=none",
    "trainer.lora=null",
)  # fmt: skip
MODEL = "tiny-qwen-image"

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Loaded workers of one rank in this process; a generator's engine ends before the next one starts."""
    running: list[Any] = []

    def started(kind: plugins.Kind, backend: str, *settings: str, store: MemoryStore | None = None) -> Any:
        asked = [*SMALL, f"{kind.removesuffix('s')}.backend={backend}", *settings]
        config = resolve("flowgrpo", MODEL, None, asked, {})
        if backend == "vllm-omni":
            for old in running:
                old.close()
            running.clear()
        found: Any = plugins.find(kind, backend)
        worker = found({**payload(config), "reward": {}}, WorkerContext("w", 0, 1, "cpu", store or MemoryStore()))
        worker.load()
        running.append(worker)
        return worker

    yield started
    for worker in running:
        worker.close()


@pytest.fixture(scope="module")
def engine(start: Start) -> Any:
    return start("generators", "vllm-omni")


@pytest.fixture(scope="module")
def diffusers(start: Start, engine: Any) -> Any:
    return start("generators", "diffusers")


@pytest.fixture
def microbatch() -> MicroBatch:
    return MicroBatch(0, 0, PROMPTS, 4, 0)


def generated(worker: Any, microbatch: MicroBatch, version: int = 0) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    shard = worker.generate(microbatch, version, tuple(range(microbatch.num_samples)))
    store = worker.context.store
    return store.get(shard.trajectory), store.get(shard.media)["media"]


def test_images_without_noise_are_diffusers_own(engine: Any, diffusers: Any) -> None:
    texts, ids = [p.text for p in PROMPTS], [p.id for p in PROMPTS]
    (latents, media), (expected, pixels) = (worker.sampler.evaluate(texts, ids, 0) for worker in (engine, diffusers))
    assert (latents - expected).abs().max() <= 1e-4
    assert (media.int() - pixels.int()).abs().max() <= 1
    assert media.float().std() > 1


def test_trajectories_have_the_same_noise_steps_and_log_probs(
    engine: Any, diffusers: Any, microbatch: MicroBatch
) -> None:
    (ours, media), (theirs, pixels) = generated(engine, microbatch), generated(diffusers, microbatch)
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours["sigmas"], theirs["sigmas"])
    assert torch.equal(ours["steps"], theirs["steps"])
    assert (ours["next_latents"] - theirs["next_latents"]).abs().max() <= 1e-4
    assert (ours["log_probs"] - theirs["log_probs"]).abs().max() <= 1e-6
    assert (media.int() - pixels.int()).abs().max() <= 1


def test_replayed_log_probs_are_those_of_the_engine(start: Start, engine: Any, microbatch: MicroBatch) -> None:
    trainer = start("trainers", "local", store=engine.context.store)
    rows = tuple(range(microbatch.num_samples))
    rollout = Rollout(microbatch, 0, (engine.generate(microbatch, 0, rows),), "w")
    scored = credit.credit(rollout, [float(row % 3) for row in rows], trainer.config.algorithm)
    stats = trainer.accumulate(scored, 1, 8.0, True)
    assert stats["log_prob_gap"].high <= 1e-6
    assert stats["log_prob_gap"].count > 0


def test_eight_samples_are_batched(engine: Any, microbatch: MicroBatch) -> None:
    before = engine.engine.call("digen_passes")["passes"]
    generated(engine, microbatch)
    together = engine.engine.call("digen_passes")["passes"] - before
    for row in range(8):
        engine.generate(microbatch, 0, (row,))
    alone = engine.engine.call("digen_passes")["passes"] - before - together
    assert (alone, together <= 2) == (8, True)


def test_new_weights_change_the_image_and_the_old_ones_bring_it_back(
    start: Start, engine: Any, microbatch: MicroBatch
) -> None:
    trainer = start("trainers", "local", "trainer.learning_rate=3e-2", store=engine.context.store)
    first = generated(engine, microbatch)[1]
    published = trainer.push(0)
    assert engine.pull(published) == published.fingerprint
    assert torch.equal(generated(engine, microbatch)[1], first)
    original = {name: tensor.clone() for name, tensor in engine.host.items()}
    rollout = Rollout(microbatch, 0, (engine.generate(microbatch, 0, tuple(range(8))),), "w")
    trainer.accumulate(credit.credit(rollout, [float(r % 3) for r in range(8)], trainer.config.algorithm), 1, 8.0, True)
    trainer.optimizer_step(1.0)
    published = trainer.push(1)
    assert engine.pull(published) == published.fingerprint
    assert not torch.equal(generated(engine, microbatch, 1)[1], first)
    engine._give(original, 0)
    assert torch.equal(generated(engine, microbatch)[1], first)


def test_a_wrong_tensor_name_ends_the_engine(engine: Any, microbatch: MicroBatch) -> None:
    tensors = dict(engine.host)
    tensors["transformer_blocks.0.attn.to_z.weight"] = tensors.pop("transformer_blocks.0.attn.to_q.weight")
    with pytest.raises(SyncError, match="no place for 1 tensors"):
        engine._give(tensors, 2)
    engine.version = 2
    with pytest.raises(RuntimeError, match="the engine has ended"):
        engine.generate(microbatch, 2, (0,))


def test_adapters_are_bound_and_replayed(start: Start, microbatch: MicroBatch) -> None:
    """After an update they do something, the same on both sides; and the engine sleeps between the calls."""
    store, lora = MemoryStore(), ("trainer.lora={rank: 8, alpha: 16}", "trainer.learning_rate=3e-2")
    how = ("generator.offload_between_calls=true", "generator.attention=TORCH_SDPA")
    worker = start("generators", "vllm-omni", *how, *lora, store=store)
    trainer = start("trainers", "local", *lora, store=store)
    first = generated(worker, microbatch)[1]
    for version in (0, 1):
        rollout = Rollout(microbatch, version, (worker.generate(microbatch, version, tuple(range(8))),), "w")
        scored = credit.credit(rollout, [float(r % 3) for r in range(8)], trainer.config.algorithm)
        stats = trainer.accumulate(scored, 1, 8.0, True)
        assert stats["log_prob_gap"].high <= 1e-5
        trainer.optimizer_step(1.0)
        published = trainer.push(version + 1)
        assert worker.pull(published) == published.fingerprint
    assert not torch.equal(generated(worker, replace(microbatch), 2)[1], first)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [("SDPA", r"got 'SDPA'\. Did you mean 'TORCH_SDPA'\?"), ("FLASHINFER_ATTN", "(?i)flashinfer")],
)
def test_an_attention_kernel_that_the_engine_cannot_have_is_an_error(kernel: str, said: str, start: Start) -> None:
    with pytest.raises(Exception, match=said):
        start("generators", "vllm-omni", f"generator.attention={kernel}")


# --- whole runs, in processes of their own ---


def digen(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
    return subprocess.run([sys.executable, "-m", "digen", *words], capture_output=True, text=True, env=env, check=False)


def words(folder: Path, *settings: str) -> list[str]:
    small = ("observe.grid_every=0", "observe.tensorboard=false", "trainer.threads=1", "generator.threads=1")
    return [
        "run",
        "flowgrpo",
        "--model",
        MODEL,
        "--trainer",
        "fsdp",
        "--run-dir",
        str(folder),
        *SMALL,
        *small,
        *settings,
    ]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    return load_file(max(folder.glob("checkpoints/*/weights.safetensors")))


def trained(folder: Path, *settings: str) -> dict[str, torch.Tensor]:
    done = digen(*words(folder, *settings))
    assert done.returncode == 0, done.stderr[-4000:]
    return weights_of(folder)


def spans(folder: Path) -> list[dict[str, Any]]:
    """What was generated."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [s for line in lines if (s := json.loads(line)).get("kind") in ("generate", "assist")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of three steps on diffusers, with the old log-probs that are the engine's default."""
    folder = tmp_path_factory.mktemp("diffusers") / "run"
    return trained(folder, "--generator", "diffusers", "algorithm.old_log_prob=replay")


def assert_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_ends_with_the_weights_of_one_on_diffusers(
    replicas: int, expected: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    ours = trained(tmp_path / "run", "--generator", "vllm-omni", f"generator.replicas={replicas}")
    assert_same(ours, expected)
    assert {(s["step"], s["version"]) for s in spans(tmp_path / "run")} == {(0, 0), (1, 1), (2, 2)}


def test_a_run_with_stale_samples_ends_with_the_weights_of_one_on_diffusers(tmp_path: Path) -> None:
    """One generator makes two micro-batches of every step, the first one under the weights of the step before."""
    asked = ("schedule.staleness=0.5", "schedule.tag=none")
    found = {name: trained(tmp_path / name, "--generator", name, *asked) for name in ("vllm-omni", "diffusers")}
    assert_same(found["vllm-omni"], found["diffusers"])
    for name in found:
        made = sorted((s["step"], s["index"], s["version"]) for s in spans(tmp_path / name))
        assert made == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 0, 1), (2, 1, 2)]
    rows = [json.loads(line) for line in (tmp_path / "vllm-omni" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["log_prob_gap/max"] for row in rows if row["log_prob_gap/max"] is not None) <= 1e-5
