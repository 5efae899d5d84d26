"""Learning on samples that are noised anew: what a rollout keeps of them, whose draws those are, what is refused."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from digen.algos.awm import AWM
from digen.algos.base import LossInputs, Transition
from digen.algos.diffusion_nft import DiffusionNFT
from digen.algos.flowgrpo import FlowGRPO
from digen.algos.matching import Matching, NFTLoss
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.presets import derived

STEPS = ("algorithm.steps.type=random-fraction", "algorithm.steps.fraction=0.5")
"""Three of six levels, other ones for every sample."""


@pytest.fixture
def rollout(make_config: Any, make_worker: Any, make_microbatch: Any) -> Any:
    """(trajectory, media, worker) of some rows of two prompts with four samples each."""

    def make(
        rows: tuple[int, ...] = tuple(range(8)), *overrides: str, step: int = 0
    ) -> tuple[dict[str, Any], Tensor, Any]:
        config = make_config(*STEPS, *overrides, algorithm="diffusion-nft")
        worker = make_worker(DiffusersGenerator, config)
        tensors, media = worker.sampler.rollout(make_microbatch(config, step=step), rows)
        return tensors, media, worker

    return make


def levels(tensors: dict[str, Any]) -> Tensor:
    """s of every row and column, to broadcast over latents (K, S, ...)."""
    s = tensors["sigmas"][tensors["steps"]]
    return s.view(*s.shape, *[1] * (tensors["latents"].ndim - 2))


def clean_and_noise(tensors: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """x0 and e (K, S, ...) from x = (1 - s) x0 + s e and y = e - x0."""
    s, x, y = levels(tensors), tensors["latents"], tensors["next_latents"]
    return x - s * y, x + (1 - s) * y


def test_what_is_noised_is_the_sample_itself_which_was_made_without_noise(rollout: Any) -> None:
    tensors, media, worker = rollout()
    x0, _ = clean_and_noise(tensors)

    assert x0.shape[:2] == tensors["steps"].shape == (8, 3)
    for column in range(1, 3):
        torch.testing.assert_close(x0[:, column], x0[:, 0], rtol=0, atol=2e-5)
    off = (worker.model.decode(x0[:, 0]).int() - media.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.01
    assert worker.sampler._plan(0, 0, [(3, 0), (3, 1)])[0].sum() == 0


def test_draws_are_normal_and_differ_between_samples_levels_and_global_steps(rollout: Any) -> None:
    tensors, *_ = rollout()
    _, e = clean_and_noise(tensors)
    _, later = clean_and_noise(rollout(tuple(range(8)), step=1)[0])

    assert abs(float(e.mean())) < 0.02
    assert abs(float(e.std()) - 1) < 0.02
    draws = [*e.flatten(0, 1), *later.flatten(0, 1)]
    assert all(float((a * b).mean().abs()) < 0.2 for a, b in combinations(draws, 2))


@pytest.mark.parametrize("rows", [(5,), (7, 2, 5)])
def test_a_samples_rows_do_not_depend_on_what_it_shares_a_batch_with(rows: tuple[int, ...], rollout: Any) -> None:
    whole, *_ = rollout()
    some, *_ = rollout(rows, "generator.batch_size=2")

    for name in ("latents", "next_latents", "mean", "log_probs"):
        torch.testing.assert_close(some[name], whole[name][list(rows)], rtol=1e-4, atol=1e-4)
    assert torch.equal(some["steps"], whole["steps"][list(rows)])


def test_levels_are_the_selectors_and_a_pass_is_made_for_each_whichever_they_are(rollout: Any) -> None:
    tensors, _, worker = rollout()
    config, calls = worker.config, []
    selector = config.algorithm.steps
    worker.model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    worker.sampler.rollout(worker_microbatch(worker), (0, 1, 2, 3))

    expected = [selector.trained(config.seed, 0, prompt, sample, 6) for prompt in (3, 8) for sample in range(4)]
    assert [tuple(row) for row in tensors["steps"].tolist()] == expected
    assert len(set(expected)) > 1
    assert len(calls) == 6 + 3
    assert derived(config)["rollout_forwards_per_step"] == 3 * 4 * (6 + 3)


def worker_microbatch(worker: Any) -> Any:
    from digen.types import MicroBatch, Prompt

    return MicroBatch(0, 0, (Prompt(3, "A"),), 4, worker.config.seed)


# The loss


def inputs(mean: Tensor, old: Tensor, y: Tensor, advantage: Tensor, s: float = 0.6) -> LossInputs:
    level = torch.full((len(mean), 1), s)
    at, zeros = Transition(level, level, level, level), torch.zeros(len(mean))
    return LossInputs(zeros, zeros, advantage, mean, level, at, None, old, y)


def normal(seed: int) -> Tensor:
    return torch.randn((5, 7), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_before_the_policy_moves_nft_is_the_matching_loss_weighed_by_the_advantage(beta: float) -> None:
    v, y, s = normal(0), normal(1), 0.6
    advantage = torch.tensor([1.5, -0.5, 0.0, 5.0, -3.0], dtype=torch.float64)
    mean = v.clone().requires_grad_()

    NFTLoss(beta=beta, kl=0)(inputs(mean, v, y, advantage, s)).loss.sum().backward()

    scale = (s * (v - y)).abs().mean(1, keepdim=True)
    expected = advantage[:, None] * 2 * s**2 * (v - y) / (7 * scale)
    torch.testing.assert_close(mean.grad, expected, rtol=1e-6, atol=1e-12)


def test_a_group_of_equal_rewards_has_no_gradient_until_the_policy_has_moved_and_then_leads_back() -> None:
    """P09. Half of each: v+ and v- are mirror images, so that the old velocity is where both together match best."""
    v, y, advantage = normal(0), normal(1), torch.zeros(5, dtype=torch.float64)
    gradients = []
    for by in (0.0, 0.1):
        mean = (v + by).requires_grad_()
        NFTLoss(kl=0)(inputs(mean, v, y, advantage)).loss.sum().backward()
        assert mean.grad is not None
        gradients.append(mean.grad)

    assert not gradients[0].any()
    assert (gradients[1] * 0.1).sum() > 0


def test_nft_needs_the_old_velocity_and_the_one_that_leads_back() -> None:
    v, advantage = normal(0), torch.zeros(5)

    with pytest.raises(ValueError, match="velocity at rollout"):
        NFTLoss()(inputs(v, None, v, advantage))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lead back"):
        NFTLoss()(inputs(v, v, None, advantage))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="under the base weights"):
        NFTLoss()(inputs(v, v, v, advantage))


@pytest.mark.parametrize("weight", ["uniform", "t", "t2", "huber", "ghuber"])
def test_a_velocity_that_matches_has_the_highest_log_prob_and_that_one_is_zero(weight: Any) -> None:
    y, noise = normal(0).float(), Matching(weight=weight)
    std = torch.full((5, 1), 0.4)

    assert noise.log_prob(y, y, std).abs().max() == 0
    assert (noise.log_prob(y, y + 0.1, std) < noise.log_prob(y, y + 0.01, std)).all()


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        (AWM, {"noise": {"type": "cps"}}, "matching"),
        (AWM, {"noise": {"level": 0.5}}, "level"),
        (AWM, {"loss": {"kl": 0.1, "kl_kind": "gaussian"}}, "divides by a step's noise, which matching does not have"),
        (AWM, {"loss": {"reweight": "step"}}, "which matching does not have"),
        (AWM, {"loss": {"type": "guard"}}, "clipped"),
        (AWM, {"advantage": {"scale": "batch"}}, "proportional"),
        (DiffusionNFT, {"advantage": {"scale": "batch"}}, "proportional"),
        (DiffusionNFT, {"loss": {"clip": 1e-4}}, "clip"),
        (DiffusionNFT, {"loss": {"kl_kind": "gaussian"}}, "kl_kind"),
        (DiffusionNFT, {"noise": {"type": "flow-sde"}}, "matching"),
        (DiffusionNFT, {"records": []}, r"set algorithm.records=\[mean\]"),
        (FlowGRPO, {"noise": {"type": "matching"}}, "flow-sde"),
    ],
)
def test_what_learning_on_the_forward_process_cannot_have_is_refused(algorithm: Any, changes: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        algorithm.model_validate(changes)


def test_a_distance_of_velocities_from_the_base_can_be_had() -> None:
    assert AWM.model_validate({"loss": {"kl": 0.1}}).loss.needs_reference
    assert DiffusionNFT().loss.needs_reference
    assert not DiffusionNFT(loss=NFTLoss(kl=0)).loss.needs_reference
    assert [DiffusionNFT().steps.num_trained(10), AWM().steps.num_trained(10)] == [9, 6]
