"""Online DPO: its loss against reference numbers, which samples are compared, and that pairs are never parted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from digen.algos.base import LossInputs, Transition
from digen.algos.dpo import DPO, BestAgainstWorst, DPOLoss
from digen.algos.flowgrpo import FlowGRPO
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.engines.store import MemoryStore
from digen.errors import ConfigError, RewardError
from digen.presets import derived, resolve
from digen.step import GlobalStep
from digen.types import MicroBatch, Prompt, Rollout, ScoredRollout

GOLDEN = Path(__file__).parent / "golden"
TENSORS = load_file(GOLDEN / "loss_tensors.safetensors")
ADVANTAGES = json.loads((GOLDEN / "advantages.json").read_text())


def inputs(mean: Tensor, reference: Tensor | None, y: Tensor | None, advantage: Tensor, width: int = 1) -> LossInputs:
    level, zeros = torch.full((len(mean), 1), 0.5), torch.zeros(len(mean))
    partner = torch.arange(len(mean)).view(-1, 2, width).flip(1).flatten()
    at = Transition(level, level, level, level)
    return LossInputs(zeros, zeros, advantage, mean, level, at, reference, None, y, partner)


def normal(seed: int, rows: int = 12) -> Tensor:
    return torch.randn((rows, 7), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The loss


def test_the_loss_and_the_share_of_pairs_in_order_equal_verl_omnis() -> None:
    """The reference's rows are pairs, the better one first."""
    golden = json.loads((GOLDEN / "losses.json").read_text())["verl_omni"]["dpo_beta2000"]
    y = TENSORS["nft_eps"] - TENSORS["nft_x0"]
    signs = torch.tensor([1.0, -1.0] * 6)

    terms = DPOLoss(beta=2000)(inputs(TENSORS["nft_v_new"], TENSORS["nft_v_ref"], y, signs))

    assert float(terms.loss.mean()) == pytest.approx(golden["loss"], rel=2e-5)
    assert float(terms.stats["pair_accuracy"].mean()) == golden["metrics"]["actor/implicit_acc"]
    assert torch.equal(terms.loss[::2], terms.loss[1::2])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("beta", [0.5, 40.0])
def test_the_gradient_is_that_of_each_pairs_own_formula(width: int, beta: float) -> None:
    """Independent: pair by pair and step by step, the sigmoid written out; in half of the pairs the worse is first."""
    y, base, better_first = normal(1), normal(2), torch.tensor([1.0, -1.0, -1.0, 1.0] * 3, dtype=torch.float64)
    signs = better_first[: 12 // width].repeat_interleave(width)
    mean, same = normal(0).requires_grad_(), normal(0).requires_grad_()
    rows = torch.arange(12).view(-1, 2, width)
    expected = torch.zeros((), dtype=torch.float64)
    for first, second in rows.transpose(1, 2).reshape(-1, 2).tolist():
        better, worse = (first, second) if signs[first] > 0 else (second, first)
        d = [(same[k] - y[k]).square().mean() - (base[k] - y[k]).square().mean() for k in (better, worse)]
        expected = expected - torch.log(1 / (1 + torch.exp(beta / 2 * (d[0] - d[1])))) / 6
    expected.backward()

    loss = DPOLoss(beta=beta)(inputs(mean, base, y, signs, width)).loss.mean()
    loss.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(mean.grad, same.grad, rtol=1e-10, atol=1e-14)


def test_far_from_the_base_the_loss_stays_finite_on_both_sides() -> None:
    y, base = normal(1, 2), normal(1, 2) + 1.0
    for better, low, high in ((1.0, 0.0, 1e-12), (-1.0, 900.0, 1100.0)):  # the first one is matched, the second is not
        mean = torch.stack([y[0], y[1] + 1.0]).requires_grad_()
        terms = DPOLoss(beta=2000)(inputs(mean, base, y, torch.tensor([better, -better])))
        terms.loss.sum().backward()
        assert low <= float(terms.loss.detach().max()) <= high
        assert mean.grad is not None
        assert mean.grad.isfinite().all()


def test_a_group_of_equal_rewards_has_no_gradient_wherever_the_policy_has_gone() -> None:
    mean = normal(0).requires_grad_()

    DPOLoss()(inputs(mean, normal(2), normal(1), torch.zeros(12))).loss.sum().backward()

    assert mean.grad is not None
    assert not mean.grad.any()


def test_the_loss_needs_the_base_the_pair_and_the_velocity_that_leads_back() -> None:
    v, signs = normal(0), torch.zeros(12)

    for given in (inputs(v, None, v, signs), replace(inputs(v, v, v, signs), partner=None), inputs(v, v, None, signs)):
        with pytest.raises(ValueError, match="missing"):
            DPOLoss()(given)


# Which samples are compared


def test_the_best_and_the_worst_are_flow_grpos_but_for_groups_in_which_there_is_none() -> None:
    """Of prompt c all rewards are equal: the reference trains two of its samples against each other, we do not."""
    prompts, rewards = ADVANTAGES["inputs"]["prompts"], ADVANTAGES["inputs"]["rewards"]
    found = dict.fromkeys(range(12), 0.0)
    for prompt in "abc":
        rows = [k for k, other in enumerate(prompts) if other == prompt]
        found |= dict(zip(rows, BestAgainstWorst()([rewards[k] for k in rows]), strict=True))

    golden = ADVANTAGES["flow_grpo_dpo"]
    assert [v for v, p in zip(found.values(), prompts, strict=True) if p != "c"] == [
        v for v, p in zip(golden, prompts, strict=True) if p != "c"
    ]
    assert {v for v, p in zip(found.values(), prompts, strict=True) if p == "c"} == {0.0}
    assert sorted(v for v, p in zip(golden, prompts, strict=True) if p == "c") == [-1, 0, 0, 1]


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [([0.2, 0.9, 0.9, 0.1, 0.1], [0, 1, 0, -1, 0]), ([0.3] * 4, [0] * 4), ([-5, 7e9], [-1, 1])],
)
def test_of_equals_the_first_counts_and_two_samples_are_kept(rewards: list[float], advantages: list[int]) -> None:
    found = BestAgainstWorst()(rewards)
    kept = DPO(samples_per_prompt=len(rewards)).select(found)

    assert found == advantages
    assert sum(kept) == 2
    assert all(keep for keep, advantage in zip(kept, advantages, strict=True) if advantage)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(RewardError, match="sample 1 of 3"):
        BestAgainstWorst()([0.5, float("nan"), 0.25])


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        (DPO, {"best_of_n": None}, "got all that are kept; set algorithm.best_of_n"),
        (DPO, {"best_of_n": {"best": 2, "worst": 1}}, r"got 2 \+ 1 that are kept"),
        (DPO, {"steps": {"per_sample": True}}, "set algorithm.steps.per_sample=false"),
        (DPO, {"noise": {"weight": "t"}}, "needs noise.weight=uniform, got t"),
        (DPO, {"noise": {"type": "flow-sde"}}, "matching"),
        (DPO, {"loss": {"clip": 1e-4}}, "clip"),
        (FlowGRPO, {"loss": {"type": "dpo"}}, "clipped"),
    ],
)
def test_what_dpo_cannot_have_is_refused(algorithm: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        algorithm.model_validate(changes)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["trainer.batch_size=3"], "trainer.batch_size=3 must be a multiple of 2"),
        (["generator.batch_size=1", "schedule.assist=both"], "generator.batch_size=1 must be a multiple of 2"),
        (["scoring.combine=advantages"], "scoring.combine=advantages: a best and a worst sample have one reward each"),
    ],
)
def test_what_would_part_a_pair_or_find_no_best_sample_is_refused(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("dpo", "glyph", None, keys, {})


def test_a_generator_that_does_not_train_may_sample_one_by_one() -> None:
    keys = ["generator.batch_size=1", "schedule.assist=trainer", "trainer.batch_size=4"]
    config = resolve("dpo", "glyph", None, keys, {})

    assert derived(config)["trained_samples_per_step"] == 12 * 2
    assert derived(config)["update_forwards_per_step"] == 12 * 2 * 3 * 2  # policy and base


# Pairs stay together


@pytest.mark.parametrize(("asked", "taken"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_worker_that_takes_part_of_a_micro_batch_takes_whole_pairs(asked: int, taken: int) -> None:
    prompts = tuple(Prompt(k, "a") for k in range(3))
    rollout = Rollout(MicroBatch(0, 0, prompts, 3, 0), 0, (), "worker")
    keep = (True, False, True) * 3
    step = GlobalStep(0, (rollout.microbatch,), 1.0, 2, rows_together=2)
    step.ready[0] = ScoredRollout(rollout, (0.0,) * 9, (0.0,) * 9, keep)

    first = step.take_ready(asked)

    assert sum(first.keep) == taken
    rest = step.ready.get(0)
    assert sum(first.keep) + (sum(rest.keep) if rest else 0) == 6


@pytest.fixture
def trained(make_worker: Any, make_microbatch: Any, make_scored: Any) -> Any:
    """A trainer whose policy has left the base, and a scored micro-batch of three groups; float64, as beta is large."""
    exact = ["generator.dtype=float64", "trainer.dtype=float64"]
    small = [*exact, "algorithm.samples_per_prompt=4", "sampling.num_steps=6", "data.prompts_per_step=3", "steps=3"]
    config = resolve("dpo", "glyph", None, small, {})
    store = MemoryStore()
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    with torch.no_grad():
        for parameter in trainer.model.transformer.parameters():
            parameter.mul_(1.001)
    return trainer, make_scored(config, generator, make_microbatch(config, prompts=3))


def gradient(trainer: Any, scored: Any, tsp: int = 0, size: int | None = None, ranks: int = 1) -> Tensor:
    """Summed over so many ranks, one after the other."""
    whole, config = trainer.context, trainer.config
    section = config.trainer.model_copy(update={"batch_size": size})
    trainer.config = config.model_copy(update={"trainer": section})
    trainer.optimizer.zero_grad()
    for rank in range(ranks):
        trainer.context = replace(whole, rank=rank, world_size=ranks)
        trainer.accumulate(scored, tsp, 18.0, last=True)
    trainer.context, trainer.config = whole, config
    return torch.cat([g.flatten() for g in trainer.gradients().values()]).double()


def test_the_gradient_is_the_same_in_every_cut_and_on_any_number_of_ranks(trained: Any) -> None:
    trainer, scored = trained
    expected = gradient(trainer, scored)
    assert expected.norm() > 1e-3

    for tsp, size, ranks in ((1, 2, 1), (2, 4, 1), (0, 6, 1), (0, None, 2), (1, 2, 3), (0, 2, 5)):
        got = gradient(trainer, scored, tsp, size, ranks)
        assert (got - expected).norm() <= 1e-9 * expected.norm(), (tsp, size, ranks)


def test_a_pair_is_noised_anew_with_the_same_draws_at_the_same_levels(trained: Any) -> None:
    trainer, scored = trained
    batch = trainer._batch(scored)
    s = batch.tensors["sigmas"][batch.tensors["steps"]][..., None, None]
    e = batch.tensors["latents"] + (1 - s) * batch.tensors["next_latents"]

    assert batch.advantage.view(-1, 2).abs().tolist() == [[1.0, 1.0]] * 3
    assert batch.advantage.view(-1, 2).sum(1).tolist() == [0.0] * 3
    assert torch.equal(batch.tensors["steps"][::2], batch.tensors["steps"][1::2])
    torch.testing.assert_close(e[::2], e[1::2], rtol=0, atol=1e-6)
    assert float((e[0] - e[2]).abs().max()) > 1  # the next pair has draws of its own
