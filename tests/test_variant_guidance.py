"""`flowgrpo-nocfg`: the name stands for no guidance, whatever a model's preset says, and for half the forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from digen.algos.flowgrpo import FlowGRPO, FlowNoCFG
from digen.config import RunConfig
from digen.errors import ConfigError
from digen.presets import derived, resolve


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    path = tmp_path / "three.txt"
    path.write_text("a\nb\nc\n")
    return [f"data.prompts={path}", "data.prompts_per_step=3"]


def guidance(config: RunConfig[Any]) -> tuple[float, float]:
    return config.sampling.guidance, config.sampling.eval_guidance


@pytest.mark.parametrize("model", ["tiny-sd3", "tiny-qwen-image", "tiny-wan"])
def test_the_name_switches_guidance_off_over_a_models_preset_and_nothing_else(model: str, prompts: list[str]) -> None:
    guided, plain = (resolve(name, model, None, prompts, {}) for name in ("flowgrpo", "flowgrpo-nocfg"))

    assert guidance(guided)[0] > 1
    assert guidance(plain) == (1.0, 1.0)
    assert plain.sampling.num_steps == guided.sampling.num_steps
    assert (plain.trainer, plain.reward) == (guided.trainer, guided.reward)


def test_it_makes_half_the_forwards_of_the_same_algorithm(prompts: list[str]) -> None:
    same = ["algorithm.samples_per_prompt=4", "algorithm.loss.kl=0.04", *prompts]
    guided, plain = (derived(resolve(name, "tiny-sd3", None, same, {})) for name in ("flowgrpo", "flowgrpo-nocfg"))

    for key in ("rollout_forwards_per_step", "update_forwards_per_step"):
        assert guided[key] == 2 * plain[key]


def test_it_is_flowgrpo_but_for_the_name() -> None:
    assert FlowNoCFG().model_dump() == FlowGRPO().model_dump() | {"name": "flowgrpo-nocfg"}


def test_who_sets_a_scale_means_it(prompts: list[str]) -> None:
    config = resolve("flowgrpo-nocfg", "tiny-sd3", None, [*prompts, "sampling.eval_guidance=4.5"], {})

    assert guidance(config) == (1.0, 4.5)


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-hunyuan-video"])
def test_a_model_that_embeds_guidance_has_no_forward_to_leave_out_and_is_refused(
    model: str, prompts: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"model '{model}' embeds guidance.*allowed with it: flowgrpo"):
        resolve("flowgrpo-nocfg", model, None, prompts, {})
