"""What a loss calls the base in a run that begins with the weights of another: those, be they adapters or all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.copies import START
from digen.backends.training.local import LocalTrainer
from digen.engines.store import MemoryStore
from digen.errors import ConfigError
from digen.observe.files import read_rows
from digen.presets import resolve
from digen.run import run
from digen.weights.state import trainable

HERE = Path(__file__).parent
LORA = "trainer.lora={rank: 4}"
KINDS = pytest.mark.parametrize("lora", [[LORA], []], ids=["adapters", "full weights"])
SMALL = (
    "steps=2",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=5",
    "engine.name=inline",
    "schedule.assist=none",
    "trainer.optimizer=sgd",
    "trainer.weight_decay=0",
    f'reward={{"{__file__}:left_half": {{}}}}',
    "observe.tensorboard=false",
    "observe.grid_every=0",
)


def left_half(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    return [round(float(image[:, :16].mean()) / 255, 2) for image in media]


def train(folder: Path, *overrides: str, algorithm: str = "flowgrpo", resume: bool = False) -> list[dict[str, Any]]:
    config = resolve(algorithm, "glyph", None, [*SMALL, *overrides, f"run_dir={folder}"], {})
    run(config, console=Console(quiet=True), resume=() if resume else None)
    return [dict(row) for row in read_rows(folder / "metrics.jsonl")]


def weights(worker: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable(worker.model.transformer).items()}


@KINDS
def test_a_kl_to_the_base_is_zero_at_the_first_step_then_has_a_gradient_and_leaves_the_weights_alone(
    lora: list[str], make_worker: Any, make_microbatch: Any, make_scored: Any, tmp_path: Path
) -> None:
    """The starting weights are far from the model as it came: against that one the KL would begin far above 0."""
    keys = ["algorithm.loss.kl=1", f"checkpoint.init_from={tmp_path}", *lora]
    config, store = resolve("flowgrpo", "glyph", None, [*SMALL, *keys], {}), MemoryStore()
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    begun = {name: tensor * 1.01 + 0.02 * (".lora_B." in name) for name, tensor in weights(trainer).items()}
    save_file(begun, tmp_path / "weights.safetensors")
    for worker in (trainer, generator):
        worker.begin_from(tmp_path) if worker is trainer else worker.restore(tmp_path)
    scored = make_scored(config, generator, make_microbatch(config))
    passes: list[int] = []
    for transformer in filter(None, (trainer.model.transformer, trainer.base)):
        transformer.register_forward_pre_hook(lambda *_: passes.append(1))

    first = trainer.accumulate(scored, 0, 24.0, last=True)

    assert first["kl"].high <= 1e-9
    assert len(passes) == 2 * 2  # two groups, policy and base
    trainer.start, started = None if lora else trainer.start, trainer.start
    if lora:  # without any adapters
        assert trainer.accumulate(scored, 0, 24.0, last=True)["kl"].low > 1e-6
    trainer.start = started

    with torch.no_grad():
        for parameter in trainable(trainer.model.transformer).values():
            parameter.mul_(1.01)
    moved = weights(trainer)
    silent = type(scored)(scored.rollout, scored.rewards, (0.0,) * 8, scored.keep)
    trainer.optimizer.zero_grad()
    later = trainer.accumulate(silent, 0, 24.0, last=True)
    assert later["kl"].low > 1e-9
    assert all(torch.equal(moved[name], tensor) for name, tensor in weights(trainer).items())
    assert sum(float(gradient.norm()) for gradient in trainer.gradients().values()) > 0


@KINDS
def test_a_run_that_goes_on_compares_with_what_it_began_with_also_when_that_is_gone(
    lora: list[str], tmp_path: Path
) -> None:
    """Bit for bit, over a checkpoint of the middle."""
    first, keys = tmp_path / "first", ["algorithm.loss.kl=0.5", "trainer.learning_rate=0.1", *lora]
    train(first, "trainer.learning_rate=0.5", *lora)
    keys += [f"checkpoint.init_from={first}", "schedule.ordered=true", "checkpoint.every=2"]
    rows = train(tmp_path / "straight", *keys, "steps=4")
    shutil.copytree(tmp_path / "straight", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_000004")
    first.rename(tmp_path / "gone")
    again = train(tmp_path / "parts", *keys, "steps=4", resume=True)

    assert rows[0]["kl/mean"] <= 1e-9
    assert rows[1]["kl/mean"] > 1e-9
    assert [row["kl/mean"] for row in again] == [row["kl/mean"] for row in rows]
    ends = [
        load_file(tmp_path / name / "checkpoints/step_000004/weights.safetensors") for name in ("straight", "parts")
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    begun = load_file(tmp_path / "straight" / "checkpoints/step_000004" / START)
    kept = load_file(tmp_path / "gone" / "checkpoints/step_000002/weights.safetensors")
    assert all(torch.equal(begun[name], kept[name]) for name in begun)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["schedule.assist=both"], "schedule.assist=both: checkpoint.init_from with algorithm.loss.type=clipped"),
        (["trainer.backend=deepspeed", "trainer.zero_stage=3"], "needs trainer.zero_stage=1 or 2"),
    ],
)
def test_workers_that_would_not_have_the_starting_weights_are_refused(
    keys: list[str], words: str, tmp_path: Path
) -> None:
    start = ["algorithm.loss.kl=0.1", f"checkpoint.init_from={tmp_path}"]

    with pytest.raises(ConfigError, match=words):
        resolve("flowgrpo", "glyph", None, [*SMALL, *start, *keys], {})
    resolve("flowgrpo", "glyph", None, [*SMALL, *start, *keys, "algorithm.loss.kl=0"], {})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_on_sharded_ranks_the_base_is_the_starting_adapter_too(backend: str, tmp_path: Path, warm: None) -> None:
    rows = [LORA, "trainer.batch_size=1", "generator.batch_size=1"]
    train(tmp_path / "first", "trainer.learning_rate=0.5", *rows)
    ranks = [f"trainer.backend={backend}", f"engine.name={HERE}/warm.py:WarmEngine", "trainer.ranks=2"]
    keys = [*rows, "algorithm.loss.kl=0.5", "trainer.learning_rate=0.1", f"checkpoint.init_from={tmp_path / 'first'}"]

    local, sharded = train(tmp_path / "local", *keys), train(tmp_path / "sharded", *keys, *ranks)

    assert sharded[0]["kl/mean"] <= 1e-9
    assert sharded[1]["kl/mean"] == pytest.approx(local[1]["kl/mean"], rel=1e-2)
    assert sharded[1]["grad_norm"] == pytest.approx(local[1]["grad_norm"], rel=1e-3)
