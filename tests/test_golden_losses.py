"""The clipped loss, its statistics, its gradient and the KL against numbers of the public implementations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from digen.algos.base import LossInputs, Transition
from digen.algos.losses import ClippedLoss
from digen.algos.sde import CPS, FlowSDE

GOLDEN = Path(__file__).parent / "golden"
LOSSES = json.loads((GOLDEN / "losses.json").read_text())
TENSORS = load_file(GOLDEN / "loss_tensors.safetensors")
SIGMAS = torch.tensor(json.loads((GOLDEN / "schedules.json").read_text())["sd35_shift3_n10"]["sigmas"])
FLOW_GRPO = [name for name in LOSSES["flow_grpo"] if name.startswith("rationorm0")]


def inputs(step: int = 5, noise: FlowSDE | CPS | None = None, advantages: str = "advantages") -> LossInputs:
    data, means = LOSSES["inputs"], TENSORS["mean_new"]
    at = Transition.at(SIGMAS, torch.full((len(means),), step), means.ndim)
    _, std = (noise or FlowSDE(level=0.7)).mean_std(means, means, at)
    return LossInputs(
        new_log_prob=torch.tensor(data["log_prob_new"]).requires_grad_(),
        old_log_prob=torch.tensor(data["old_log_prob"]),
        advantage=torch.tensor(data[advantages]),
        mean=means.clone().requires_grad_(),
        std=std,
        at=at,
        reference_mean=TENSORS["mean_ref"],
    )


def close(ours: Tensor, theirs: object) -> None:
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=ours.dtype), rtol=2e-5, atol=2e-5)


def close_small(ours: Tensor, theirs: float) -> None:
    """KLs are far below the absolute tolerance, so only the relative one is used."""
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=2e-5, atol=0.0)


def gradient(loss: Tensor, given: LossInputs) -> Tensor:
    loss.backward()
    assert given.new_log_prob.grad is not None
    return given.new_log_prob.grad


def parse(name: str) -> tuple[float, float, int]:
    """(clip, KL weight, step) from a name such as rationorm0_clip1e-05_beta0.04_sd3step1."""
    _, clip, beta, step = name.split("_")
    return float(clip[4:]), float(beta[4:]), int(step[7:])


@pytest.mark.parametrize("name", FLOW_GRPO)
def test_loss_statistics_and_gradient_equal_flow_grpo(name: str) -> None:
    golden, (clip, kl, step) = LOSSES["flow_grpo"][name], parse(name)
    given = inputs(step)

    terms = ClippedLoss(clip=clip, kl=kl)(given)
    stats = {key: value.mean() for key, value in terms.stats.items()}

    assert terms.loss.shape == (12,)
    close(given.std.flatten() / given.at.h.flatten().sqrt(), [golden["std_dev_t"]] * 12)
    close(terms.loss.mean(), golden["loss"])
    close(stats["policy_loss"], golden["policy_loss"])
    close(terms.stats["ratio"], golden["ratio"])
    close(stats["clip_fraction"], golden["clipfrac"])
    close(stats["clip_high"], golden["clipfrac_gt_one"])
    close(stats["clip_low"], golden["clipfrac_lt_one"])
    close_small(stats["approx_kl"], golden["approx_kl"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])
    assert ("kl" in stats) == (kl > 0)
    if kl > 0:
        close_small(stats["kl"], golden["kl_loss"])


@pytest.mark.parametrize("accumulation", [4, 12])
def test_loss_and_gradient_equal_dancegrpo_up_to_its_constant_divisor(accumulation: int) -> None:
    golden, given = LOSSES["dancegrpo"][f"clip0.0001_gas{accumulation}_T9"], inputs()

    terms = ClippedLoss(clip=1e-4)(given)
    loss = terms.loss.mean() / (accumulation * 9)

    close_small(loss.detach(), golden["loss"])
    close(terms.stats["ratio"], golden["ratio"])
    close(gradient(loss, given), golden["grad_log_prob"])


def test_each_of_dancegrpos_two_video_losses_is_our_loss_of_that_advantage() -> None:
    golden = LOSSES["dancegrpo"]["hunyuan_vq1_mq1_gas4_T9"]

    vq = ClippedLoss(clip=1e-4)(inputs()).loss.mean() / 36
    mq = ClippedLoss(clip=1e-4)(inputs(advantages="advantages_mq")).loss.mean() / 36

    close_small(vq.detach(), golden["vq_loss"])
    close_small(mq.detach(), golden["mq_loss"])


@pytest.mark.parametrize("clip", ["0.0001", "1e-05"])
def test_loss_and_gradient_equal_verl_omni(clip: str) -> None:
    golden, given = LOSSES["verl_omni"][f"flow_grpo_clip{clip}_nois"], inputs()

    terms = ClippedLoss(clip=float(clip))(given)

    close(terms.loss.mean(), golden["loss"])
    close(terms.stats["clip_fraction"].mean(), golden["metrics"]["actor/pg_clipfrac"])
    close(terms.stats["ratio"].mean(), golden["metrics"]["actor/ratio_mean"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])


def test_loss_and_gradient_equal_mixgrpo_up_to_its_constant_divisor() -> None:
    golden, given = LOSSES["mixgrpo"]["clip1e-4_gas3_T4_klcoeff0"], inputs()

    loss = ClippedLoss(clip=1e-4)(given).loss.mean() / 12

    close_small(loss.detach(), golden["loss"])
    close(gradient(loss, given), golden["grad_log_prob"])


def test_the_kl_over_g_squared_equals_verl_omni() -> None:
    terms = ClippedLoss(kl=1.0, kl_kind="mean-over-g2")(inputs(step=1))

    close_small(terms.stats["kl"].mean(), LOSSES["verl_omni"]["kl_sd3step1"]["loss"])


@pytest.mark.parametrize(("kind", "kl_kind"), [("flow_sde", "gaussian"), ("flow_cps", "squared")])
@pytest.mark.parametrize("step", [1, 5])
def test_loss_kl_and_gradient_equal_genrl(kind: str, kl_kind: Any, step: int) -> None:
    golden, given = LOSSES["genrl"][f"{kind}_reweight_None_sd3step{step}"], inputs(step)

    loss = ClippedLoss(clip=golden["clip_range"], kl=golden["beta"], kl_kind=kl_kind)
    terms = loss(given)

    close(terms.loss.mean(), golden["loss"])
    close(terms.stats["policy_loss"].mean(), golden["policy_loss"])
    close_small(terms.stats["kl"].mean(), golden["kl_loss"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])
