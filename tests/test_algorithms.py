"""What noise strategies, losses, advantages and whole algorithms promise beyond the reference numbers."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from digen.algos.advantages import GroupAdvantage
from digen.algos.awm import AWM
from digen.algos.base import Algorithm, BestOfN, LossInputs, LossTerms, NoiseStrategy, PolicyLoss, Transition
from digen.algos.dancegrpo import DanceGRPO
from digen.algos.diffusion_nft import DiffusionNFT
from digen.algos.dpo import DPO
from digen.algos.dr_grpo import DrGRPO
from digen.algos.flow_dppo import FlowDPPO
from digen.algos.flowgrpo import FlowCPS, FlowFast, FlowGRPO, FlowNoCFG
from digen.algos.grpo_guard import GRPOGuard
from digen.algos.longcat import LongCat
from digen.algos.losses import ClippedLoss
from digen.algos.mixgrpo import MixGRPO
from digen.algos.old_policy import OldPolicyDecay
from digen.algos.sde import CPS, DanceSDE, FlowSDE, WanSDE, clean, euler
from digen.algos.steps import AllButLast, RandomFraction, Window
from digen.errors import RewardError

SCHEDULES: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "schedules.json").read_text())
SHAPE = (3, 4, 5, 5)
STRATEGIES: list[NoiseStrategy] = [FlowSDE(), FlowSDE(max_std=0.45), DanceSDE(), WanSDE(), CPS()]


def table(name: str = "sd35_shift3_n10") -> Tensor:
    return torch.tensor(SCHEDULES[name]["sigmas"])


def at(step: int, sigmas: Tensor | None = None, rows: int = 3, ndim: int = 4) -> Transition:
    return Transition.at(table() if sigmas is None else sigmas, torch.full((rows,), step), ndim)


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Noise strategies


@pytest.mark.parametrize(
    ("noise", "tolerance"), [(FlowSDE(level=0), 0.0), (DanceSDE(level=0), 0.0), (CPS(level=0), 1e-6)]
)
def test_noise_level_0_is_the_euler_step_and_the_schedulers_own(noise: NoiseStrategy, tolerance: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    mix, x = normal(0, (5, 5)), normal(1)

    for step, timestep in enumerate(scheduler.timesteps):
        v = x @ mix - 0.3 * x
        mean, std = noise.mean_std(x, v, at(step, scheduler.sigmas))
        theirs = scheduler.step(v, timestep, x, return_dict=False)[0]
        assert torch.equal(euler(x, v, at(step, scheduler.sigmas)), theirs)
        assert (mean - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)
        assert not std.any()
        x = theirs


@pytest.mark.parametrize("noise", [FlowSDE(level=0), DanceSDE(level=0)])
def test_the_log_prob_of_a_step_without_noise_is_refused(noise: NoiseStrategy) -> None:
    mean, std = noise.mean_std(normal(0), normal(1), at(3))

    with pytest.raises(ValueError, match="std must be above 0"):
        noise.log_prob(mean, mean, std)


@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize("noise", [FlowSDE(), FlowSDE(level=1.2), DanceSDE(), WanSDE()])
def test_the_log_prob_is_the_mean_over_latents_of_a_normal_distributions(noise: NoiseStrategy, step: int) -> None:
    mean, std = noise.mean_std(normal(0), normal(1), at(step))
    y = mean + std * normal(2)

    expected = torch.distributions.Normal(mean.double(), std.double().expand_as(mean)).log_prob(y.double())

    torch.testing.assert_close(noise.log_prob(y, mean, std).double(), expected.mean((1, 2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("noise", STRATEGIES)
def test_steps_are_taken_in_float32_for_bfloat16_models_and_stay_in_float64(noise: NoiseStrategy) -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x, v = normal(0).to(dtype), normal(1).to(dtype)
        mean, std = noise.mean_std(x, v, at(3))
        same, _ = noise.mean_std(x.to(expected), v.to(expected), at(3))
        assert {mean.dtype, euler(x, v, at(3)).dtype, clean(x, v, at(3)).dtype} == {expected}
        assert noise.log_prob(mean + std, mean, std).dtype == expected
        assert torch.equal(mean, same)


@pytest.mark.parametrize("noise", STRATEGIES)
def test_even_a_bfloat16_sigma_table_does_not_pull_the_step_down(noise: NoiseStrategy) -> None:
    x, v, where = normal(0).bfloat16(), normal(1).bfloat16(), at(3)
    low = Transition(
        *(getattr(where, name).bfloat16() for name in ("sigma", "sigma_next", "sigma_second", "sigma_last"))
    )

    mean, std = noise.mean_std(x, v, low)

    assert {mean.dtype, euler(x, v, low).dtype, clean(x, v, low).dtype} == {torch.float32}
    assert noise.log_prob(x, mean.bfloat16(), std).dtype == torch.float32


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("noise", STRATEGIES)
def test_no_step_of_any_schedule_explodes(noise: NoiseStrategy, name: str) -> None:
    sigmas = table(name)
    for step in range(len(sigmas) - 1):
        mean, std = noise.mean_std(normal(0), normal(1), at(step, sigmas))
        assert mean.isfinite().all()
        assert std.max() <= 1
        assert mean.abs().max() < 20


@pytest.mark.parametrize("first", [1.0, 0.999999, 0.99967, 0.9991])
def test_a_first_sigma_near_one_gets_the_noise_of_the_second(first: float) -> None:
    sigmas = torch.tensor([first, 0.96, 0.5, 0.0])

    _, std = FlowSDE(level=0.7).mean_std(normal(0), normal(1), at(0, sigmas))

    torch.testing.assert_close(std.flatten(), torch.full((3,), 0.7), rtol=0.02, atol=0)


def test_a_first_sigma_well_below_one_is_not_guarded() -> None:
    sigmas = torch.tensor([0.95, 0.6, 0.5, 0.0])

    _, std = FlowSDE(level=1.0).mean_std(normal(0), normal(1), at(0, sigmas))

    torch.testing.assert_close(std.flatten(), torch.full((3,), math.sqrt(0.95 / 0.05 * 0.35)))


def test_the_cap_limits_the_std_of_every_step_and_its_drift_with_it() -> None:
    for step in range(9):
        mean, std = FlowSDE(level=1.5, max_std=0.45).mean_std(normal(0), normal(1), at(step))
        level = float(std[0, 0, 0, 0] / (at(step).h[0, 0, 0, 0].sqrt()))
        same, _ = DanceSDE(level=level).mean_std(normal(0), normal(1), at(step))
        assert std.max() <= 0.45 * (1 + 1e-6)
        torch.testing.assert_close(mean, same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", [0.0, 0.3, 0.8, 1.0])
def test_cps_keeps_the_noise_level_of_the_schedule(level: float) -> None:
    """From pure noise at level s, kept and new noise together have exactly the variance s' squared."""
    noise = normal(0)

    mean, std = CPS(level=level).mean_std(at(4).sigma * noise, noise, at(4))

    kept = (mean / noise).mean()
    torch.testing.assert_close(kept**2 + std.flatten() ** 2, at(4).sigma_next.flatten() ** 2)


@pytest.mark.parametrize("noise", STRATEGIES)
def test_a_batch_of_several_timesteps_equals_each_timestep_alone(noise: NoiseStrategy) -> None:
    x, v, y, steps = normal(0), normal(1), normal(2), (0, 4, 8)
    mixed = Transition.at(table(), torch.tensor(steps), 4)

    mean, std = noise.mean_std(x, v, mixed)
    log_prob = noise.log_prob(y, mean, std)

    for row, step in enumerate(steps):
        one = slice(row, row + 1)
        mean_1, std_1 = noise.mean_std(x[one], v[one], at(step, rows=1))
        assert torch.equal(mean[one], mean_1)
        torch.testing.assert_close(log_prob[one], noise.log_prob(y[one], mean_1, std_1), rtol=1e-6, atol=1e-7)


# Loss


def rows(ratio: float = 1.0, dtype: torch.dtype = torch.float32, **changes: Any) -> LossInputs:
    old = normal(0, (6,)).to(dtype)
    means = {"mean": normal(1, (6, 4, 2, 2)).to(dtype).requires_grad_()}
    fields: dict[str, Any] = {
        "new_log_prob": (old + math.log(ratio)).requires_grad_(),
        "old_log_prob": old,
        "advantage": torch.tensor([1.5, -0.5, 0.25, -2.0, 0.0, 0.75], dtype=dtype),
        "std": torch.full((6, 1, 1, 1), 0.3, dtype=dtype),
        "at": at(2, rows=6),
        "reference_mean": means["mean"].detach() + 0.01,
    }
    return LossInputs(**(means | fields | changes))


def test_at_ratio_one_the_loss_and_its_gradient_are_minus_the_advantage() -> None:
    given = rows()
    terms = ClippedLoss()(given)

    terms.loss.sum().backward()

    assert torch.equal(terms.stats["ratio"], torch.ones(6))
    assert torch.equal(terms.loss, -given.advantage)
    assert torch.equal(given.new_log_prob.grad, -given.advantage)  # type: ignore[arg-type]
    assert not terms.stats["clip_fraction"].any()
    assert not any(value.requires_grad for value in terms.stats.values())


def test_beyond_the_clip_only_what_would_get_worse_has_gradient() -> None:
    given = rows(ratio=1.01)

    ClippedLoss(clip=1e-3)(given).loss.sum().backward()

    assert given.new_log_prob.grad is not None
    assert (given.new_log_prob.grad != 0).tolist() == (given.advantage < 0).tolist()


def test_without_kl_a_group_of_equal_rewards_has_no_gradient_at_all() -> None:
    advantage = torch.tensor(GroupAdvantage()([0.3] * 6))
    given = rows(ratio=1.01, advantage=advantage)

    terms = ClippedLoss()(given)
    terms.loss.sum().backward()

    assert torch.equal(given.new_log_prob.grad, torch.zeros(6))  # type: ignore[arg-type]
    assert given.mean.grad is None
    assert not ClippedLoss().needs_reference


def test_with_kl_a_group_of_equal_rewards_moves_through_the_kl_alone() -> None:
    given = rows(advantage=torch.zeros(6))

    ClippedLoss(kl=0.04)(given).loss.sum().backward()

    assert not given.new_log_prob.grad.any()  # type: ignore[union-attr]
    assert (given.mean.grad < 0).all()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "divisor"), [("squared", 1.0), ("gaussian", 2 * 0.3**2), ("mean-over-g2", 2 * 0.3**2 / 0.0557)]
)
def test_each_kl_divides_by_what_its_name_says(kind: Any, divisor: float) -> None:
    kl = ClippedLoss(kl=1.0, kl_kind=kind)(rows()).stats["kl"]

    torch.testing.assert_close(kl, torch.full((6,), 1e-4 / divisor), rtol=2e-3, atol=0)


def test_a_kl_without_the_mean_of_the_base_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the mean under the base weights"):
        ClippedLoss(kl=0.1)(rows(reference_mean=None))


def test_the_advantage_is_clamped_in_the_loss() -> None:
    advantage = torch.tensor([9.0, -9.0, 1.0, 2.0, 3.0, 4.0])

    assert ClippedLoss()(rows(advantage=advantage)).loss.tolist() == [-5.0, 5.0, -1.0, -2.0, -3.0, -4.0]
    assert ClippedLoss(advantage_clip=None)(rows(advantage=advantage)).loss.tolist()[:2] == [-9.0, 9.0]


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    loss, given = ClippedLoss(kl=0.04), rows(ratio=1.0002)
    whole = loss(given).loss

    for row in range(6):
        fields = {name: getattr(given, name)[row : row + 1] for name in ("new_log_prob", "old_log_prob", "advantage")}
        alone = rows(
            mean=given.mean[row : row + 1],
            std=given.std[:1],
            at=at(2, rows=1),
            reference_mean=given.reference_mean[row : row + 1],  # type: ignore[index]
            **fields,
        )
        torch.testing.assert_close(loss(alone).loss, whole[row : row + 1], rtol=1e-6, atol=0)


# Advantages

REWARDS = [[0.1, 0.4, 0.2, 0.9], [1.0, 1.0, 1.0, 1.0], [-2.0, 0.5, 0.0, 3.0]]


@pytest.mark.parametrize("std", ["biased", "unbiased"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_of_a_hand_table_equal_numpy(std: Any, scale: Any) -> None:
    advantage, ddof = GroupAdvantage(std=std, scale=scale, eps=1e-4), int(std == "unbiased")
    table_34 = np.array(REWARDS)
    centred = table_34 - table_34.mean(1, keepdims=True)
    divisor = table_34.std(1, ddof=ddof, keepdims=True) if scale == "group" else table_34.std(ddof=ddof)

    ours = np.array([advantage(group) for group in REWARDS]) * advantage.gradient_scale(REWARDS)

    np.testing.assert_allclose(ours, centred / (divisor + 1e-4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("std", ["biased", "unbiased"])
def test_the_largest_std_of_a_group_divides_all_advantages_of_the_step(std: Any) -> None:
    advantage, table_34 = GroupAdvantage(std=std, scale="max-group"), np.array(REWARDS)
    divisor = table_34.std(1, ddof=int(std == "unbiased")).max() + 1e-4

    ours = np.array([advantage(group) for group in REWARDS]) * advantage.gradient_scale(REWARDS)

    np.testing.assert_allclose(ours, (table_34 - table_34.mean(1, keepdims=True)) / divisor, rtol=0, atol=1e-12)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=26), min_size=1, max_size=6))
def test_by_the_std_of_a_group_no_advantage_reaches_the_clamp_that_longcat_leaves_out(
    groups: list[list[float]],
) -> None:
    """In a group of n, |reward - mean| <= std sqrt(n - 1): at most 5 for n <= 26."""
    advantage = LongCat().advantage
    scale = advantage.gradient_scale(groups)

    assert all(abs(value * scale) <= 5 for group in groups for value in advantage(group))


def test_without_std_advantages_are_rewards_minus_their_mean() -> None:
    assert GroupAdvantage(std="none")([1.0, 2.0, 6.0]) == [-2.0, -1.0, 3.0]
    assert GroupAdvantage(std="none").gradient_scale(REWARDS) == 1.0


@pytest.mark.parametrize("advantage", [GroupAdvantage(), DanceGRPO().advantage, GroupAdvantage(scale="batch")])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e9, -7.3])
def test_equal_rewards_have_advantages_of_exactly_zero(advantage: GroupAdvantage, reward: float) -> None:
    assert advantage([reward] * 7) == [0.0] * 7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(RewardError, match="sample 1 of 3"):
        GroupAdvantage()([0.5, bad, 0.25])


def test_batch_std_on_the_gradient_equals_batch_std_in_the_advantage() -> None:
    """Rule R12: exact, ratio clip included, since the loss is proportional to the advantage."""
    advantage, loss = GroupAdvantage(scale="batch"), ClippedLoss(clip=1e-2, advantage_clip=None)
    groups = [[0.1, 0.7, 0.4], [2.0, -1.0, 0.3]]
    std, new = np.std(np.array(groups)) + advantage.eps, normal(3, (6,)).double() * 0.02

    def gradient(values: list[float]) -> Tensor:
        log_prob = new.clone().requires_grad_()
        given = rows(
            dtype=torch.float64,
            new_log_prob=log_prob,
            old_log_prob=torch.zeros(6, dtype=torch.float64),
            advantage=torch.tensor(values, dtype=torch.float64),
        )
        loss(given).loss.sum().backward()
        assert log_prob.grad is not None
        return log_prob.grad

    centred = [value for group in groups for value in advantage(group)]
    scaled = gradient(centred) * advantage.gradient_scale(groups)
    direct = gradient([value / std for value in centred])

    assert (new.abs() > 1e-2).any()
    torch.testing.assert_close(scaled, direct, rtol=1e-14, atol=1e-16)


# Whole algorithms

CLIPPED = {"type": "clipped", "advantage_clip": 5.0, "kl_kind": "mean-over-g2", "kl_to": "base", "reweight": "none"}


def test_flowgrpo_without_keys_is_the_sd35_ocr_recipe() -> None:
    assert FlowGRPO().model_dump() == {
        "name": "flowgrpo",
        "samples_per_prompt": 24,
        "same_initial_noise": False,
        "decode": "sample",
        "old_log_prob": "rollout",
        "records": (),
        "best_of_n": None,
        "noise": {"type": "flow-sde", "level": 0.7, "max_std": None},
        "steps": {"type": "all-but-last"},
        "advantage": {"type": "group", "std": "biased", "eps": 1e-4, "scale": "group"},
        "loss": CLIPPED | {"clip": 1e-4, "kl": 0.04},
    }
    assert FlowGRPO().steps.num_trained(10) == 9
    assert FlowGRPO().loss.needs_reference


def test_dancegrpo_without_keys_is_the_flux_recipe() -> None:
    assert DanceGRPO().model_dump() == {
        "name": "dancegrpo",
        "samples_per_prompt": 12,
        "same_initial_noise": True,
        "decode": "clean",
        "old_log_prob": "rollout",
        "records": (),
        "best_of_n": None,
        "noise": {"type": "dance-sde", "level": 0.3},
        "steps": {"type": "random-fraction", "fraction": 0.6, "of": "all-but-last", "per_sample": True},
        "advantage": {"type": "group", "std": "unbiased", "eps": 1e-8, "scale": "group"},
        "loss": CLIPPED | {"clip": 1e-4, "kl": 0.0},
    }
    assert [DanceGRPO().steps.num_trained(steps) for steps in (16, 12, 20)] == [9, 6, 11]
    assert not DanceGRPO().loss.needs_reference


VARIANTS: list[Algorithm] = [
    FlowFast(),
    FlowCPS(),
    MixGRPO(),
    GRPOGuard(),
    FlowDPPO(),
    DrGRPO(),
    LongCat(),
    AWM(),
    DiffusionNFT(),
    DiffusionNFT(old_policy=OldPolicyDecay()),
    DPO(),
    FlowNoCFG(),
]


@pytest.mark.parametrize(
    "algorithm", [FlowGRPO(), DanceGRPO(best_of_n=BestOfN(best=2, worst=1), noise=CPS()), *VARIANTS]
)
def test_a_dumped_algorithm_reads_back_as_the_same(algorithm: Algorithm) -> None:
    assert type(algorithm).model_validate(algorithm.model_dump()) == algorithm
    assert type(algorithm).model_validate_json(algorithm.model_dump_json()) == algorithm


def test_a_part_given_in_pieces_keeps_the_rest_of_the_recipe() -> None:
    algorithm = DanceGRPO.model_validate({"noise": {"level": 0.25}, "advantage": {"eps": 1e-6}, "steps": {}})

    assert algorithm.noise == DanceSDE(level=0.25)
    assert algorithm.advantage == GroupAdvantage(std="unbiased", eps=1e-6)
    assert algorithm.steps == DanceGRPO().steps


def test_a_part_of_another_type_starts_from_that_types_own_defaults() -> None:
    algorithm = DanceGRPO.model_validate({"noise": {"type": "cps"}, "steps": {"type": "window", "size": 3}})

    assert algorithm.noise == CPS(level=0.8)
    assert algorithm.steps == Window(size=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": {"type": "cpss"}}, "cps"),
        ({"noise": {"levl": 1.0}}, "levl"),
        ({"noise": {"type": "cps", "level": 1.1}}, "less than or equal to 1"),
        ({"noise": {"level": 0.0}}, "algorithm.noise.level=0"),
        ({"noise": {"level": "nan"}}, "finite"),
        ({"noise": {"type": "wan-sde", "level": 0.5}}, "level"),
        ({"loss": {"clip": 0.0}}, "greater than 0"),
        ({"samples_per_prompt": 1}, "greater than or equal to 2"),
        ({"samples_per_prompt": 7, "best_of_n": {"best": 4, "worst": 4}}, "keeps 8 samples"),
        ({"advantage": {"scale": "batch"}}, "advantage_clip=null"),
        ({"advantage": {"scale": "batch"}, "loss": {"advantage_clip": None, "kl": 0.1}}, "kl=0"),
        ({"advantage": {"scale": "batch", "std": "none"}}, "std=none"),
        ({"advantage": {"scale": "max-group", "std": "none"}}, "std=none"),
        ({"advantage": {"scale": "max-group"}}, "scale=max-group is known when .*advantage_clip=null"),
        ({"loss": {"kl_kind": "log-ratio"}}, "kl_to=old only"),
        ({"loss": {"kl": 0.1, "kl_to": "old"}}, r"algorithm.records=\[\]: .*set algorithm.records=\[mean\]"),
        ({"loss": {"type": "guard"}, "records": ["mean"]}, "guard is defined for flow-sde, got .*type=dance-sde"),
        ({"loss": {"type": "guard"}, "noise": {"type": "cps"}, "records": ["mean"]}, "got .*type=cps"),
        ({"loss": {"type": "divergence"}}, r"set algorithm.records=\[mean\]"),
        ({"loss": {"type": "divergence", "clip": 1e-4}}, "clip"),
        ({"loss": {"reweight": "step"}}, "undoes a factor of flow-sde's log-prob, which dance-sde does not have"),
        ({"steps": {"type": "moving-window", "stride": 5}}, "stride=5 leaves steps out"),
        ({"steps": {"type": "moving-window", "order": "random", "decay": 0.1}}, "got order=random"),
        ({"steps": {"type": "window", "size": 3, "low": 2, "high": 4}}, "size=3 does not fit"),
    ],
)
def test_what_cannot_be_had_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DanceGRPO.model_validate(changes)


def test_batch_std_is_offered_where_it_is_exact() -> None:
    algorithm = FlowGRPO.model_validate({"advantage": {"scale": "batch"}, "loss": {"advantage_clip": None, "kl": 0}})

    assert algorithm.advantage.gradient_scale([[0.0, 2.0]]) == pytest.approx(1 / 1.0001)


def test_batch_std_is_refused_for_a_loss_that_does_not_say_it_is_proportional() -> None:
    class Own(PolicyLoss):
        type: Literal["own"] = "own"

        def __call__(self, inputs: LossInputs) -> LossTerms:
            return LossTerms(inputs.new_log_prob, {})

    class OwnAlgorithm(FlowGRPO):
        loss: Own = Own()  # type: ignore[assignment]

    with pytest.raises(ValidationError, match="proportional"):
        OwnAlgorithm(advantage=GroupAdvantage(scale="batch"))


@pytest.mark.parametrize("changes", [{"loss": {"kl": 3e-4}}, {"loss": {"advantage_clip": 5}}])
def test_longcats_kl_and_clamp_can_be_had_with_the_std_of_each_group(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"advantage\.scale=group"):
        LongCat.model_validate(changes)

    assert LongCat.model_validate(changes | {"advantage": {"scale": "group"}}).advantage.gradient_scale([[1, 2]]) == 1


@pytest.mark.parametrize("loss", [{"type": "guard"}, {"type": "divergence"}, {"kl": 0.1, "kl_to": "old"}])
@pytest.mark.parametrize("algorithm", [FlowGRPO, MixGRPO, LongCat])
def test_a_loss_of_one_variant_goes_with_noise_steps_and_advantage_of_another(
    algorithm: type[Algorithm], loss: dict[str, Any]
) -> None:
    both = {"loss": loss, "records": ["mean"], "advantage": {"scale": "group"}}

    assert algorithm.model_validate(both).loss.needs_old_mean


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "digen" / "algos").glob("*.py")), ids=str)
def test_an_algorithm_is_one_short_file(path: Path) -> None:
    parts = {"base", "sde", "steps", "advantages", "losses", "__init__"}

    assert len(path.read_text().splitlines()) <= (400 if path.stem in parts else 150)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "digen" / "algos").glob("*.py")), ids=str)
def test_an_algorithm_imports_no_model_no_backend_and_no_tensor_library(path: Path) -> None:
    """Other than for types, which `make check` (import-linter) forbids too, through any number of modules."""
    tree = ast.parse(path.read_text())
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typing = {id(inner) for check in checks for inner in ast.walk(check)}
    found = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in typing}
    found |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}

    ours = {name for name in found if name.startswith("digen")}
    assert all(name.startswith(("digen.algos.", "digen.config", "digen.errors")) for name in ours)
    assert not {name.partition(".")[0] for name in found} & {"torch", "diffusers", "transformers"}


def test_best_of_n_keeps_the_ends_and_breaks_ties_by_sample_index() -> None:
    algorithm = DanceGRPO(best_of_n=BestOfN(best=2, worst=1))

    assert algorithm.select([0.0, 1.0, 1.0, 1.0, -1.0, -1.0]) == [False, True, True, False, False, True]
    assert algorithm.kept_per_prompt() == 3
    assert DanceGRPO().select([0.0] * 12) == [True] * 12


def test_an_algorithm_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        FlowGRPO().noise = CPS()


def test_the_parts_of_an_algorithm_have_the_types_that_are_documented() -> None:
    assert isinstance(FlowGRPO().steps, AllButLast)
    assert isinstance(DanceGRPO().steps, RandomFraction)


def test_importing_the_algorithms_imports_no_torch() -> None:
    code = (
        "import sys; from importlib.metadata import entry_points;"
        "found = [e.load()() for e in entry_points(group='digen.algorithms') if e.value.startswith('digen.')];"
        "assert len(found) >= 13, found;"
        "sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60).returncode == 0
