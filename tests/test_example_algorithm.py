"""The example of a user's own algorithm, and a toy flow that it and every built-in algorithm must be able to teach."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from digen.algos.awm import AWM
from digen.algos.base import Algorithm, LossInputs, Transition
from digen.algos.dancegrpo import DanceGRPO
from digen.algos.diffusion_nft import DiffusionNFT
from digen.algos.dr_grpo import DrGRPO
from digen.algos.flow_dppo import FlowDPPO
from digen.algos.flowgrpo import FlowFast, FlowGRPO
from digen.algos.grpo_guard import GRPOGuard
from digen.algos.longcat import LongCat
from digen.algos.mixgrpo import MixGRPO
from digen.algos.sde import clean, euler

PATH = Path(__file__).parent.parent / "examples" / "my_algorithm.py"
SIGMAS = torch.tensor([1.0, 0.96, 0.9, 0.8, 0.6, 0.3, 0.0])
NUM_STEPS = 6
TARGET = 1.0


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_my_algorithm", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load()
MyAlgorithm: type[Algorithm] = example.MyAlgorithm

ALGORITHMS = {
    "my-algorithm": MyAlgorithm(),
    "flowgrpo": FlowGRPO(),
    "flowgrpo with cps": FlowGRPO.model_validate({"noise": {"type": "cps"}, "loss": {"kl": 0}}),
    "flowgrpo with a window": FlowGRPO.model_validate({"steps": {"type": "window"}, "loss": {"kl": 0}}),
    "dancegrpo": DanceGRPO(),
    "dancegrpo with best of n": DanceGRPO.model_validate({"best_of_n": {"best": 3, "worst": 3}}),
    "dancegrpo with wan's noise": DanceGRPO.model_validate({"noise": {"type": "wan-sde"}}),
    "flowgrpo-fast": FlowFast(),
    "mixgrpo": MixGRPO.model_validate({"steps": {"every": 2}}),
    "mixgrpo with a random window": MixGRPO.model_validate({"steps": {"order": "random", "size": 2}}),
    "grpo-guard": GRPOGuard(),
    "flow-dppo": FlowDPPO(),
    "dr-grpo": DrGRPO(),
    "longcat": LongCat.model_validate({"samples_per_prompt": 12, "steps": {"high": 5}}),
    "diffusion-nft": DiffusionNFT.model_validate({"loss": {"kl": 0}}),
    "awm": AWM(),
}


@dataclass
class ToyFlow:
    """The exact flow from noise to a normal distribution around `centre` with std 0.5: a model with one weight."""

    centre: Tensor

    def velocity(self, x: Tensor, at: Transition) -> Tensor:
        s, variance = at.sigma, 0.25
        slope = (s - (1 - s) * variance) / ((1 - s) ** 2 * variance + s**2)
        return slope * (x - (1 - s) * self.centre) - self.centre


@dataclass
class Rows:
    """Trained (sample, timestep) pairs of one group, and the rewards of all its samples."""

    x: Tensor
    y: Tensor
    steps: Tensor
    log_prob: Tensor
    mean: Tensor
    advantage: Tensor
    rewards: list[float]


def at(step: int | Tensor, x: Tensor) -> Transition:
    return Transition.at(SIGMAS, torch.full((len(x),), step) if isinstance(step, int) else step, x.ndim)


@torch.no_grad()
def generate(algorithm: Algorithm, flow: ToyFlow, step: int) -> Rows:
    generator = torch.Generator().manual_seed(step)
    group = algorithm.samples_per_prompt
    x = torch.randn((1 if algorithm.same_initial_noise else group, 2, 2), generator=generator).repeat(
        group if algorithm.same_initial_noise else 1, 1, 1
    )
    noisy = algorithm.steps.noisy(0, step, 0, NUM_STEPS)
    trained = [algorithm.steps.trained(0, step, 0, sample, NUM_STEPS) for sample in range(group)]
    kept: list[tuple[int, int, Tensor, Tensor, Tensor, Tensor]] = []

    def keep(i: int, x: Tensor, y: Tensor) -> None:
        mean, std = algorithm.noise.mean_std(x, flow.velocity(x, at(i, x)), at(i, x))
        log_prob = algorithm.noise.log_prob(y, mean, std)
        kept.extend((k, i, x[k], y[k], log_prob[k], mean[k]) for k in range(group) if i in trained[k])

    media, anew = x, algorithm.noise.forward_process
    for i in range(NUM_STEPS):
        v = flow.velocity(x, at(i, x))
        y = euler(x, v, at(i, x))
        if i in noisy and not anew:
            mean, std = algorithm.noise.mean_std(x, v, at(i, x))
            y = mean + std * torch.randn(x.shape, generator=generator)
            keep(i, x, y)
        media = clean(x, v, at(i, x)) if algorithm.decode == "clean" else y
        x = y
    for i in range(NUM_STEPS) if anew else ():
        e, s = torch.randn(x.shape, generator=generator), SIGMAS[i]
        keep(i, (1 - s) * x + s * e, e - x)
    rewards = [float(-((sample - TARGET) ** 2).mean()) for sample in media]
    advantages = algorithm.advantage(rewards)
    selected = algorithm.select(advantages)
    kept = [row for row in kept if selected[row[0]]]
    assert len(kept) == algorithm.kept_per_prompt() * algorithm.steps.num_trained(NUM_STEPS)
    return Rows(
        torch.stack([row[2] for row in kept]),
        torch.stack([row[3] for row in kept]),
        torch.tensor([row[1] for row in kept]),
        torch.stack([row[4] for row in kept]),
        torch.stack([row[5] for row in kept]),
        torch.tensor([advantages[row[0]] for row in kept]),
        rewards,
    )


def replay(algorithm: Algorithm, flow: ToyFlow, base: ToyFlow, rows: Rows) -> LossInputs:
    where = at(rows.steps, rows.x)
    mean, std = algorithm.noise.mean_std(rows.x, flow.velocity(rows.x, where), where)
    reference, _ = algorithm.noise.mean_std(rows.x, base.velocity(rows.x, where), where)
    return LossInputs(
        new_log_prob=algorithm.noise.log_prob(rows.y, mean, std),
        old_log_prob=rows.log_prob,
        advantage=rows.advantage,
        mean=mean,
        std=std,
        at=where,
        reference_mean=reference if algorithm.loss.needs_reference else None,
        old_mean=rows.mean if "mean" in algorithm.records else None,
        next_latents=rows.y,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_teaches_a_toy_flow_and_starts_each_update_at_ratio_one(name: str) -> None:
    algorithm = ALGORITHMS[name]
    flow, base = ToyFlow(torch.zeros((), requires_grad=True)), ToyFlow(torch.zeros(()))
    optimizer = torch.optim.Adam([flow.centre], lr=0.05, eps=1e-12)
    rewards = []

    for step in range(25):
        rows = generate(algorithm, flow, step)
        terms = algorithm.loss(replay(algorithm, flow, base, rows))
        assert (terms.stats["ratio"] - 1).abs().max() <= 1e-6
        optimizer.zero_grad()
        terms.loss.mean().backward()
        optimizer.step()
        rewards.append(sum(rows.rewards) / len(rows.rewards))

    assert 0.5 < float(flow.centre.detach()) < 1.5
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_the_example_is_a_frozen_strict_config_of_its_own() -> None:
    algorithm = MyAlgorithm.model_validate({"loss": {"limit": 2e-3}})

    assert algorithm.loss == example.TrustRegion(limit=2e-3)
    assert MyAlgorithm.model_validate(algorithm.model_dump()) == algorithm
    with pytest.raises(ValidationError, match="limt"):
        MyAlgorithm.model_validate({"loss": {"limt": 1.0}})


def test_the_examples_advantages_leave_the_own_reward_out() -> None:
    advantage = MyAlgorithm().advantage

    assert advantage([1.0, 2.0, 6.0]) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert advantage([0.1] * 8) == [0.0] * 8


def test_the_examples_loss_drops_only_what_left_the_trust_region_outwards() -> None:
    ratios = torch.tensor([1.0, 1.01, 0.99, 1.01, 0.99])
    fields: dict[str, Any] = {name: torch.ones(5) for name in ("mean", "std")}
    given = LossInputs(
        new_log_prob=ratios.log(),
        old_log_prob=torch.zeros(5),
        advantage=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        at=at(0, torch.zeros(5, 1)),
        **fields,
    )

    terms = MyAlgorithm().loss(given)

    torch.testing.assert_close(terms.loss, torch.tensor([-1.0, 0.0, -0.99, 1.01, 0.0]))
    assert terms.stats["clip_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]


def test_the_example_stays_short_and_mentions_no_model() -> None:
    text = PATH.read_text()

    assert len([line for line in text.splitlines() if line.strip()]) <= 45
    assert "digen.models" not in text
    assert "digen.backends" not in text
