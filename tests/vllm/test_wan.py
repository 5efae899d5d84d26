"""Wan2.1 on the real engine, on CPU: `make test-vllm` runs this file.

What holds for any model is tested in `test_engine.py`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from digen import plugins
from digen.cli import app
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import SyncError
from digen.presets import payload, resolve
from digen.run import run
from digen.types import MicroBatch, Prompt

pytestmark = pytest.mark.vllm

MODEL = "tiny-wan"
PROMPTS = (Prompt(3, "a boat in a storm"), Prompt(8, "a red cat"))
SMALL = (
    "algorithm.samples_per_prompt=4", "sampling.num_steps=4", "sampling.eval_num_steps=4", "data.prompts_per_step=2",
    "steps=2", "schedule.tag=static(1)", "schedule.assist=none", "trainer.lora=null",
)  # fmt: skip
LINEAR = [f"{layer}.{part}" for layer in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")]
ADAPTERS = json.dumps({"rank": 4, "alpha": 8, "target_modules": [*LINEAR, "ffn.net.0.proj", "ffn.net.2"]})


def by_place(media: Any, prompts: list[str], metadata: list[Any]) -> list[float]:
    """A reward that looks at nothing."""
    return [float(place % 5) for place in range(len(prompts))]


def generator(backend: str) -> Any:
    """A loaded one of one rank, in this process."""
    asked = [*SMALL, f"generator.backend={backend}", "generator.batch_size=8"]
    config = resolve("dancegrpo", MODEL, None, asked, {})
    kind: Any = plugins.find("generators", backend)
    made = kind({**payload(config), "reward": {}}, WorkerContext("w", 0, 1, "cpu", MemoryStore()))
    made.load()
    return made


@pytest.fixture
def engine() -> Iterator[Any]:
    made = generator("vllm-omni")
    yield made
    made.close()


def test_videos_are_diffusers_own_and_a_wrong_name_ends_the_engine(engine: Any) -> None:
    """Frames without noise; latents and log-probs with it."""
    diffusers, model = generator("diffusers"), engine.config.model
    texts, ids = [p.text for p in PROMPTS], [p.id for p in PROMPTS]
    (latents, media), (expected, pixels) = (each.sampler.evaluate(texts, ids, 0) for each in (engine, diffusers))
    assert (media.dtype, media.shape) == (torch.uint8, (2, model.num_frames, model.height, model.width, 3))
    assert model.num_frames > 1
    assert (latents - expected).abs().max() <= 1e-4
    assert (media.int() - pixels.int()).abs().max() <= 1
    assert media.float().std() > 1
    microbatch = MicroBatch(0, 0, PROMPTS, 4, 0)
    (ours, _), (theirs, _) = (each.sampler.rollout(microbatch, range(8)) for each in (engine, diffusers))
    assert (ours["next_latents"] - theirs["next_latents"]).abs().max() <= 1e-4
    assert (ours["log_probs"] - theirs["log_probs"]).abs().max() <= 1e-6
    tensors = dict(diffusers.model.transformer.named_parameters())
    tensors["output_scale_shift_prepare.scale_shift_table"] = tensors.pop("scale_shift_table")
    with pytest.raises(SyncError, match=r"no place for 1 tensors: output_scale_shift_prepare\.scale_shift_table"):
        engine._give(tensors, 1)


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.lora=null",),
        (f"trainer.lora={ADAPTERS}", "trainer.learning_rate=0.01", "generator.offload_between_calls=true"),
    ],
    ids=["full", "adapters"],
)
def test_both_backends_pass_the_check_before_and_after_an_update(settings: tuple[str, ...], tmp_path: Path) -> None:
    """Full weights; and adapters of all linear layers, on an engine that sleeps between the calls."""
    words = ["check-backends", *settings, "sampling.num_steps=4", "sampling.eval_num_steps=4", "--model", MODEL]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "both.png"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["differences"]
    replayed = {(row["weights"], row["step"]): row["found"] for row in found if row["what"] == "replayed log-prob"}
    assert replayed.keys() == {(weights, step) for weights in ("loaded", "synced") for step in range(3)}
    assert max(replayed.values()) <= 1e-6
    assert (tmp_path / "both.png").is_file()


def test_a_run_ends_with_the_weights_of_one_on_diffusers(tmp_path: Path) -> None:
    """Plain SGD and rewards by place: neither makes more of a rounding error than it is."""
    reward = f"reward={json.dumps({f'{__file__}:by_place': {}})}"
    shared = [*SMALL, reward, "trainer.optimizer=sgd", "trainer.learning_rate=0.3", "observe.tensorboard=false"]
    folders = [tmp_path / "ours", tmp_path / "theirs"]
    words = ["run", "dancegrpo", "--model", MODEL, "--generator", "vllm-omni", "--trainer", "fsdp", *shared]
    words += ["--run-dir", str(folders[0]), "trainer.threads=1", "generator.threads=1"]
    done = subprocess.run([sys.executable, "-m", "digen", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    alone = ["generator.backend=diffusers", "trainer.backend=local", "engine.name=inline"]
    asked = [*shared, *alone, "algorithm.old_log_prob=replay", f"run_dir={folders[1]}"]
    run(resolve("dancegrpo", MODEL, None, asked, {}), console=Console(quiet=True))
    ours, theirs = (load_file(folder / "checkpoints/step_000002/weights.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
    rows = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    assert max(row["log_prob_gap/max"] for row in rows) <= 1e-6
    moved = sum(row["weight_delta"] for row in rows)
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs) ** 0.5
    assert apart <= 1e-3 * moved
