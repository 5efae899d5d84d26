"""What the losses of the variants promise beyond the reference numbers: rows, signs, and what each of them is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digen.algos.base import LossInputs, Transition
from digen.algos.losses import ClippedLoss, DivergenceLoss, GuardLoss, RatioLoss
from digen.algos.sde import FlowSDE

SCHEDULES: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "schedules.json").read_text())
TABLE = torch.tensor(SCHEDULES["sd35_shift3_n10"]["sigmas"])


def at(step: int, rows: int = 3, ndim: int = 4) -> Transition:
    return Transition.at(TABLE, torch.full((rows,), step), ndim)


def normal(seed: int, shape: tuple[int, ...] = (3, 4, 5, 5)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows() -> LossInputs:
    """Six rows of a policy that has not moved."""
    old, mean = normal(0, (6,)), normal(1, (6, 4, 2, 2))
    advantage = torch.tensor([1.5, -0.5, 0.25, -2.0, 0.0, 0.75])
    return LossInputs(
        old.clone().requires_grad_(),
        old,
        advantage,
        mean.requires_grad_(),
        torch.full((6, 1, 1, 1), 0.3),
        at(2, rows=6),
    )


LOSSES: list[RatioLoss] = [ClippedLoss(reweight="step"), GuardLoss(), DivergenceLoss()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.type)
def test_before_the_policy_moves_every_variants_gradient_points_where_the_clipped_ones_does(loss: RatioLoss) -> None:
    given, plain = rows(), rows()
    given = replace(given, old_mean=given.mean.detach())
    ClippedLoss()(plain).loss.sum().backward()

    terms = loss(given)
    terms.loss.sum().backward()

    assert torch.equal(terms.stats["ratio"], torch.ones(6))
    assert not terms.stats["clip_fraction"].any()
    weight = given.new_log_prob.grad / plain.new_log_prob.grad  # type: ignore[operator]
    assert ((weight > 0) | (given.advantage == 0)).all()
    torch.testing.assert_close(weight[given.advantage != 0], weight[:1].expand(5))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.type)
def test_rows_of_a_variant_do_not_see_each_other_and_its_loss_is_proportional_to_the_advantage(loss: RatioLoss) -> None:
    loss = loss.model_copy(update={"advantage_clip": None})
    where = Transition.at(TABLE, torch.tensor([0, 1, 2, 5, 7, 8]), 4)
    mean = normal(1, (6, 4, 2, 2))
    fields: dict[str, Any] = {
        "new_log_prob": normal(2, (6,)) * 1e-3,
        "old_log_prob": normal(3, (6,)) * 1e-3,
        "advantage": normal(4, (6,)),
        "mean": mean,
        "std": FlowSDE().mean_std(mean, mean, where)[1],
        "old_mean": mean + 1e-3 * normal(5, (6, 4, 2, 2)),
    }
    whole = loss(LossInputs(**fields, at=where)).loss

    for row in range(6):
        alone = {name: value[row : row + 1] for name, value in fields.items()}
        at_row = Transition.at(TABLE, torch.tensor([0, 1, 2, 5, 7, 8])[row : row + 1], 4)
        torch.testing.assert_close(loss(LossInputs(**alone, at=at_row)).loss, whole[row : row + 1], rtol=1e-6, atol=0)
    larger = loss(LossInputs(**fields | {"advantage": 3 * fields["advantage"]}, at=where)).loss
    assert loss.is_proportional
    torch.testing.assert_close(larger, 3 * whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.type)
@pytest.mark.parametrize("has_moved", [False, True])
def test_a_group_of_equal_rewards_has_no_gradient_in_any_variant(loss: RatioLoss, has_moved: bool) -> None:
    """P09: it teaches nothing, and nothing else than a KL may move weights."""
    given = rows()
    old = given.mean.detach() + (0.1 if has_moved else 0.0)
    given = replace(given, old_mean=old, old_log_prob=given.old_log_prob - 0.1 * has_moved, advantage=torch.zeros(6))

    loss(given).loss.sum().backward()

    assert not any(tensor.grad is not None and tensor.grad.any() for tensor in (given.new_log_prob, given.mean))


def test_the_guard_centres_ratios_that_lie_below_one_and_gives_all_steps_one_scale() -> None:
    """Of a policy that has moved in one direction, log-ratios average to minus its divergence: what b takes away."""
    shape = (512, 4, 4, 4)
    found: dict[str, list[Tensor]] = {"clipped": [], "guard": []}
    for step in (1, 7):
        old, where = normal(step, shape), at(step, rows=512)
        std = FlowSDE().mean_std(old, old, where)[1]
        y, mean = old + std * normal(2, shape), old + 0.1 * normal(3, shape)
        given = {"old_mean": old, "mean": mean, "std": std, "at": where, "advantage": torch.ones(512)}
        log_probs = [FlowSDE().log_prob(y, m, std) for m in (mean, old)]
        for loss in (ClippedLoss(), GuardLoss()):
            terms = loss(LossInputs(*log_probs, **given))  # type: ignore[arg-type]
            found[loss.type].append(terms.stats["ratio"].log())

    off = {kind: [float(one.mean().abs() / one.std()) for one in ratios] for kind, ratios in found.items()}
    scale = {kind: float(ratios[1].std() / ratios[0].std()) for kind, ratios in found.items()}

    assert all(one.mean() < 0 for one in found["clipped"])
    assert min(off["clipped"]) > 0.3
    assert max(off["guard"]) < 0.1
    assert scale["clipped"] > 1.5
    assert scale["guard"] == pytest.approx(1, abs=0.1)


def test_the_gradient_of_the_guarded_ratio_is_the_one_around_the_old_mean() -> None:
    """b has a gradient too: d log r / d mean = (y - old mean) / std per latent, wherever the mean has gone."""
    old, noise = normal(1, (2, 3)), normal(2, (2, 3))
    where, std = at(4, rows=2, ndim=2), torch.full((2, 1), 0.3)
    mean = (old + 0.05).requires_grad_()
    y = old + std * noise
    given = LossInputs(
        FlowSDE().log_prob(y, mean, std), FlowSDE().log_prob(y, old, std), -torch.ones(2), mean, std, where, None, old
    )

    terms = GuardLoss(clip=10.0)(given)
    terms.loss.sum().backward()

    expected = terms.stats["ratio"][:, None] * (y - old) / std / 3 / where.h
    torch.testing.assert_close(mean.grad, expected)


def test_a_divergence_drops_only_what_is_pushed_further_away() -> None:
    ratios = torch.tensor([1.01, 0.99, 1.01, 0.99, 1.0, 1.01])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    old = torch.tensor([0.02] * 5 + [0.001])[:, None]  # the last one is near
    given = LossInputs(
        ratios.log(), torch.zeros(6), advantage, torch.zeros(6, 1), torch.ones(6, 1), at(2, rows=6, ndim=2), None, old
    )

    terms = DivergenceLoss(limit=1e-4)(given)

    torch.testing.assert_close(terms.loss, torch.tensor([0.0, -0.99, 1.01, 0.0, -1.0, -1.01]))
    assert terms.stats["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_the_reweighting_gives_all_steps_the_same_gradient_by_the_velocity() -> None:
    """What it is for: Flow-SDE's log-prob alone has gradients that differ by a factor of four between these steps."""
    sizes: dict[str, list[float]] = {"none": [], "step": []}
    for step in (1, 3, 5, 7):
        for reweight in ("none", "step"):
            x, v, where = normal(0), normal(1).requires_grad_(), at(step)
            mean, std = FlowSDE().mean_std(x, v, where)
            y = (mean + std * normal(2)).detach()
            log_prob = FlowSDE().log_prob(y, mean, std)
            given = LossInputs(log_prob, log_prob.detach(), torch.ones(3), mean, std, where)
            ClippedLoss.model_validate({"reweight": reweight})(given).loss.sum().backward()
            assert v.grad is not None
            sizes[reweight].append(float(v.grad.norm()))

    assert max(sizes["none"]) / min(sizes["none"]) > 2
    assert max(sizes["step"]) / min(sizes["step"]) < 1.001


def test_a_kl_to_the_old_policy_without_its_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the mean at rollout"):
        ClippedLoss(kl=0.1, kl_to="old")(rows())
    with pytest.raises(ValueError, match="records"):
        GuardLoss()(rows())
