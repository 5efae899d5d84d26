"""Advantages and best-of-n selection against numbers of the public implementations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import BestOfN
from digen.algos.dancegrpo import DanceGRPO

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "advantages.json").read_text())
PROMPTS, REWARDS = GOLDEN["inputs"]["prompts"], GOLDEN["inputs"]["rewards"]

ESTIMATORS = {
    "flow_grpo_group_std": GroupAdvantage(),
    "flow_grpo_global_std": GroupAdvantage(scale="batch"),
    "genrl_group_std": GroupAdvantage(),
    "genrl_global_std": GroupAdvantage(scale="batch"),
    "verl_omni_group_std": GroupAdvantage(std="unbiased"),
    "verl_omni_global_std": GroupAdvantage(std="unbiased", scale="batch"),
    "verl_omni_drgrpo": GroupAdvantage(std="none"),
}


def effective(estimator: GroupAdvantage) -> list[float]:
    """Advantages in the file's order, times what the gradient is scaled by."""
    rows = {prompt: [i for i, other in enumerate(PROMPTS) if other == prompt] for prompt in dict.fromkeys(PROMPTS)}
    groups = {prompt: [REWARDS[i] for i in indices] for prompt, indices in rows.items()}
    scale = estimator.gradient_scale(list(groups.values()))
    result = [0.0] * len(REWARDS)
    for prompt, indices in rows.items():
        for i, advantage in zip(indices, estimator(groups[prompt]), strict=True):
            result[i] = advantage * scale
    return result


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_the_reference(name: str) -> None:
    np.testing.assert_allclose(effective(ESTIMATORS[name]), GOLDEN[name], rtol=2e-5, atol=2e-5)


def test_advantages_equal_dancegrpo() -> None:
    ours, golden = effective(DanceGRPO().advantage), GOLDEN["dancegrpo_group"]

    np.testing.assert_allclose([ours[i] for i in golden["order"]], golden["adv"], rtol=2e-5, atol=2e-5)


def test_best_of_n_keeps_what_dancegrpo_keeps() -> None:
    """The reference sorts the whole batch of a rank, which is one group in its recipe."""
    golden = GOLDEN["dancegrpo_hunyuan_bestofn4"]
    algorithm = DanceGRPO(samples_per_prompt=12, best_of_n=BestOfN(best=2, worst=2))

    kept = algorithm.select(GOLDEN["dancegrpo_group"]["adv"])

    assert {i for i, keep in enumerate(kept) if keep} == {*golden["top"], *golden["bottom"]}
