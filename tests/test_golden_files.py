"""Every reference file is read by a test and tied to what uses it; those of DDPO, averages and dtypes are read here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from digen import plugins
from digen.algos.advantages import GroupAdvantage
from digen.algos.base import NoiseStrategy, Transition
from digen.algos.sde import CPS, FlowSDE
from digen.backends.training.options import Ema
from digen.config import NOISE_FLOOR, EmaConfig

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
FILES = sorted(path.name for path in GOLDEN.iterdir() if path.suffix in (".json", ".safetensors"))
DDIM = load_file(GOLDEN / "steps_ddpo_ddim.safetensors")
DRIFT: dict[str, dict[str, float]] = json.loads((GOLDEN / "storage_dtype_drift.json").read_text())
SIGMAS = torch.tensor(json.loads((GOLDEN / "schedules.json").read_text())["sd35_shift3_n10"]["sigmas"])


def table() -> dict[str, list[str]]:
    """File -> the other cells of its row in the README."""
    rows: dict[str, list[str]] = {}
    for line in (GOLDEN / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            first, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            for name in re.findall(r"`([^`]+)`", first):
                pattern, braced = re.sub(r"\{.*\}", "{}", name), re.search(r"\{(.*)\}", name)
                rows |= {pattern.format(part): rest for part in (braced[1].split(",") if braced else [""])}
    return rows


def test_every_file_of_reference_numbers_has_a_row_and_every_row_a_file() -> None:
    assert sorted(table()) == FILES
    assert len(FILES) == 18


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_tied_to_algorithms_that_there_are_and_read_by_the_tests_that_its_row_names(file: str) -> None:
    *_, used_by, read_by = table()[file]
    names = {p.name for p in plugins.available("algorithms")}
    stem = file.removeprefix("steps_").rpartition(".")[0]
    modules = re.findall(r"`(test_\w+)`", read_by)

    assert set(re.findall(r"`([\w-]+)`", used_by)) <= names
    assert re.findall(r"`([\w-]+)`", used_by) or "all" in used_by
    assert modules
    assert all(stem in (TESTS / f"{module}.py").read_text() for module in modules)


# DDPO: a diffusion model of another kind, whose step is not ours; the log-prob of a step and the advantages are


def ddim(eta: float, timestep: int) -> tuple[Tensor, Tensor]:
    """Mean and std, float64, of Stable Diffusion 1.5's step of 20 timesteps, from the formula of DDIM (eq. 12, 16)."""
    kept = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2).cumprod(0)
    now, then = kept[timestep], kept[max(timestep - 20, 0)]
    x, noise = DDIM["input/x"].double(), DDIM["input/v"].double()
    std = eta * ((1 - then) / (1 - now) * (1 - now / then)).sqrt()
    clean = (x - (1 - now).sqrt() * noise) / now.sqrt()
    return then.sqrt() * clean + (1 - then - std**2).sqrt() * noise, std.view(1, 1, 1, 1)


@pytest.mark.parametrize("eta", ["0.5", "1.0"])
@pytest.mark.parametrize("step", [0, 1, 25, 48, 49])
def test_the_log_prob_of_a_step_is_the_one_that_ddpo_takes(eta: str, step: int) -> None:
    prefix = f"ddim/eta{eta}/step{step}"
    mean, std = ddim(float(eta), int(DDIM[f"{prefix}/timestep"]))

    ours = FlowSDE().log_prob(DDIM["input/prev_fixed"].double(), mean, std)

    torch.testing.assert_close(ours, DDIM[f"{prefix}/log_prob"].double(), rtol=2e-5, atol=2e-5)


def test_advantages_by_a_groups_std_are_ddpos_once_it_has_seen_enough_of_a_prompt() -> None:
    golden = json.loads((GOLDEN / "advantages.json").read_text())
    prompts, rewards = golden["inputs"]["prompts"], golden["inputs"]["rewards"]
    found = np.zeros(12)
    for prompt in "abc":
        rows = [k for k, other in enumerate(prompts) if other == prompt]
        found[rows] = GroupAdvantage(eps=1e-6)([rewards[k] for k in rows])

    np.testing.assert_allclose(found, golden["ddpo_min_count3"], rtol=2e-5, atol=2e-5)


# Averages of weights


def test_the_average_of_weights_decays_as_flow_grpos_which_follows_every_eighth_step() -> None:
    golden = json.loads((GOLDEN / "windows_and_decays.json").read_text())
    weight = {"w": torch.zeros(1)}
    average = Ema(EmaConfig(decay=0.9, warmup_steps=10), weight)
    found = []
    for step in range(1, 41):
        weight["w"] = torch.full((1,), float(step))
        if (step + 1) % 8 == 0:
            average.update(weight, step)
        found.append(float(average.parts["w"]))

    assert found == pytest.approx(golden["flow_grpo_ema_decay0.9_interval8_param_equals_step"], rel=2e-5)


# What rounding stored latents does to log-probs


def drift(noise: NoiseStrategy, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Change of log-probs by storing next latents in `dtype` after, and before, the log-prob is taken; 8 samples."""
    generator = torch.Generator().manual_seed(step)
    x, v, eps = (torch.randn((8, 16, 32, 32), generator=generator) for _ in range(3))
    at = Transition.at(SIGMAS, torch.full((8,), step), 4)
    mean, std = noise.mean_std(x, v, at)
    y = mean + std * eps
    stored = y.to(dtype)
    exact, rounded = (noise.log_prob(value, mean, std) for value in (y, stored.float()))
    again = noise.log_prob(stored.to(dtype).float(), mean, std)
    return (rounded - exact).abs(), (again - rounded).abs()


@pytest.mark.parametrize("name", DRIFT)
def test_rounding_after_the_log_prob_moves_it_as_far_as_was_measured_and_rounding_before_not_at_all(name: str) -> None:
    """Rule R9. Synthetic latents of the measured shape: the same size, not the same numbers."""
    kind, _, number = name.partition("_step")
    noise: Any = {"sde": FlowSDE(level=0.7), "cps": CPS(level=0.8)}[kind]

    after, before = drift(noise, int(number), torch.bfloat16)
    less, _ = drift(noise, int(number), torch.float16)

    assert 0.2 < float(after.max()) / DRIFT[name]["bf16_max_abs"] < 5
    assert float(less.max()) < float(after.max())
    assert not before.any()


def test_the_noise_floor_that_clip_ranges_are_warned_of_is_the_drift_of_the_steps_that_are_trained() -> None:
    worst = max(found["bf16_max_abs"] for name, found in DRIFT.items() if not name.endswith("step9"))

    assert worst == pytest.approx(NOISE_FLOOR, rel=0.1)
    assert DRIFT["sde_step9"]["bf16_max_abs"] > 100 * NOISE_FLOOR  # the last step, which is never trained
