"""What all torch trainers share: learning rates, optimizers, the average of the weights, stacking by free memory."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen import presets
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.stacking import MARGIN, Stacking
from digen.backends.training.fsdp import FsdpTrainer
from digen.backends.training.local import LocalTrainer
from digen.backends.training.options import Ema, learning_rate
from digen.config import EmaConfig, TrainerConfig
from digen.engines.store import MemoryStore
from digen.errors import ConfigError, DivergedError
from digen.observe.files import read_rows
from digen.run import run
from digen.trained import EMA, WEIGHTS
from digen.weights.state import trainable

SMALL = (
    "engine.name=inline",
    "steps=2",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=3",
    "sampling.num_steps=4",
    "schedule.ordered=true",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=0",
)


def start(folder: Path, *overrides: str) -> Path:
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True))
    return folder


def newest(folder: Path, name: str = WEIGHTS) -> dict[str, torch.Tensor]:
    return load_file(max(folder.glob("checkpoints/step_*")) / name)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainable(trainer.model.transformer).items()}


def step(trainer: Any, seed: float) -> Any:
    """One optimizer step on made-up gradients: random ones, or all of them not finite."""
    generator = torch.Generator().manual_seed(int(seed) if math.isfinite(seed) else 0)
    for p in trainable(trainer.model.transformer).values():
        made = torch.randn(p.shape, generator=generator) if math.isfinite(seed) else torch.full(p.shape, seed)
        p.grad = trainer.part(made, p)
    return trainer.optimizer_step(1.0)


# --- learning rate ---


def rates(num_steps: int, **options: Any) -> list[float]:
    trainer = TrainerConfig(learning_rate=0.2, **options)
    return [learning_rate(trainer, k, num_steps) for k in range(num_steps)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warm", [0, 1, 5])
def test_the_rates_are_those_of_torchs_own_schedulers(kind: str, warm: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.2)
    rest = 17 - warm
    after: Any = {
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, rest),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, rest),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rest),
    }
    expected = []
    for length, make in (
        (warm, lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, 1.0, max(warm - 1, 1))),
        (rest, after[kind]),
    ):
        if length == 0:
            continue
        optimizer.param_groups[0].pop("initial_lr", None)
        optimizer.param_groups[0]["lr"] = 0.2
        scheduler = make()
        for _ in range(length):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates(17, lr_schedule=kind, warmup_steps=warm) == pytest.approx(expected, rel=1e-9)


def test_the_first_step_and_the_last_both_learn_something() -> None:
    for kind in ("linear", "cosine"):
        got = rates(10, lr_schedule=kind, warmup_steps=3)
        assert got[3] == max(got) == 0.2
        assert got[0] > 0
        assert 0 < got[-1] < 0.2 / 5


def test_a_run_that_ends_within_its_warm_up_only_warms_up() -> None:
    assert rates(3, lr_schedule="cosine", warmup_steps=5) == pytest.approx([0.04, 0.08, 0.12])


def test_a_rate_that_falls_needs_to_know_until_when() -> None:
    with pytest.raises(ValueError, match="lr_schedule=cosine needs the number of global steps"):
        learning_rate(TrainerConfig(lr_schedule="cosine"), 0, None)


def test_the_reported_rate_is_the_one_used_and_goes_on_at_steps_that_are_not_applied(
    make_config: Any, make_worker: Any
) -> None:
    options = ["trainer.lr_schedule=linear", "trainer.optimizer=sgd", "trainer.weight_decay=0"]
    trainer = make_worker(LocalTrainer, make_config(*options, "trainer.learning_rate=0.3", "trainer.max_grad_norm=0.5"))
    first, bad, last = step(trainer, 1), step(trainer, math.nan), step(trainer, 3)
    assert [r.learning_rate for r in (first, bad, last)] == pytest.approx([0.3, 0.2, 0.1])
    assert [r.applied for r in (first, bad, last)] == [True, False, True]
    for report in (first, last):
        assert report.weight_delta == pytest.approx(0.5 * report.learning_rate, rel=1e-4)  # clipped to norm 0.5


def test_where_only_epochs_are_set_the_workers_know_the_number_of_steps(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a sign that says "A"\na sign that says "B"\na sign that says "C"\na sign that says "D"\n')
    limits = ["steps=null", "epochs=2", f"data.prompts={prompts}"]
    folder = start(tmp_path / "run", *limits, "trainer.lr_schedule=linear", "trainer.learning_rate=4e-4")
    got = [row["learning_rate"] for row in read_rows(folder / "metrics.jsonl")]
    assert got == pytest.approx([4e-4, 3e-4, 2e-4, 1e-4])
    assert presets.load(folder / "config.yaml").steps is None


# --- optimizer ---


@pytest.mark.parametrize(
    ("backend", "ranks", "package"),
    [("local", 1, "bitsandbytes"), ("fsdp", 2, "torchao")],
)
def test_a_missing_package_for_8_bit_moments_is_named_before_anything_is_loaded(
    backend: str, ranks: int, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "find_spec", lambda name: None)
    overrides = [f"trainer.backend={backend}", f"trainer.ranks={ranks}", "trainer.optimizer=adamw-8bit"]
    with pytest.raises(ConfigError, match=rf"needs {package} .*backend={backend}.*digen\[8bit\].*adamw, sgd"):
        presets.resolve("flowgrpo", "glyph", None, overrides, {})


def test_8_bit_moments_and_float64_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"adamw-8bit needs .*dtype=float32 or bfloat16, got float64"):
        presets.resolve("flowgrpo", "glyph", None, ["trainer.optimizer=adamw-8bit", "trainer.dtype=float64"], {})


def test_8_bit_moments_step_almost_as_whole_ones(make_config: Any, make_worker: Any) -> None:
    pytest.importorskip("bitsandbytes", reason="extra 8bit is not installed")
    moved = {}
    for kind in ("adamw", "adamw-8bit"):
        trainer = make_worker(LocalTrainer, make_config(f"trainer.optimizer={kind}", "trainer.lr_schedule=cosine"))
        before = weights(trainer)
        for seed in (1, 2):
            assert step(trainer, seed).applied
        moved[kind] = torch.cat([(w - before[n]).flatten() for n, w in weights(trainer).items()])
    assert any(
        v.dtype == torch.uint8 for s in trainer.optimizer.state.values() for v in s.values() if hasattr(v, "dtype")
    )
    assert (moved["adamw-8bit"] - moved["adamw"]).norm() < 0.05 * moved["adamw"].norm()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options",
    [
        ["trainer.optimizer=sgd", "trainer.max_grad_norm=null"],
        ["trainer.lr_schedule=cosine", "trainer.warmup_steps=2", "trainer.ema={decay: 0.5}"],
        ["trainer.lora={rank: 4}", "trainer.dtype=bfloat16", "trainer.ema={}"],
    ],
)
def test_a_gradient_that_is_not_finite_is_never_applied_whatever_is_set(
    options: list[str], value: float, make_config: Any, make_worker: Any
) -> None:
    trainer = make_worker(LocalTrainer, make_config(*options))
    step(trainer, 1)
    before, average = weights(trainer), dict(trainer.ema.parts) if trainer.ema else {}
    report = step(trainer, value)
    assert not report.finite
    assert not report.applied
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    assert all(bool(torch.isfinite(w).all()) for w in average.values())
    assert step(trainer, 2).applied
    assert all(bool(torch.isfinite(w).all()) for w in weights(trainer).values())


def test_a_run_that_diverges_leaves_its_last_finite_weights_without_being_told_to_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wild = ["trainer.optimizer=sgd", "trainer.learning_rate=1e30", "trainer.max_bad_steps=2", "steps=9"]
    with pytest.raises(DivergedError, match=r"max_bad_steps=2"):
        start(folder, *wild)
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step_applied"] for row in rows[-2:]] == [0, 0]
    assert max(folder.glob("checkpoints/step_*")).name == f"step_{len(rows):06d}"
    assert all(bool(w.isfinite().all()) for w in newest(folder).values())


# --- average ---


def test_the_average_is_that_of_its_formula_in_float64() -> None:
    values = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0], [2.0, 2.0]])
    ema = Ema(EmaConfig(decay=0.6, warmup_steps=4), {"w": values[0]})
    expected = values[0].double()
    for t in range(3):
        ema.update({"w": values[t + 1]}, t)
        keep = min(0.6, (1 + t) / (4 + t))
        expected = keep * expected + (1 - keep) * values[t + 1].double()
        assert keep == [0.25, 0.4, 0.5][t]
    torch.testing.assert_close(ema.parts["w"].double(), expected, rtol=1e-6, atol=0)


def test_the_average_of_bfloat16_weights_is_kept_in_float32() -> None:
    ema = Ema(EmaConfig(decay=0.999, warmup_steps=1), {"w": torch.ones(3, dtype=torch.bfloat16)})
    for t in range(10):
        ema.update({"w": torch.full((3,), 1.0078125, dtype=torch.bfloat16)}, t)
    assert ema.parts["w"].dtype == torch.float32
    assert bool((ema.parts["w"] > 1).all())  # steps this small are lost in bfloat16


def test_p82_training_is_bit_equal_with_and_without_an_average_that_is_saved_at_every_step(tmp_path: Path) -> None:
    plain = start(tmp_path / "plain")
    averaged = start(tmp_path / "averaged", "trainer.ema={decay: 0.9, warmup_steps: 1}", "checkpoint.every=1")
    live = newest(averaged)
    assert all(torch.equal(live[name], tensor) for name, tensor in newest(plain).items())
    rows = [read_rows(folder / "metrics.jsonl") for folder in (plain, averaged)]
    for name in ("reward/mean", "grad_norm", "weight_delta"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    ema = newest(averaged, EMA)
    assert ema.keys() == live.keys()
    assert any(not torch.equal(ema[name], live[name]) for name in ema)
    assert not list(plain.glob("checkpoints/*/ema"))


def test_an_average_of_sharded_weights_is_that_of_whole_ones(
    make_config: Any, make_worker: Any, tmp_path: Path
) -> None:
    config = make_config("trainer.ema={decay: 0.9, warmup_steps: 2}", "trainer.lr_schedule=cosine")
    saved = {}
    for kind in (LocalTrainer, FsdpTrainer):
        trainer = make_worker(kind, config)
        for seed in (1, 2):
            step(trainer, seed)
        trainer.save(tmp_path / kind.__name__)
        saved[kind] = load_file(tmp_path / kind.__name__ / EMA)
    torch.distributed.destroy_process_group()
    whole, sharded = saved.values()
    assert whole.keys() == sharded.keys()
    assert max(float((whole[n] - sharded[n]).abs().max()) for n in whole) <= 1e-7


def test_p43_without_a_gpu_ranks_talk_over_gloo_even_where_nccl_was_compiled_in(
    make_config: Any, make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    make_worker(FsdpTrainer, make_config())
    assert torch.distributed.get_backend() == "gloo"
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["fsdp", "deepspeed"])
def test_p43_two_ranks_without_a_gpu_have_the_same_rates_and_the_same_average_as_one_process(
    trainer: str, tmp_path: Path, warm: None
) -> None:
    if trainer == "deepspeed":
        pytest.importorskip("deepspeed", reason="extra deepspeed is not installed")
    options = [
        "trainer.optimizer=sgd",
        "trainer.learning_rate=0.3",
        "trainer.weight_decay=0",
        "trainer.lr_schedule=linear",
        "trainer.ema={decay: 0.9, warmup_steps: 2}",
        "trainer.batch_size=1",
        "generator.batch_size=1",
        "trainer.tsp=auto",
    ]
    more = [f"engine.name={Path(__file__).parent}/warm.py:WarmEngine", f"trainer.backend={trainer}", "trainer.ranks=2"]
    more += ["trainer.zero_stage=3"] if trainer == "deepspeed" else []
    folders = start(tmp_path / "local", *options), start(tmp_path / "sharded", *options, *more)
    rows = [[row["learning_rate"] for row in read_rows(f / "metrics.jsonl")] for f in folders]
    assert rows[0] == rows[1] == pytest.approx([0.3, 0.15])
    for name in (WEIGHTS, EMA):
        a, b = (newest(folder, name) for folder in folders)
        assert a.keys() == b.keys()
        assert max(float((a[n] - b[n]).abs().max()) for n in a) <= 1e-6
    assert max(float((a[n] - newest(folders[0])[n]).abs().max()) for n in a) > 1e-4


# --- stacking by free memory ---


class MeasuredRows:
    """Memory of a device on which a pass takes 100 bytes a row and 50 more, and which has `total` bytes."""

    def __init__(self, total: int) -> None:
        self.total, self.most = total, 0

    def start(self) -> None:
        self.most = 0

    def used(self) -> int:
        return 100 * self.most + 50

    def free(self) -> int:
        return self.total


@pytest.fixture
def stacked(make_config: Any, make_worker: Any, make_microbatch: Any, make_scored: Any) -> Any:
    """(rows of each pass, gradient) of the same update twice under version 0 and once under version 1."""
    config, store = make_config("algorithm.steps.type=all-but-last"), MemoryStore()
    scored = make_scored(config, make_worker(DiffusersGenerator, config, store, "generator"), make_microbatch(config))
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    memory: MeasuredRows | None = None
    passes: list[list[int]] = []

    def seen(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        passes[-1].append(len(inputs["hidden_states"]))
        if memory:
            memory.most = max(memory.most, passes[-1][-1])

    def make(total: int | None, tsp: Any = "auto") -> tuple[list[list[int]], list[torch.Tensor]]:
        nonlocal memory
        memory = MeasuredRows(total) if total else None
        trainer.stacking = Stacking(memory)
        gradients = []
        for version in (0, 0, 1):
            trainer.version = version
            passes.append([])
            trainer.accumulate(scored, tsp, 40.0, last=True)
            gradients.append(torch.cat([g.flatten() for g in trainer.gradients().values()]).double())
            trainer.optimizer.zero_grad()
        return passes[-3:], gradients

    trainer.model.transformer.register_forward_pre_hook(seen, with_kwargs=True)
    return make


def test_on_a_cpu_auto_stacks_all_trained_timesteps(stacked: Any) -> None:
    assert stacked(None)[0] == [[20, 20]] * 3  # 4 samples x 5 timesteps, for each of two prompts


def test_where_memory_is_measured_a_pass_gets_as_many_timesteps_as_fit(stacked: Any) -> None:
    plain = stacked(None, 1)[1][0]
    per_row = (100 * 4 + 50) / 4
    for rows_that_fit, passes in ((1, [4] * 10), (4, [4] * 10), (9, [8, 8, 4] * 2), (100, [20, 20])):
        got, gradients = stacked(math.ceil(rows_that_fit * per_row / (1 - MARGIN)))
        assert got == [[4] * 10, [4] * 10, passes]
        assert all((gradient - plain).norm() <= 1e-6 * plain.norm() for gradient in gradients)
