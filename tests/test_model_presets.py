"""Presets of the model families: every one is a valid run, and a miniature's is the recipe of the real model."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from digen import plugins, presets
from digen.config import doubts
from digen.presets import payload, resolve

ALGORITHMS = ("flowgrpo", "dancegrpo")
REAL = (
    "qwen-image", "flux1-dev", "z-image", "sd3.5-medium", "sd3.5-large", "wan2.1-1.3b", "wan2.1-14b", "hunyuan-video",
)  # fmt: skip
TWINS = {
    "tiny-qwen-image": "qwen-image",
    "tiny-flux": "flux1-dev",
    "tiny-z-image": "z-image",
    "tiny-sd3": "sd3.5-medium",
    "tiny-wan": "wan2.1-1.3b",
    "tiny-hunyuan-video": "hunyuan-video",
}
SCALED = {
    "steps", "reward",
    "model.name", "model.height", "model.width", "model.num_frames",
    "sampling.num_steps", "sampling.eval_num_steps",
    "data.prompts_per_step",
    "algorithm.samples_per_prompt", "algorithm.best_of_n.best", "algorithm.best_of_n.worst",
    "trainer.backend", "trainer.ranks", "trainer.devices", "trainer.threads", "trainer.dtype", "trainer.batch_size",
    "trainer.activation_checkpointing", "trainer.cpu_offload", "trainer.updates_per_rollout",
    "trainer.lora.rank", "trainer.lora.alpha",
    "generator.ranks", "generator.devices", "generator.threads", "generator.dtype", "generator.batch_size",
}  # fmt: skip
"""What a miniature's preset may change: sizes, counts, placement, and the reward, which must say something of noise."""


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and key != "reward":
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", [*REAL, *TWINS])
def test_every_family_has_a_preset_for_both_algorithms(model: str, algorithm: str) -> None:
    assert (algorithm, model) in presets.presets()
    config = resolve(algorithm, model, None, [], {})
    assert config.model.name == model
    assert plugins.target("models", model).startswith("digen.models.")
    if model in REAL:
        assert config.steps
        assert not config.steps % 2  # two updates a rollout
        assert config.trainer.updates_per_rollout == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("twin", TWINS)
def test_a_miniatures_preset_is_the_recipe_scaled_down(twin: str, algorithm: str) -> None:
    small, real = (dict(flat(payload(resolve(algorithm, name, None, [], {})))) for name in (twin, TWINS[twin]))
    assert small.keys() == real.keys()
    changed = {key for key in real if small[key] != real[key]}
    assert changed <= SCALED, changed - SCALED
    assert small["steps"] == 3
    assert small["generator.devices"] == small["trainer.devices"] == "cpu"


def test_the_numbers_of_the_recipes_are_in_the_presets() -> None:
    """Spot checks against the sources that the files name."""
    flow = {name: resolve("flowgrpo", name, None, [], {}) for name in REAL}
    dance = {name: resolve("dancegrpo", name, None, [], {}) for name in REAL}
    prompts = {name: c.data.prompts_per_step * c.trainer.updates_per_rollout for name, c in flow.items()}
    assert prompts == {
        "qwen-image": 32, "flux1-dev": 48, "z-image": 48, "sd3.5-medium": 48, "sd3.5-large": 48,
        "wan2.1-1.3b": 32, "wan2.1-14b": 48, "hunyuan-video": 48,
    }  # fmt: skip
    assert flow["qwen-image"].algorithm.noise.level == 1.2
    assert flow["flux1-dev"].algorithm.noise.type == "cps"
    assert {flow["z-image"].algorithm.steps.start(0, step, 0, 10) for step in range(40)} == {1, 2, 3}
    assert flow["sd3.5-medium"].algorithm.loss.kl == 0.04
    assert flow["wan2.1-1.3b"].algorithm.noise.type == "wan-sde"
    assert flow["wan2.1-1.3b"].trainer.learning_rate == 1e-4
    assert dance["hunyuan-video"].algorithm.kept_per_prompt() == 8
    assert dance["hunyuan-video"].algorithm.steps.num_trained(16) == 9
    assert dance["qwen-image"].algorithm.steps.num_trained(20) == 11
    assert dance["flux1-dev"].trainer.max_grad_norm == 0.01


def test_a_clip_below_the_noise_of_bfloat16_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("below the noise of bfloat16" in text for text in doubts(resolve("flowgrpo", "flux1-dev", None, [], {})))
    assert not doubts(resolve("flowgrpo", "qwen-image", None, [], {}))
