"""DiffusionNFT's old policy: its decay, who samples with it, and that it is sent, saved and compared with exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from digen.algos.awm import AWM
from digen.algos.base import Algorithm
from digen.algos.diffusion_nft import DiffusionNFT
from digen.algos.flowgrpo import FlowGRPO
from digen.algos.old_policy import OldPolicyDecay
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.copies import OLD_POLICY
from digen.backends.training.local import LocalTrainer
from digen.engines.store import MemoryStore
from digen.errors import ConfigError
from digen.observe.files import read_rows, read_spans
from digen.presets import resolve
from digen.run import run
from digen.trained import WEIGHTS
from digen.weights.state import trainable

HERE = Path(__file__).parent
WINDOWS = json.loads((HERE / "golden" / "windows_and_decays.json").read_text())
DECAY = "algorithm.old_policy={rate: 0.3, most: 0.75}"
KEEPS = (0.3, 0.6, 0.75, 0.75)
"""Of itself, after 1, 2, 3, 4 optimizer steps."""
SMALL = (
    "steps=4",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=5",
    "engine.name=inline",
    "schedule.assist=none",
    "schedule.mode=pipelined",
    "trainer.optimizer=sgd",
    "trainer.learning_rate=0.3",
    "trainer.weight_decay=0",
    f'reward={{"{__file__}:left_half": {{}}}}',
    "observe.tensorboard=false",
    "observe.grid_every=0",
)


def left_half(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    return [round(float(image[:, :16].mean()) / 255, 2) for image in media]


def train(folder: Path, *overrides: str, resume: bool = False) -> dict[str, dict[str, Tensor]]:
    """The files of the last checkpoint, by their paths in it."""
    config = resolve("diffusion-nft", "glyph", None, [*SMALL, DECAY, *overrides, f"run_dir={folder}"], {})
    run(config, console=Console(quiet=True), resume=() if resume else None)
    last = max(path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_"))
    return {str(path.relative_to(last)): load_file(path) for path in last.glob("**/*.safetensors")}


# The decay


@pytest.mark.parametrize(
    ("kind", "decay"),
    [
        ("0", None),
        ("1", OldPolicyDecay(rate=0.001, most=0.5)),
        ("2", OldPolicyDecay(rate=0.0075, after=75, most=0.999)),
    ],
)
def test_the_share_that_the_old_policy_keeps_is_that_of_each_of_diffusion_nfts_three_schedules(
    kind: str, decay: OldPolicyDecay | None
) -> None:
    algorithm, golden = DiffusionNFT(old_policy=decay), WINDOWS["nft_old_policy_decay"][kind]

    assert len(golden) == 13
    for num_updates, keeps in golden.items():
        assert algorithm.old_policy_keeps(int(num_updates)) == pytest.approx(keeps, abs=1e-12)
    assert algorithm.has_old_policy == (kind != "0")


@pytest.mark.parametrize("algorithm", [AWM, DiffusionNFT])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"old_policy": {}, "old_log_prob": "replay"}, "takes the trained policy for the one that sampled"),
        ({"old_policy": {"most": 1.0}}, "less than 1"),
        ({"old_policy": {"decay": 0.5}}, "decay"),
    ],
)
def test_what_an_old_policy_cannot_have_is_refused(
    algorithm: type[Algorithm], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        algorithm.model_validate(changes)


def test_an_algorithm_with_steps_that_have_log_probs_has_no_old_policy() -> None:
    with pytest.raises(ValidationError, match="old_policy"):
        FlowGRPO.model_validate({"old_policy": {}})
    assert not FlowGRPO().has_old_policy


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["schedule.assist=both"], "schedule.assist=both lets generators compute gradients, of the trained weights"),
        (
            ["trainer.backend=deepspeed", "trainer.zero_stage=3", "schedule.tag=bts"],
            "trainer.zero_stage=3 cannot sample with other weights",
        ),
    ],
)
def test_workers_that_would_need_the_other_policys_weights_are_refused(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("diffusion-nft", "glyph", None, [*SMALL, DECAY, *keys], {})


# On real workers


def weights(worker: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable(worker.model.transformer).items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [[], ["trainer.lora={rank: 4}"]], ids=["full weights", "adapters"])
def test_generators_are_sent_the_average_and_an_assisting_trainer_samples_with_it_bit_for_bit(
    lora: list[str], make_worker: Any, make_microbatch: Any, make_scored: Any
) -> None:
    config = resolve("diffusion-nft", "glyph", None, [*SMALL, DECAY, "schedule.assist=trainer", *lora], {})
    store = MemoryStore()
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    expected = weights(trainer)
    for version in range(3):
        scored = make_scored(config, generator, make_microbatch(config, step=version), version)
        stats = trainer.accumulate(scored, 0, 32.0, last=True)
        assert ("ratio_error" in stats) == (version == 0)  # later on the policy that sampled is another one
        assert trainer.optimizer_step(1.0).applied
        live = weights(trainer)
        keeps = KEEPS[version]
        expected = {name: old * keeps + live[name] * (1 - keeps) for name, old in expected.items()}
        published = trainer.push(version + 1)
        assert generator.pull(published) == published.fingerprint
        assert_equal(weights(generator), expected)
        assert any(not torch.equal(live[name], expected[name]) for name in live)

    microbatch = make_microbatch(config, step=3)
    shards = [worker.generate(microbatch, 3, tuple(range(8))) for worker in (generator, trainer)]

    assert_equal(*(dict(store.get(shard.trajectory)) for shard in shards))
    assert_equal(*(dict(store.get(shard.media)) for shard in shards))
    assert_equal(weights(trainer), live)


def test_the_old_velocity_is_that_of_the_policy_that_sampled_also_after_the_trained_one_has_left_it(
    make_worker: Any, make_microbatch: Any, make_scored: Any
) -> None:
    """The distance from the old velocity begins above 0: a loss that took the trained one for it would see none."""
    config = resolve("diffusion-nft", "glyph", None, [*SMALL, DECAY], {})
    store = MemoryStore()
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    found = []
    for version in range(2):
        scored = make_scored(config, generator, make_microbatch(config, step=version), version)
        found.append(trainer.accumulate(scored, 0, 32.0, last=True)["old_kl"].high)
        trainer.optimizer_step(1.0)
        generator.pull(trainer.push(version + 1))

    assert found[0] <= 1e-12
    assert found[1] > 1e-9


# Whole runs


@pytest.mark.parametrize("staleness", [0, 0.5])
def test_a_run_that_was_stopped_and_goes_on_has_the_same_old_policy_and_learns_the_same_bit_for_bit(
    staleness: float, tmp_path: Path
) -> None:
    """With stale samples also the policy before the last one is saved, with which they are made again."""
    keys = ["schedule.ordered=true", "checkpoint.every=2", f"schedule.staleness={staleness}"]
    straight = train(tmp_path / "straight", *keys)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_000004")
    resumed = train(tmp_path / "stopped", *keys, resume=True)
    rows, again = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("straight", "stopped"))

    assert straight.keys() == {WEIGHTS, OLD_POLICY}
    for name, tensors in straight.items():
        assert_equal(tensors, resumed[name])
    assert [row["stale_share"] for row in rows] == [row["stale_share"] for row in again] == [0, *[staleness] * 3]
    assert any((straight[WEIGHTS][n] != t).any() for n, t in straight[OLD_POLICY].items())


def test_it_follows_once_a_rollout_and_stale_samples_of_it_are_trained_on_too(tmp_path: Path) -> None:
    keys = ["trainer.updates_per_rollout=2", "steps=6", "schedule.staleness=0.5", "checkpoint.every=2"]
    folder = tmp_path / "run"
    train(folder, *keys)
    rows = read_rows(folder / "metrics.jsonl")
    files = [folder / "checkpoints" / f"step_{step:06d}" for step in (2, 4, 6)]
    trained = [load_file(path / WEIGHTS) for path in files]
    old = [load_file(path / OLD_POLICY) for path in files]

    for k, keeps in ((1, KEEPS[3]), (2, 0.75)):
        expected = {n: t * keeps + trained[k][n] * (1 - keeps) for n, t in old[k - 1].items()}
        assert_equal(old[k], expected)
    assert all(row["step_applied"] == 1 for row in rows)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return max(float((one[name] - other[name]).abs().max()) for name in one) <= 1e-5


def test_an_assisting_trainer_changes_nothing(tmp_path: Path) -> None:
    expected = train(tmp_path / "naive", "schedule.mode=naive")
    found = train(tmp_path / "assisted", "schedule.tag=static(1)", "trainer.tsp=0")

    assert all(same(tensors, expected[name]) for name, tensors in found.items())
    assert any(span.kind == "assist" for span in read_spans(tmp_path / "assisted" / "events.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_sharded_trainers_keep_the_same_old_policy_and_sample_with_it(backend: str, tmp_path: Path, warm: None) -> None:
    warm_ranks = [f"engine.name={HERE}/warm.py:WarmEngine", "trainer.ranks=2"]
    ranks = [f"trainer.backend={backend}", *warm_ranks, "schedule.tag=static(1)"]
    rows = ["trainer.batch_size=1", "generator.batch_size=1", "steps=3"]
    expected = train(tmp_path / "local", *rows)
    found = train(tmp_path / "ranks", *rows, *ranks)

    for name in (WEIGHTS, OLD_POLICY):
        assert same(found[name], expected[name])
    assert any(span.kind == "assist" for span in read_spans(tmp_path / "ranks" / "events.jsonl"))
