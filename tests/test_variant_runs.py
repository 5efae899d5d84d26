"""Every variant of GRPO runs on the bundled model, in every schedule and with every trainer, and learns the same there.

Plain SGD and a reward that is rounded, as in test_equivalence: what is left is the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen.algos.losses import ClippedLoss, DivergenceLoss, GuardLoss, RatioLoss
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.engines.store import MemoryStore
from digen.observe.files import read_rows, read_spans
from digen.presets import resolve
from digen.run import run
from digen.schedule.share import Share
from digen.schedule.tag import Choice

HERE = Path(__file__).parent
LEARNING_RATE = {"grpo-guard": 0.02, "longcat": 0.05, "flowgrpo-fast": 0.05, "dr-grpo": 30}
"""Where gradients are larger than those of the others, or smaller: here they have the unit of the reward."""
VARIANTS = {
    "flowgrpo-fast": [],
    "mixgrpo": ["algorithm.steps.every=1"],
    "grpo-guard": [],
    "flow-dppo": ["steps=4", "trainer.updates_per_rollout=2", "algorithm.loss.limit=1e-7"],
    "dr-grpo": [],
    "longcat": [],
    "awm": ["algorithm.steps.type=random-fraction"],
    "diffusion-nft": ["steps=4", "trainer.updates_per_rollout=2", "algorithm.steps.type=random-fraction"],
    "dpo": ["steps=4", "trainer.updates_per_rollout=2", "algorithm.loss.beta=20"],
}
"""Variant and what it is run with; every one of them does something here that plain Flow-GRPO would not."""


Run = tuple[dict[str, torch.Tensor], list[dict[str, Any]]]
"""Final weights and the rows of metrics."""


def left_half(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """Brightness of the left half in steps of 0.01: one pixel that rounds the other way must not change a reward."""
    return [round(float(image[:, :16].mean()) / 255, 2) for image in media]


def settings(*overrides: str, algorithm: str) -> list[str]:
    return [
        "steps=3",
        "data.prompts_per_step=2",
        "algorithm.samples_per_prompt=4",
        "sampling.num_steps=7",
        "engine.name=inline",
        "schedule.mode=naive",
        "trainer.optimizer=sgd",
        f"trainer.learning_rate={LEARNING_RATE.get(algorithm, 0.3)}",
        "trainer.weight_decay=0",
        f'reward={{"{__file__}:left_half": {{}}}}',
        "observe.tensorboard=false",
        "observe.grid_every=0",
        *VARIANTS.get(algorithm, []),
        *overrides,
    ]


def train(algorithm: str, folder: Path, *overrides: str) -> Run:
    given = settings(f"run_dir={folder}", *overrides, algorithm=algorithm)
    run(resolve(algorithm, "glyph", None, given, {}), console=Console(quiet=True))
    weights = load_file(max(folder.glob("checkpoints/*/weights.safetensors")))
    return weights, [dict(row) for row in read_rows(folder / "metrics.jsonl")]


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) <= 1e-5


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The naive run of a variant in one process, made once."""
    return cache(lambda algorithm: train(algorithm, tmp_path_factory.mktemp(algorithm) / "naive"))


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_a_variant_learns_the_same_with_search_and_pipeline_as_without(
    algorithm: str, plain: Callable[[str], Run], tmp_path: Path
) -> None:
    expected, rows = plain(algorithm)
    pipeline = ["schedule.mode=pipelined", "schedule.tag=bts", "schedule.window=2", "schedule.staleness=0"]
    weights, others = train(algorithm, tmp_path / "pipelined", *pipeline, "trainer.tsp=0")

    assert_same(weights, expected)
    for row, other in zip(rows, others, strict=True):
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-12)
        assert row["step_applied"] == 1
        assert 1e-4 < row["weight_delta"] < 3
        assert row["reward/std"] > 0
    assert all(row["ratio/max_error"] <= 1e-6 for row in rows if "ratio/max_error" in row)  # P01: every on-policy step
    assert sum("ratio/max_error" in row for row in rows) == (len(rows) / (2 if len(rows) == 4 else 1))


def test_the_second_update_of_a_rollout_leaves_ratio_one_and_dppo_drops_rows_there_alone(
    plain: Callable[[str], Run],
) -> None:
    """P02: with one update a rollout the ratio is 1 and clips never act; with two, the second half differs."""
    _, rows = plain("flow-dppo")

    assert [row["ratio/high"] - row["ratio/low"] > 1e-5 for row in rows] == [False, True, False, True]
    assert [row["old_kl/mean"] > 1e-7 for row in rows] == [False, True, False, True]
    assert [row["clip_fraction/mean"] > 0 for row in rows] == [False, True, False, True]
    assert all(row["weight_delta"] > 0 for row in rows)


BACKENDS = {
    "fsdp": ["trainer.backend=fsdp", f"engine.name={HERE}/warm.py:WarmEngine"],
    "deepspeed": ["trainer.backend=deepspeed", "engine.name=process"],
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", [name for name in VARIANTS if name != "dpo"])  # on two ranks: below
def test_a_variant_learns_the_same_with_every_trainer(
    algorithm: str, backend: str, plain: Callable[[str], Run], tmp_path: Path, warm: None
) -> None:
    expected, _ = plain(algorithm)
    weights, rows = train(algorithm, tmp_path / "other", *BACKENDS[backend], "schedule.mode=pipelined")

    assert_same(weights, expected)
    assert all(row["step_applied"] == 1 for row in rows)


PAIRS = ["data.prompts_per_step=3", "schedule.prompts_per_microbatch=3"]
"""Three pairs in one micro-batch: two ranks, or two workers that share it, cannot have the same number of rows."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_are_not_parted_between_ranks_and_learn_the_same(backend: str, tmp_path: Path, warm: None) -> None:
    warm_ranks = [f"engine.name={HERE}/warm.py:WarmEngine", "trainer.ranks=2"]
    ranks = [f"trainer.backend={backend}", *warm_ranks, "schedule.mode=pipelined"]
    expected, _ = train("dpo", tmp_path / "local", *PAIRS)
    weights, rows = train("dpo", tmp_path / "ranks", *PAIRS, *ranks)

    assert_same(weights, expected)
    assert all(row["step_applied"] == 1 for row in rows)


def test_pairs_are_not_parted_between_workers_that_share_a_micro_batch_and_learn_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Share, "generate", lambda _self, _name, bubble, _costs: (bubble.next_rows + 1) // 2)
    monkeypatch.setattr(Share, "choose", lambda _self, bubble, _costs: Choice((bubble.next_rows + 1) // 2))
    monkeypatch.setattr(Share, "update", lambda _self, _name, bubble, _costs: min(bubble.next_ready, 3))
    expected, _ = train("dpo", tmp_path / "naive", *PAIRS)
    shared = ["schedule.mode=pipelined", "schedule.assist=both", "generator.replicas=2"]
    weights, _ = train("dpo", tmp_path / "shared", *PAIRS, *shared)

    assert_same(weights, expected)
    spans = read_spans(tmp_path / "shared" / "events.jsonl")
    assert {s.rows for s in spans if s.kind in ("update", "help")} == {4, 2}
    assert any(s.kind == "help" for s in spans)


# Numbers of a single update, on real workers


@pytest.fixture
def pair(make_worker: Any) -> Any:
    """A generator and a trainer that share a store."""

    def make(algorithm: str, *overrides: str) -> tuple[Any, Any, Any]:
        config = resolve(algorithm, "glyph", None, settings(*overrides, algorithm=algorithm), {})
        store = MemoryStore()
        return (
            config,
            make_worker(DiffusersGenerator, config, store, "generator"),
            make_worker(LocalTrainer, config, store, "trainer"),
        )

    return make


def gradient(trainer: Any, *scored: Any, scale: float = 1.0) -> torch.Tensor:
    trainer.optimizer.zero_grad()
    for one in scored:
        trainer.accumulate(one, 0, 6.0, last=one is scored[-1])
    return scale * torch.cat([g.flatten() for g in trainer.gradients().values()]).double()


def largest_of_a_group(groups: list[list[float]]) -> Any:
    return max(torch.tensor(group).double().std(correction=0) for group in groups)


def of_all_rewards(groups: list[list[float]]) -> Any:
    return torch.tensor(groups).double().std(correction=0)


@pytest.mark.parametrize(
    ("algorithm", "keys", "std"),
    [
        ("longcat", ["algorithm.loss.clip=1e-4"], largest_of_a_group),
        (
            "flowgrpo",
            ["algorithm.advantage.scale=batch", "algorithm.loss.advantage_clip=null", "algorithm.loss.clip=1e-4"],
            of_all_rewards,
        ),
    ],
)
def test_the_std_of_the_whole_step_scales_the_streamed_gradient_to_that_of_one_shot(
    algorithm: str, keys: list[str], std: Any, pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    """Rule R12: micro-batches come one by one, and the std is known after the last of them."""
    config, generator, trainer = pair(algorithm, *keys)
    whole = make_scored(config, generator, make_microbatch(config, prompts=3))
    moved(trainer)  # some ratios are clipped
    groups = [[0.1, 0.5, 0.3, 0.4], [0.9, -0.1, 0.4, 0.0], [0.7, 0.7, 0.6, 0.7]]
    advantage = config.algorithm.advantage
    divisor = std(groups) + advantage.eps
    means = [sum(group) / 4 for group in groups]
    one_shot = [(r - mean) / divisor for group, mean in zip(groups, means, strict=True) for r in group]

    def credited(values: list[float]) -> Any:
        return replace(whole, advantages=tuple(map(float, values)), keep=(True,) * 12)

    streamed = [value for group in groups for value in advantage(group)]
    parts = []
    for start in (0, 4, 8):  # a micro-batch of one group each, in another order
        keep = tuple(start <= row < start + 4 for row in range(12))
        parts.insert(0, replace(credited(streamed), keep=keep))
    expected = gradient(trainer, credited(one_shot))
    assert 0.1 < trainer.accumulate(credited(one_shot), 0, 6.0, last=True)["clip_fraction"].mean < 0.9

    got = gradient(trainer, *parts, scale=advantage.gradient_scale(groups))

    assert (got - expected).norm() <= 1e-6 * expected.norm()
    assert (gradient(trainer, *parts) - expected).norm() > 0.1 * expected.norm()


def with_loss(trainer: Any, loss: RatioLoss) -> None:
    trainer.algorithm = trainer.algorithm.model_copy(update={"loss": loss})


KL_KINDS: tuple[Any, ...] = ("mean-over-g2", "gaussian", "squared")
REGULARISED: list[RatioLoss] = [
    *(kind(kl=1, kl_kind=name) for name in KL_KINDS for kind in (ClippedLoss, GuardLoss, DivergenceLoss)),
    *(ClippedLoss(kl=1, kl_kind=name, kl_to="old") for name in (*KL_KINDS, "log-ratio")),
]


def test_a_kl_is_zero_at_first_then_has_a_gradient_and_costs_a_forward_only_to_the_base(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    keys = ["algorithm.loss.kl=1", "algorithm.records=[mean]"]
    config, generator, trainer = pair("flowgrpo", *keys)
    scored = make_scored(config, generator, make_microbatch(config, prompts=1))
    silent = replace(scored, advantages=(0.0,) * len(scored.advantages))
    calls: list[int] = []
    for transformer in (trainer.model.transformer, trainer.base):
        transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    before = {}
    for loss in REGULARISED:
        with_loss(trainer, loss)
        calls.clear()
        assert trainer.accumulate(silent, 0, 6.0, last=True)["kl"].high <= 1e-9, loss
        assert len(calls) == (2 if loss.kl_to == "base" else 1), loss
        before[loss] = gradient(trainer, silent).norm()
    for kind in (ClippedLoss(), GuardLoss(), DivergenceLoss()):
        with_loss(trainer, kind)
        calls.clear()
        assert "kl" not in trainer.accumulate(silent, 0, 6.0, last=True)
        assert len(calls) == 1

    moved(trainer)

    for loss in REGULARISED:
        with_loss(trainer, loss)
        assert before[loss] < 1e-3 * gradient(trainer, silent).norm(), loss


def test_from_adapters_that_are_not_zero_a_kl_to_the_old_policy_begins_at_zero_and_one_to_the_base_does_not(
    pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    """What `base` means: the model as it came. Adapters that a run begins with are already away from it."""
    config, generator, trainer = pair(
        "flowgrpo", "trainer.lora={rank: 2}", "algorithm.loss.kl=1", "algorithm.records=[mean]"
    )
    with torch.no_grad():
        for worker in (generator, trainer):
            for name, parameter in worker.model.transformer.named_parameters():
                parameter.add_(0.05 if "lora_B" in name else 0.0)
    scored = make_scored(config, generator, make_microbatch(config, prompts=1))
    found = {}
    for to in ("base", "old"):
        with_loss(trainer, ClippedLoss.model_validate({"kl": 1, "kl_to": to}))
        found[to] = trainer.accumulate(scored, 0, 6.0, last=True)["kl"]

    assert found["old"].high <= 1e-9
    assert found["base"].low > 1e-6


def moved(trainer: Any, by: float = 1.01) -> None:
    with torch.no_grad():
        for parameter in trainer.model.transformer.parameters():
            parameter.mul_(by)


@pytest.mark.parametrize("algorithm", ["grpo-guard", "flow-dppo"])
def test_replaying_the_old_log_prob_replays_the_old_mean_too(
    algorithm: str, pair: Any, make_microbatch: Any, make_scored: Any
) -> None:
    """Else a generator in bfloat16 would look like a policy that has moved."""
    low = ["generator.dtype=bfloat16", "trainer.updates_per_rollout=1"]
    errors = {}
    for source in ("rollout", "replay"):
        config, generator, trainer = pair(algorithm, *low, f"algorithm.old_log_prob={source}")
        scored = make_scored(config, generator, make_microbatch(config, prompts=1))
        stats = trainer.accumulate(scored, 0, 6.0, last=True)
        errors[source] = stats["ratio_error"].high + stats.get("old_kl", stats["ratio_error"]).high
    assert errors["replay"] == 0
    assert errors["rollout"] > 0
