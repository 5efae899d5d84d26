"""The published models on the meta device, from their public configurations: parameters, adapters, blocks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

from digen import plugins
from digen.backends.worker import add_adapters
from digen.config import ModelConfig


@dataclass(frozen=True)
class Published:
    """Settings of `transformer/config.json` that differ from the class's defaults or matter for the size."""

    name: str
    config: dict[str, Any]
    billions: float
    adapters: int
    """Linear layers among the default LoRA targets."""
    blocks: int


PUBLISHED = (
    Published(
        "qwen-image",
        {
            "in_channels": 64, "out_channels": 16, "num_layers": 60, "num_attention_heads": 24,
            "joint_attention_dim": 3584,
        },
        20.43,
        60 * 8,
        60,
    ),
    Published(
        "flux1-dev",
        {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "guidance_embeds": True},
        11.90,
        19 * 12 + 38 * 3,
        19 + 38,
    ),
    Published(
        "sd3.5-medium",
        {
            "sample_size": 128, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
            "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
        },
        2.24,
        24 * 8 - 1,  # the last block has no text to put out
        24,
    ),
    Published(
        "sd3.5-large",
        {
            "sample_size": 128, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
            "pos_embed_max_size": 192, "qk_norm": "rms_norm",
        },
        8.06,
        38 * 8 - 1,
        38,
    ),
    Published("z-image", {}, 6.15, 34 * 4, 30 + 2 + 2),  # the defaults of its class
    Published("wan2.1-14b", {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}, 14.29, 40 * 8, 40),
    Published("wan2.1-1.3b", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, 1.42, 30 * 8, 30),
    Published(
        "hunyuan-video",
        {"num_layers": 20, "num_single_layers": 40, "num_refiner_layers": 2, "guidance_embeds": True},
        12.82,
        2 * 4 + 20 * 8 + 40 * 3,  # the text refiner's attention too
        2 + 20 + 40,
    ),
)  # fmt: skip


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda case: case.name)
def found(request: pytest.FixtureRequest) -> tuple[Published, Any]:
    case: Published = request.param
    family: Any = plugins.find("models", case.name)(ModelConfig(name=case.name))  # type: ignore[operator]
    with init_empty_weights():
        family.transformer = family.transformer_class.from_config(case.config)
    return case, family


def test_the_parameters_are_as_many_as_published(found: tuple[Published, Any]) -> None:
    case, family = found
    count = sum(p.numel() for p in family.transformer.parameters())
    assert count / 1e9 == pytest.approx(case.billions, rel=0.01)


def test_the_blocks_hold_nearly_all_parameters_and_none_twice(found: tuple[Published, Any]) -> None:
    case, family = found
    blocks = family.blocks(family.transformer)
    assert len(blocks) == len({id(block) for block in blocks}) == case.blocks
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    assert inside > 0.95 * sum(p.numel() for p in family.transformer.parameters())
    names = {type(block).__name__ for block in blocks}
    repeated = [m for m in family.transformer.modules() if type(m).__name__ in names]
    assert {id(m) for m in repeated} == {id(block) for block in blocks}


def test_adapters_bind_to_all_default_targets(found: tuple[Published, Any]) -> None:
    case, family = found
    add_adapters(family, 1, 1.0, None)
    adapted = [n for n, m in family.transformer.named_modules() if n.endswith(".lora_A") and m]
    assert len(adapted) == case.adapters
    assert all(isinstance(family.transformer.get_submodule(n)["default"], torch.nn.Linear) for n in adapted)


def test_the_qwen_image_preset_adapts_the_mlps_too() -> None:
    from digen.presets import resolve

    targets = resolve("flowgrpo", "qwen-image", None, [], {}).trainer.lora.target_modules
    case = PUBLISHED[0]
    family: Any = plugins.find("models", case.name)(ModelConfig(name=case.name))  # type: ignore[operator]
    with init_empty_weights():
        family.transformer = family.transformer_class.from_config({**case.config, "num_layers": 2})
    add_adapters(family, 1, 1.0, targets)
    adapted = [n for n, _ in family.transformer.named_modules() if n.endswith(".lora_A")]
    assert len(adapted) == 2 * 12
