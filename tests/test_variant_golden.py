"""The variants of GRPO against numbers of their public implementations: steps, losses, advantages, windows."""

from __future__ import annotations

import json
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import LossInputs, NoiseStrategy, Transition
from digen.algos.dr_grpo import DrGRPO
from digen.algos.flow_dppo import FlowDPPO
from digen.algos.flowgrpo import FlowCPS, FlowFast
from digen.algos.grpo_guard import GRPOGuard
from digen.algos.longcat import LongCat
from digen.algos.losses import ClippedLoss, DivergenceLoss, GuardLoss
from digen.algos.matching import Matching, NFTLoss
from digen.algos.mixgrpo import MixGRPO
from digen.algos.sde import CPS, DanceSDE, FlowSDE, euler
from digen.algos.steps import MovingWindow

GOLDEN = Path(__file__).parent / "golden"
LOSSES = json.loads((GOLDEN / "losses.json").read_text())
TENSORS = load_file(GOLDEN / "loss_tensors.safetensors")
ADVANTAGES = json.loads((GOLDEN / "advantages.json").read_text())
WINDOWS = json.loads((GOLDEN / "windows_and_decays.json").read_text())
SIGMAS = torch.tensor(json.loads((GOLDEN / "schedules.json").read_text())["sd35_shift3_n10"]["sigmas"])
STEP_FILES = ("mixgrpo_flux", "flow_factory_sd35", "verl_omni_qwen", "unirl_video")
LN_SQRT_2PI = 0.9189385332046727


def close(ours: Tensor, theirs: Any) -> None:
    expected = torch.as_tensor(theirs, dtype=ours.dtype).expand_as(ours)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


def close_small(ours: Tensor, theirs: float) -> None:
    """KLs are far below the absolute tolerance, so only the relative one is used."""
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=2e-5, atol=0.0)


# Steps


@cache
def tensors(file: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"steps_{file}.safetensors")


def strategy(kind: str, level: str) -> NoiseStrategy:
    number = float(level.lstrip("aet"))
    return {"c": CPS, "d": DanceSDE}.get(kind.lower()[0], FlowSDE)(level=number)


def transition(file: str, step: int) -> Transition:
    x, sigmas = tensors(file)["input/x"], tensors(file)["input/sigmas"].float()
    return Transition.at(sigmas, torch.full((len(x),), step), x.ndim)


def cases() -> list[tuple[str, str, str, int]]:
    """(file, kind, level, step) of every stochastic step."""
    found = {
        (file, kind, level, int(step.removeprefix("step")))
        for file in STEP_FILES
        for kind, level, step, *_ in (key.split("/") for key in tensors(file) if key.endswith("near/log_prob"))
    }
    return sorted(found)


def test_every_kind_of_step_of_the_four_projects_is_covered() -> None:
    assert len(cases()) == 85
    assert {(file, kind) for file, kind, *_ in cases()} == {
        ("mixgrpo_flux", "flow"),
        ("mixgrpo_flux", "dance"),
        *(("flow_factory_sd35", kind) for kind in ("Flow-SDE", "Dance-SDE", "CPS")),
        *(("verl_omni_qwen", kind) for kind in ("sde", "dance_sde", "cps")),
        *(("unirl_video", kind) for kind in ("flow", "dance", "cps")),
    }


@pytest.mark.parametrize(("file", "kind", "level", "step"), cases())
def test_a_step_and_its_log_prob_equal_the_projects_own(file: str, kind: str, level: str, step: int) -> None:
    data, at, noise = tensors(file), transition(file, step), strategy(kind, level)
    prefix = f"{kind}/{level}/step{step}"

    mean, std = noise.mean_std(data["input/x"], data["input/v"], at)

    if f"{prefix}/near/mean" in data:
        close(mean, data[f"{prefix}/near/mean"])
    close(mean + std * data["input/eps"], data[f"{prefix}/near/prev"])
    for where, y in (("near", data[f"{prefix}/near/prev"]), ("fixed", data["input/prev_fixed"])):
        theirs = data[f"{prefix}/{where}/log_prob"]
        constants = std.flatten().log() + LN_SQRT_2PI
        # MixGRPO's dance step leaves the constants out; they cancel in ratios.
        close(noise.log_prob(y, mean, std), theirs - constants if (file, kind) == ("mixgrpo_flux", "dance") else theirs)


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
@pytest.mark.parametrize("level", ["eta0.25", "eta0.7"])
def test_unirls_log_prob_of_rounded_latents_is_that_of_the_rounded_value(kind: str, level: str) -> None:
    """Rule R9: what is stored in bfloat16 must be rounded before its log-prob is taken."""
    data, at, noise = tensors("unirl_video"), transition("unirl_video", 3), strategy(kind, level)
    prefix = f"{kind}/{level}/step3_bf16in"
    mean, std = noise.mean_std(data["input/x"].bfloat16(), data["input/v"].bfloat16(), at)

    close(mean, data[f"{prefix}/mean"])
    close(noise.log_prob(data[f"{prefix}/prev_out"], mean, std), data[f"{prefix}/log_prob"])


@pytest.mark.parametrize(
    ("file", "key"),
    [
        (file, key)
        for file in STEP_FILES
        for key in tensors(file)
        if key.endswith(("ode/prev", "next")) and "/step" in key
    ],
)
def test_the_step_without_noise_equals_the_projects_own(file: str, key: str) -> None:
    step = int(key.partition("/step")[2].partition("/")[0])

    close(euler(tensors(file)["input/x"], tensors(file)["input/v"], transition(file, step)), tensors(file)[key])


# Losses


def inputs(step: int = 1, noise: NoiseStrategy | None = None, **changes: Any) -> LossInputs:
    data, means = LOSSES["inputs"], TENSORS["mean_new"]
    at = Transition.at(SIGMAS, torch.full((len(means),), step), means.ndim)
    fields: dict[str, Any] = {
        "new_log_prob": torch.tensor(data["log_prob_new"]).requires_grad_(),
        "old_log_prob": torch.tensor(data["old_log_prob"]),
        "advantage": torch.tensor(data["advantages"]),
        "mean": means.clone().requires_grad_(),
        "std": (noise or FlowSDE(level=0.7)).mean_std(means, means, at)[1],
        "at": at,
        "reference_mean": TENSORS["mean_ref"],
        "old_mean": TENSORS["mean_old"],
    }
    return LossInputs(**(fields | changes))


def gradient(loss: Tensor, given: LossInputs) -> Tensor:
    loss.backward()
    assert given.new_log_prob.grad is not None
    return given.new_log_prob.grad


GUARD = [name for name in LOSSES["flow_grpo"] if name.startswith("rationorm1")]


@pytest.mark.parametrize("name", GUARD)
def test_the_guarded_loss_its_shares_and_its_gradient_equal_grpo_guard(name: str) -> None:
    golden, (_, clip, beta, step) = LOSSES["flow_grpo"][name], name.split("_")
    given = inputs(int(step[7:]))

    terms = GuardLoss(clip=float(clip[4:]), kl=float(beta[4:]))(given)

    close(terms.loss.mean(), golden["loss"])
    close(terms.stats["policy_loss"].mean(), golden["policy_loss"])
    close(terms.stats["ratio"], golden["ratio"])
    close(terms.stats["clip_fraction"].mean(), golden["clipfrac"])
    close(terms.stats["clip_high"].mean(), golden["clipfrac_gt_one"])
    close(terms.stats["clip_low"].mean(), golden["clipfrac_lt_one"])
    close_small(terms.stats["approx_kl"].mean(), golden["approx_kl"])
    if golden["kl_loss"] is not None:
        close_small(terms.stats["kl"].mean(), golden["kl_loss"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])


def test_the_guards_golden_names_are_all_there() -> None:
    assert len(GUARD) == 12


@pytest.mark.parametrize("clip", ["0.0001", "1e-05"])
def test_the_guarded_loss_and_its_gradient_equal_verl_omni(clip: str) -> None:
    golden, given = LOSSES["verl_omni"][f"grpo_guard_clip{clip}_sd3step1"], inputs()

    terms = GuardLoss(clip=float(clip))(given)

    close(terms.loss.mean(), golden["loss"])
    close(terms.stats["ratio"].mean(), golden["metrics"]["actor/ratio_mean"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])


def test_the_guarded_ratio_equals_flow_factorys() -> None:
    close(GuardLoss()(inputs()).stats["ratio"], LOSSES["flow_factory_guard"]["ratio"])


@pytest.mark.parametrize("limit", ["1e-05", "1e-06", "1e-08"])
def test_the_trust_region_its_mask_and_its_gradient_equal_flow_dppo(limit: str) -> None:
    golden, given = LOSSES["verl_omni"][f"flow_dppo_thr{limit}_sd3step1"], inputs()
    metrics = golden["metrics"]

    terms = DivergenceLoss(limit=float(limit))(given)

    close(terms.loss.mean(), golden["loss"])
    close_small(terms.stats["old_kl"].mean(), metrics["actor/kl_new_old_mean"])
    close_small(terms.stats["old_kl"].max(), metrics["actor/kl_new_old_max"])
    close((terms.stats["old_kl"] >= float(limit)).float().mean(), metrics["actor/kl_mask_fraction"])
    close(terms.stats["clip_fraction"].mean(), metrics["actor/masked_fraction"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])


@pytest.mark.parametrize("step", [1, 5])
def test_the_reweighted_loss_its_kl_and_its_gradient_equal_longcat(step: int) -> None:
    golden, given = LOSSES["genrl"][f"flow_sde_reweight_longcat_sd3step{step}"], inputs(step)
    loss = ClippedLoss(clip=golden["clip_range"], kl=golden["beta"], kl_kind="gaussian", reweight="step")

    terms = loss(given)

    close(terms.stats["policy_loss"].mean() / golden["reweight_scale"], golden["policy_loss"])
    close_small(terms.stats["kl"].mean(), golden["kl_loss"])
    close(terms.loss.mean(), golden["loss"])
    close(loss.kl_weight(given), golden["reweight_scale_kl"])
    close(gradient(terms.loss.mean(), given), golden["grad_log_prob"])


def test_genrl_does_not_reweight_cps_and_nor_can_we() -> None:
    assert {LOSSES["genrl"][f"flow_cps_reweight_longcat_sd3step{step}"]["reweight_scale"] for step in (1, 5)} == {1.0}
    with pytest.raises(ValueError, match="reweight=step undoes a factor of flow-sde"):
        LongCat(noise=CPS())


def test_the_kl_of_log_ratios_and_its_gradient_equal_mixgrpo() -> None:
    golden, given = LOSSES["mixgrpo"]["clip1e-4_gas3_T4_klcoeff0.1"], inputs(reference_mean=None, old_mean=None)

    terms = ClippedLoss(clip=1e-4, kl=0.1, kl_kind="log-ratio", kl_to="old")(given)

    close_small(terms.stats["kl"].mean() / 12, golden["kl_loss"])
    close_small(terms.loss.mean().detach() / 12, golden["loss"])
    theirs = torch.tensor(golden["grad_log_prob"])
    torch.testing.assert_close(gradient(terms.loss.mean() / 12, given), theirs, rtol=2e-5, atol=1e-11)


# Losses on samples that are noised anew


def matched(velocity: str = "nft_v_new", **changes: Any) -> LossInputs:
    """The reference's x_t, at levels t that are in no table; what it calls eps - x0 is our next latents."""
    t = TENSORS["nft_t"].view(-1, 1, 1, 1)
    fields: dict[str, Any] = {
        "new_log_prob": torch.zeros(12),
        "old_log_prob": torch.zeros(12),
        "advantage": torch.tensor(LOSSES["inputs"]["advantages"]),
        "mean": TENSORS[velocity].clone().requires_grad_(),
        "std": t,
        "at": Transition(t, t, t, t),
        "reference_mean": TENSORS["nft_v_ref"],
        "old_mean": TENSORS["nft_v_old"],
        "next_latents": TENSORS["nft_eps"] - TENSORS["nft_x0"],
    }
    return LossInputs(**(fields | changes))


def test_latents_noised_anew_are_the_references() -> None:
    t = TENSORS["nft_t"].view(-1, 1, 1, 1)

    close((1 - t) * TENSORS["nft_x0"] + t * TENSORS["nft_eps"], TENSORS["nft_xt"])


@pytest.mark.parametrize("beta", ["0.1", "1"])
def test_the_loss_its_parts_and_the_gradients_norm_equal_diffusion_nft(beta: str) -> None:
    golden, given = LOSSES["diffusion_nft"][f"beta{beta}"], matched()
    loss = NFTLoss(beta=float(beta))

    terms = loss(given)
    terms.loss.mean().backward()

    close(loss.share(given.advantage), golden["r"])
    close(loss._error(given.old_mean + float(beta) * (given.mean - given.old_mean), given), golden["positive_loss"])
    close(loss._error(given.old_mean - float(beta) * (given.mean - given.old_mean), given), golden["negative_loss"])
    close(terms.loss.mean(), golden["loss"])
    close_small(terms.stats["kl"].mean(), golden["kl_div_loss"])
    assert given.mean.grad is not None
    close_small(given.mean.grad.norm(), golden["grad_v_norm"])


@pytest.mark.parametrize("beta", ["0.1", "0.5", "1"])
def test_the_loss_and_the_gradients_norm_equal_verl_omnis_nft(beta: str) -> None:
    golden, given = LOSSES["verl_omni"][f"nft_beta{beta}"], matched()

    terms = NFTLoss(beta=float(beta))(given)
    terms.loss.mean().backward()

    close(terms.loss.mean(), golden["loss"])
    close_small(terms.stats["old_kl"].mean(), golden["metrics"]["actor/old_deviate"])
    assert given.mean.grad is not None
    close_small(given.mean.grad.norm(), golden["grad_v_norm"])


MODES = {"all": "continuous", "positive-only": "positive_only", "negative-only": "negative_only"}


@pytest.mark.parametrize("mode", ["all", "positive-only", "negative-only", "one-only", "binary"])
def test_how_much_a_sample_is_taken_for_a_good_one_equals_verl_omni(mode: Any) -> None:
    golden = LOSSES["verl_omni"]["nft_reward_prob"][MODES.get(mode, mode.replace("-", "_"))]

    close(NFTLoss(advantages=mode).share(torch.tensor(LOSSES["inputs"]["advantages"])), golden)


@pytest.mark.parametrize("weight", ["uniform", "t", "t2", "huber", "ghuber"])
def test_the_weighted_log_prob_of_a_velocity_equals_awms(weight: Any) -> None:
    golden = LOSSES["flow_factory_awm"][{"uniform": "Uniform", "t2": "t**2"}.get(weight, weight)]
    given = matched()
    assert given.next_latents is not None

    mean, std = Matching(weight=weight).mean_std(TENSORS["nft_xt"], given.mean, given.at)

    close(Matching(weight=weight).log_prob(given.next_latents, mean, std), golden)


# Advantages


def effective(estimator: GroupAdvantage, rewards: str = "rewards") -> list[float]:
    """Advantages in the file's order, times what the gradient is scaled by."""
    prompts, values = ADVANTAGES["inputs"]["prompts"], ADVANTAGES["inputs"][rewards]
    rows = {prompt: [i for i, other in enumerate(prompts) if other == prompt] for prompt in dict.fromkeys(prompts)}
    groups = {prompt: [values[i] for i in indices] for prompt, indices in rows.items()}
    scale = estimator.gradient_scale(list(groups.values()))
    result = [0.0] * len(values)
    for prompt, indices in rows.items():
        for i, advantage in zip(indices, estimator(groups[prompt]), strict=True):
            result[i] = advantage * scale
    return result


def test_longcats_advantages_are_divided_by_the_largest_std_of_a_group() -> None:
    advantage = LongCat().advantage
    assert isinstance(advantage, GroupAdvantage)

    np.testing.assert_allclose(effective(advantage), ADVANTAGES["genrl_max_group_std"], rtol=2e-5, atol=2e-5)


def test_longcats_advantages_of_two_rewards_add_up() -> None:
    advantage = LongCat().advantage
    assert isinstance(advantage, GroupAdvantage)
    both = [a + b for a, b in zip(effective(advantage), effective(advantage, "rewards2"), strict=True)]

    np.testing.assert_allclose(both, ADVANTAGES["genrl_weight_advantages_max_std_w1_1"], rtol=2e-5, atol=2e-5)


def test_dr_grpos_advantages_have_the_unit_of_the_reward() -> None:
    advantage = DrGRPO().advantage
    assert isinstance(advantage, GroupAdvantage)

    np.testing.assert_allclose(effective(advantage), ADVANTAGES["verl_omni_drgrpo"], rtol=2e-5, atol=2e-5)


# Windows


def runs(window: MovingWindow, num_steps: int) -> list[list[int]]:
    """[first step of the window, global steps in a row that it stays there]."""
    starts = [window.start(0, step, 0, num_steps) for step in range(510)]
    return [[start, len(list(same))] for start, same in groupby(starts)]


@pytest.mark.parametrize(
    ("name", "decay"),
    [("mixgrpo_progressive_iters25_size4_max23_overlap1_rollback", 0.0), ("mixgrpo_exp_decay_k0.1_thre13", 0.1)],
)
def test_the_window_moves_as_mixgrpos_up_to_where_its_windows_are_cut_short(name: str, decay: float) -> None:
    """Theirs goes on to 20, 21, 22 (three, two, one step long) and to an empty one, ours back to the beginning."""
    window, golden = MovingWindow(size=4, high=23, decay=decay), WINDOWS[name]["run_lengths"]

    assert runs(window, 25)[:20] == golden[:20]
    assert runs(window, 25)[20][0] == 0
    assert golden[23][0] == -1


def test_a_random_window_has_the_positions_of_mixgrpos() -> None:
    golden = WINDOWS["mixgrpo_random_seed0_19"]
    window = MovingWindow(size=4, high=23, order="random")

    assert {window.start(seed, 0, 0, 25) for seed in range(500)} == set(range(20))
    assert set(golden) <= set(range(20))


# Whole recipes


def test_the_recipes_are_those_of_their_sources() -> None:
    window, guard, dppo = MixGRPO().steps, GRPOGuard().loss, FlowDPPO().loss

    assert isinstance(window, MovingWindow)
    assert [window.trained(0, step, 7, 0, 25) for step in (0, 24, 25)] == [(0, 1, 2, 3), (0, 1, 2, 3), (1, 2, 3, 4)]
    assert window.noisy(0, 25, 7, 25) == (1, 2, 3, 4)
    assert MixGRPO().same_initial_noise
    assert guard == GuardLoss(clip=2e-6, advantage_clip=5.0, kl=0.0)
    assert dppo == DivergenceLoss(limit=1e-5, advantage_clip=None, kl=0.0)
    assert LongCat().noise == FlowSDE(level=1.0, max_std=0.45)
    assert LongCat().steps.num_trained(16) == 1
    assert FlowCPS().noise == FlowFast().noise == CPS(level=0.8)
    assert (FlowCPS().steps.num_trained(10), FlowFast().steps.num_trained(10)) == (9, 3)
    assert FlowFast().steps.noisy(3, 1, 4, 10) == FlowFast().steps.trained(3, 1, 4, 5, 10)
    assert (
        max(step for seed in range(50) for step in FlowFast().steps.noisy(seed, 0, 0, 6)) == 2
    )  # FLUX: exactly 0, 1, 2
