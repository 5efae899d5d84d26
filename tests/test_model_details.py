"""Details of single families that are lost without a sound: levels, timesteps, guidance. Each has a test of its own."""

import json
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from digen import plugins
from digen.algos.base import Transition
from digen.algos.sde import FlowSDE
from digen.algos.steps import AllButLast, RandomFraction
from digen.config import ModelConfig
from digen.models import tiny

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "schedules.json").read_text())
TABLES = {  # prefix of a golden table -> family, pixels, shift
    "sd35_shift3": ("tiny-sd3", 512, None),
    "flux_dyn_512px": ("tiny-flux", 512, None),
    "flux_dyn_720px": ("tiny-flux", 720, None),
    "flux_dyn_1024px": ("tiny-flux", 1024, None),
    "qwen_dyn_512px": ("tiny-qwen-image", 512, None),
    "qwen_dyn_1024px": ("tiny-qwen-image", 1024, None),
    "hunyuan_shift7": ("tiny-hunyuan-video", 480, None),
    "wan_unipc_shift3": ("tiny-wan", 480, None),
    "wan_unipc_shift5": ("tiny-wan", 720, 5.0),
}
DANCE = {"dance_shift3": ("tiny-flux", "tiny-qwen-image"), "dance_shift5": ("tiny-hunyuan-video",), "dance_shift7": ()}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A family's miniature without encoder and decoder, of any nominal size."""
    made: dict[str, Path] = {}

    def loaded(name: str, size: int = 64, shift: float | None = None, frames: int = 1) -> Any:
        kind: Any = plugins.find("models", name)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("tiny") / name
            tiny.build(kind.recipe, made[name])
        settings = {"height": size, "width": size, "num_frames": frames, "shift": shift, "path": str(made[name])}
        model = kind(ModelConfig(name=name, **settings))
        model.load("cpu", torch.float32, text_encoder=False, decoder=False)
        return model

    return loaded


def fed(model: Any, sigma_N: Tensor, conditioning: dict[str, Tensor], guidance: float = 1.0) -> dict[str, Any]:
    """What the transformer is called with."""
    seen: dict[str, Any] = {}

    def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args
        seen.update(kwargs)

    handle = model.transformer.register_forward_pre_hook(record, with_kwargs=True)
    latents = torch.zeros(len(sigma_N), *model.latent_shape)
    with torch.no_grad():
        model.guided_velocity(latents, sigma_N, conditioning, None, guidance)
    handle.remove()
    return seen


def some_text(rows: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, 3, dtype=torch.bool)
    return {"embeds": torch.ones(rows, 3, 32), "mask": mask, "pooled": torch.ones(rows, 16)}


@pytest.mark.parametrize("name", ["tiny-qwen-image", "tiny-flux", "tiny-sd3", "tiny-wan", "tiny-hunyuan-video"])
def test_what_a_published_config_is_too_old_to_say_is_as_the_library_has_it(
    name: str, load: Callable[..., Any], tmp_path: Path
) -> None:
    """Wan2.1's decoder, for one, says nothing of its strides."""
    model, folder = load(name, 64, frames=5), tmp_path / "old"
    shutil.copytree(model.folder, folder)
    for part in ("vae", "transformer"):
        path = folder / part / "config.json"
        config, kind = json.loads(path.read_text()), getattr(diffusers, model.part_config(part)["_class_name"])
        default = {each.name: each.default for each in signature(kind).parameters.values()}
        old = {key: value for key, value in config.items() if key.startswith("_") or default.get(key) != value}
        assert len(old) < len(config)
        path.write_text(json.dumps(old))
    other = type(model)(model.config.model_copy(update={"path": str(folder)}))
    other.load("cpu", torch.float32, text_encoder=False, decoder=False)
    assert other.latent_shape == model.latent_shape


# --- noise levels ---


@pytest.mark.parametrize("table", [name for name in GOLDEN if not name.startswith("dance")])
def test_the_levels_are_those_of_the_librarys_scheduler(table: str, load: Callable[..., Any]) -> None:
    prefix, _, steps = table.rpartition("_n")
    name, size, shift = TABLES[prefix]
    levels = load(name, size, shift).sigmas(int(steps))
    assert levels.dtype == torch.float32
    torch.testing.assert_close(levels, torch.tensor(GOLDEN[table]["sigmas"]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("table", [name for name in GOLDEN if name.startswith("dance")])
def test_a_shift_of_ones_own_gives_dancegrpos_levels_at_every_size(table: str, load: Callable[..., Any]) -> None:
    prefix, _, steps = table.rpartition("_n")
    for name in DANCE[prefix]:
        for size in (256, 720):
            levels = load(name, size, float(prefix[-1])).sigmas(int(steps))
            torch.testing.assert_close(levels, torch.tensor(GOLDEN[table]["sigmas"]), rtol=0, atol=1e-6)


def test_qwen_images_levels_end_at_its_terminal_value(load: Callable[..., Any]) -> None:
    assert float(load("tiny-qwen-image", 512).sigmas(10)[-2]) == pytest.approx(0.02, abs=1e-6)


def test_the_last_step_of_sd35_is_next_to_nothing_and_never_trained(load: Callable[..., Any]) -> None:
    levels = load("tiny-sd3", 512).sigmas(10)
    assert float(levels[-2]) == pytest.approx(0.0089286, abs=1e-6)
    last = Transition.at(levels, torch.tensor([9]), 4)
    _, std = FlowSDE(level=0.7).mean_std(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), last)
    assert float(std) < 0.007  # the log-prob of such a step explodes
    for steps in (AllButLast(), RandomFraction(fraction=1.0)):
        assert 9 not in steps.trained(0, 0, 0, 0, 10)


# --- Wan ---


def test_wan_starts_just_below_one_and_its_first_sde_step_stays_finite(load: Callable[..., Any]) -> None:
    levels = load("tiny-wan", 480).sigmas(20)
    assert 1 - 1e-5 < float(levels[0]) < 1.0
    first = Transition.at(levels, torch.tensor([0]), 5)
    one = torch.ones(1, 1, 1, 1, 1)
    mean, std = FlowSDE(level=0.7).mean_std(one, one, first)
    assert 0 < float(std) < 1  # unguarded: 0.7 sqrt(s / (1 - s)) is 695
    assert float(mean.abs()) < 10


@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_wan_is_fed_whole_timesteps_cut_as_its_scheduler_cuts_them(shift: float, load: Callable[..., Any]) -> None:
    model = load("tiny-wan", 32, shift)
    for steps in range(1, 101):
        levels = model.sigmas(steps)[:-1]
        assert (levels.double() * 1000).long().tolist() == model.scheduler.timesteps.tolist(), steps
    table = GOLDEN[f"wan_unipc_shift{shift:.0f}_n20"]
    seen = fed(model, torch.tensor(table["sigmas"][:-1]), some_text(20))
    assert seen["timestep"].dtype == torch.int64
    assert seen["timestep"].tolist() == table["timesteps"]
    assert seen["timestep"][0] == 999


# --- guidance as an input ---


def test_hunyuan_video_is_fed_a_thousand_times_the_guidance_scale(load: Callable[..., Any]) -> None:
    seen = fed(load("tiny-hunyuan-video", 32, frames=5), torch.tensor([0.9, 0.3]), some_text(2), guidance=6.018)
    assert seen["guidance"].tolist() == pytest.approx([6018.0, 6018.0])
    assert seen["timestep"].tolist() == pytest.approx([900.0, 300.0])


def test_flux_is_fed_the_guidance_scale_itself_and_levels_instead_of_timesteps(load: Callable[..., Any]) -> None:
    seen = fed(load("tiny-flux"), torch.tensor([0.9, 0.3]), some_text(2), guidance=3.5)
    assert seen["guidance"].tolist() == [3.5, 3.5]
    assert seen["timestep"].tolist() == pytest.approx([0.9, 0.3])


@pytest.mark.parametrize("name", ["tiny-flux", "tiny-hunyuan-video"])
def test_embedded_guidance_costs_one_forward_and_needs_no_negative_prompt(
    name: str, make_config: Callable[..., Any]
) -> None:
    from digen.presets import derived, resolve

    for other, forwards in ((name, 1), ("tiny-sd3", 2)):
        config = resolve("flowgrpo", other, None, ["sampling.guidance=4"], {})
        counts = derived(config)
        per_row = counts["rollout_forwards_per_step"] / counts["samples_per_step"] / counts["denoising_steps"]
        assert per_row == forwards


# --- Z-Image ---


def test_z_image_is_fed_what_is_left_of_the_noise_and_predicts_the_way_from_noise_to_data(
    load: Callable[..., Any],
) -> None:
    model, sigma_N = load("tiny-z-image"), torch.tensor([0.9, 0.3])
    raw: list[list[Tensor]] = []
    with torch.no_grad():
        handle = model.transformer.register_forward_hook(lambda module, args, output: raw.append([*args[1:2], *output]))
        velocity = model.velocity(torch.zeros(2, *model.latent_shape), sigma_N, some_text(2))
        handle.remove()
    assert raw[0][0].tolist() == pytest.approx([0.1, 0.7])
    assert torch.equal(velocity, -torch.stack(list(raw[0][1])).squeeze(2))
    assert velocity.abs().max() > 0.01


def test_z_image_counts_the_guidance_scale_from_one_and_its_pipeline_from_zero(load: Callable[..., Any]) -> None:
    model = load("tiny-z-image")
    cond, uncond = torch.full((1, 2), 3.0), torch.full((1, 2), 1.0)
    assert torch.equal(model.combine(cond, uncond, 1.0), cond)
    assert torch.equal(model.combine(cond, uncond, 5.0), cond + 4 * (cond - uncond))


def test_z_images_levels_are_those_of_its_scheduler_at_every_size(load: Callable[..., Any]) -> None:
    for steps in (1, 8, 50):
        even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
        shifted = torch.cat([6 * even / (1 + 5 * even), torch.zeros(1, dtype=torch.float64)]).float()
        for size in (64, 512):
            torch.testing.assert_close(load("tiny-z-image", size).sigmas(steps), shifted, rtol=0, atol=1e-6)


# --- guidance by two forwards ---


def test_qwen_image_keeps_the_norm_of_every_conditional_token(load: Callable[..., Any]) -> None:
    model = load("tiny-qwen-image")
    generator = torch.Generator().manual_seed(0)
    cond, uncond = (torch.randn(2, 16, 64, generator=generator) for _ in range(2))
    mixed = model.combine(cond, uncond, 4.0)
    torch.testing.assert_close(mixed.norm(dim=-1), cond.norm(dim=-1))
    plain = uncond + 4 * (cond - uncond)
    assert (plain.norm(dim=-1) / cond.norm(dim=-1)).min() > 1.5  # what would be returned without it
    torch.testing.assert_close(torch.nn.functional.cosine_similarity(mixed, plain, dim=-1), torch.ones(2, 16))


@pytest.mark.parametrize("name", ["tiny-sd3", "tiny-wan"])
def test_other_families_guide_without_rescaling(name: str, load: Callable[..., Any]) -> None:
    model = load(name, 32)
    cond, uncond = torch.full((1, 2), 3.0), torch.full((1, 2), 1.0)
    assert torch.equal(model.combine(cond, uncond, 4.5), torch.full((1, 2), 10.0))


# --- templates ---


def test_the_templates_take_the_tokens_that_the_pipelines_drop(tmp_path: Path) -> None:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
    from transformers import AutoTokenizer

    tiny.build("hunyuan_video", tmp_path / "h")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "h" / "tokenizer")
    prefix = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0]
    assert len(tokenizer(prefix).input_ids) == DEFAULT_PROMPT_TEMPLATE["crop_start"] == 95
    tiny.build("qwen_image", tmp_path / "q")
    pipe: Any = plugins.find("models", "tiny-qwen-image").pipeline_class.from_pretrained(tmp_path / "q")  # type: ignore[attr-defined]
    prefix = pipe.prompt_template_encode.split("{}")[0]
    assert len(pipe.tokenizer(prefix).input_ids) == pipe.prompt_template_encode_start_idx == 34
