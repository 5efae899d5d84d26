"""Denoising steps against numbers of the public implementations (tests/golden/README.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from digen.algos.base import NoiseStrategy, Transition
from digen.algos.sde import CPS, DanceSDE, FlowSDE, WanSDE, clean, euler

GOLDEN = Path(__file__).parent / "golden"
FILES = ("flow_grpo_sd35", "flow_grpo_qwen", "flow_grpo_wan", "dancegrpo_flux", "dancegrpo_hunyuan", "genrl_wan")
UNGUARDED = ("genrl_wan", "flow_sde/a0.7_clip0/step0")
"""GenRL divides by 1 - 0.999999 there (std about 100); digen guards that (see the test below)."""


@cache
def tensors(file: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"steps_{file}.safetensors")


def strategy(kind: str, level: str) -> NoiseStrategy:
    number = float(level.lstrip("aet").split("_")[0]) if level else 0.0
    if kind.endswith("cps"):
        return CPS(level=number)
    if kind == "dance":
        return DanceSDE(level=number)
    if not level:
        return WanSDE()
    return FlowSDE(level=number, max_std=0.45 if level.endswith("clip1") else None)


def cases() -> list[tuple[str, str]]:
    """(file, key of a step) of all stochastic steps in all files."""
    found = {(file, key.rsplit("/", 2)[0]) for file in FILES for key in tensors(file) if key.endswith("/near/mean")}
    return sorted(found - {UNGUARDED})


def transition(file: str, step: int) -> Transition:
    x = tensors(file)["input/x"]
    return Transition.at(tensors(file)["input/sigmas"], torch.full((len(x),), step), x.ndim)


def parse(key: str) -> tuple[NoiseStrategy, int]:
    kind, *level, _ = key.split("/")
    return strategy(kind, level[0] if level else ""), step_of(key)


def step_of(key: str) -> int:
    return int(key.split("/step")[1].partition("/")[0])


def reference_std(file: str, key: str, at: Transition) -> Tensor:
    """The full std (N,): files store that, or g alone for the SDE kinds."""
    data, rows = tensors(file), at.h.flatten()
    if f"{key}/near/std" in data:
        return data[f"{key}/near/std"].flatten().expand_as(rows)
    stored = data[f"{key}/near/std_dev_t"]
    return stored if "cps/" in key else stored * rows.sqrt()


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=2e-5, atol=2e-5)


def test_every_kind_of_step_is_covered() -> None:
    kinds = {(file, type(parse(key)[0]).__name__) for file, key in cases()}

    assert len(cases()) == 84
    assert kinds == {
        ("flow_grpo_sd35", "FlowSDE"),
        ("flow_grpo_sd35", "CPS"),
        ("flow_grpo_qwen", "FlowSDE"),
        ("flow_grpo_qwen", "CPS"),
        ("flow_grpo_wan", "WanSDE"),
        ("dancegrpo_flux", "DanceSDE"),
        ("dancegrpo_hunyuan", "DanceSDE"),
        ("genrl_wan", "FlowSDE"),
        ("genrl_wan", "CPS"),
    }


@pytest.mark.parametrize(("file", "key"), cases())
def test_mean_std_and_log_prob_equal_the_reference(file: str, key: str) -> None:
    data, (noise, step) = tensors(file), parse(key)
    at = transition(file, step)

    mean, std = noise.mean_std(data["input/x"], data["input/v"], at)

    close(mean, data[f"{key}/near/mean"])
    close(std.flatten(), reference_std(file, key, at))
    for where, y in (("near", data[f"{key}/near/prev"]), ("fixed", data["input/prev_fixed"])):
        log_prob = noise.log_prob(y, mean, std)
        assert log_prob.shape == (len(y),)
        close(log_prob, data[f"{key}/{where}/log_prob"])
        if f"{key}/{where}/log_prob_f64" in data:
            close(log_prob, data[f"{key}/{where}/log_prob_f64"])


@pytest.mark.parametrize(("file", "key"), cases())
def test_the_next_latents_equal_the_reference(file: str, key: str) -> None:
    data, (noise, step) = tensors(file), parse(key)

    mean, std = noise.mean_std(data["input/x"], data["input/v"], transition(file, step))

    close(mean + std * data["input/eps"], data[f"{key}/near/prev"])


@pytest.mark.parametrize("file", ["dancegrpo_flux", "dancegrpo_hunyuan"])
def test_the_predicted_clean_latents_equal_dancegrpo(file: str) -> None:
    data = tensors(file)
    keys = [key for key in data if key.endswith("/x0")]

    assert keys
    for key in keys:
        close(clean(data["input/x"], data["input/v"], transition(file, step_of(key))), data[key])


@pytest.mark.parametrize(
    ("file", "key"), [(file, key) for file in FILES for key in tensors(file) if "ode/" in key and "x0" not in key]
)
def test_the_step_without_noise_equals_the_reference(file: str, key: str) -> None:
    data = tensors(file)

    close(euler(data["input/x"], data["input/v"], transition(file, step_of(key))), data[key])


def test_flow_sde_is_guarded_where_sigma_is_nearly_one_and_the_reference_explodes() -> None:
    file, key = UNGUARDED
    data = tensors(file)

    _, std = FlowSDE(level=0.7).mean_std(data["input/x"], data["input/v"], transition(file, 0))
    theirs = data[f"{key}/near/std_dev_t"] * data[f"{key}/near/sqrt_neg_dt"]

    assert data["input/sigmas"][0] != 1
    assert theirs.min() > 100
    assert std.max() < 1
