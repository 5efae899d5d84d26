"""Ten denoising steps in a row against rollouts of the public implementations, with a velocity in closed form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from digen.algos.base import NoiseStrategy, Transition
from digen.algos.sde import CPS, DanceSDE, FlowSDE, clean, euler

TENSORS = load_file(Path(__file__).parent / "golden" / "toy_rollout.safetensors")


def velocity(x: Tensor, at: Transition) -> Tensor:
    return 0.3 * x + 0.1 * torch.sin(3 * x) - 0.05 * at.sigma


def transition(sigmas: Tensor, step: int, x: Tensor) -> Transition:
    return Transition.at(sigmas, torch.full((len(x),), step), x.ndim)


def rollout(noise: NoiseStrategy, sigmas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Latents (K, T + 1, ...), log-probs (K, T) and the clean latents predicted at the last step."""
    x = TENSORS["input/x_T"]
    latents, log_probs, predicted = [x], [], x
    for step, eps in enumerate(TENSORS["input/noise"]):
        at = transition(sigmas, step, x)
        v = velocity(x, at)
        mean, std = noise.mean_std(x, v, at)
        y = mean + std * eps
        log_probs.append(noise.log_prob(y, mean, std))
        predicted, x = clean(x, v, at), y
        latents.append(x)
    return torch.stack(latents, 1), torch.stack(log_probs, 1), predicted


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "noise", "table"),
    [
        ("flow_grpo_sde_a0.7", FlowSDE(level=0.7), "input/sigmas"),
        ("flow_grpo_cps_a0.8", CPS(level=0.8), "input/sigmas"),
        ("dance_eta0.3", DanceSDE(level=0.3), "input/dance_sigmas"),
    ],
)
def test_a_whole_rollout_equals_the_reference(name: str, noise: NoiseStrategy, table: str) -> None:
    latents, log_probs, predicted = rollout(noise, TENSORS[table])

    close(latents, TENSORS[f"{name}/latents"])
    close(log_probs, TENSORS[f"{name}/log_probs"])
    if f"{name}/pred_x0_last" in TENSORS:
        close(predicted, TENSORS[f"{name}/pred_x0_last"])


def test_the_rollout_without_noise_ends_where_the_reference_does() -> None:
    x = TENSORS["input/x_T"]
    for step in range(10):
        at = transition(TENSORS["input/sigmas"], step, x)
        x = euler(x, velocity(x, at), at)

    close(x, TENSORS["ode_euler_sd35/final"])
