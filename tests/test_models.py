"""What every model family must hold, on miniatures with random weights, against diffusers' own pipelines.

A family's own details, each lost without a sound, are in `test_model_details.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from digen.backends import noise
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.config import RunConfig
from digen.engines.store import MemoryStore
from digen.models import tiny
from digen.models.base import rows_of
from digen.presets import resolve
from digen.types import MicroBatch, Prompt

STEPS = 5
TOKENS = 40
"""Shorter than some of the texts, so that these are cut."""
TEXTS = ("a cat", 'a sign that says "OPEN", next to nothing', "", "long " * 30)
Size = tuple[int, int, int]
IMAGES: tuple[Size, ...] = ((64, 64, 1), (48, 80, 1), (96, 32, 1))
VIDEOS: tuple[Size, ...] = ((32, 32, 5), (48, 32, 1), (32, 64, 9))


@dataclass(frozen=True)
class Case:
    """How a user calls the family's pipeline."""

    name: str
    recipe: str
    sizes: tuple[Size, ...]
    scale: str = "guidance_scale"
    unguided: float = 1.0
    """The scale that is off in the pipeline; digen's is 1."""
    has_negative: bool = True
    prepare: Callable[[Any], None] = field(default=lambda _: None)

    def call(self, texts: Sequence[str], guidance: float, size: Size) -> Mapping[str, Any]:
        height, width, frames = size
        video = {"num_frames": frames} if self.sizes is VIDEOS else {}
        negative = {"negative_prompt": ["blurry"] * len(texts)} if self.has_negative and guidance > 1 else {}
        settings = {
            "num_inference_steps": STEPS,
            "max_sequence_length": TOKENS,
            self.scale: guidance - 1 + self.unguided,
        }
        return {"prompt": list(texts), "height": height, "width": width, **settings, **video, **negative}


def first_order(pipe: Any) -> None:
    """UniPC without what makes it more than Euler's step: a step that looks back has no log-probability."""
    plain = {"solver_order": 1, "disable_corrector": list(range(STEPS))}
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, **plain)


CASES = (
    Case("tiny-sd3", "sd3", IMAGES),
    Case("tiny-flux", "flux", IMAGES, has_negative=False),
    Case("tiny-qwen-image", "qwen_image", IMAGES, scale="true_cfg_scale"),
    Case("tiny-z-image", "z_image", IMAGES, unguided=0.0),
    Case("tiny-wan", "wan", VIDEOS, prepare=first_order),
    Case("tiny-hunyuan-video", "hunyuan_video", VIDEOS, has_negative=False),
)


@dataclass(frozen=True)
class Family:
    """A family's case, its miniature, a generator of it and diffusers' pipeline of the same weights."""

    case: Case
    folder: Path
    generator: Any
    pipe: Any

    @property
    def model(self) -> Any:
        return self.generator.model

    def resize(self, size: Size) -> None:
        height, width, frames = size
        update = {"height": height, "width": width, "num_frames": frames}
        self.model.config = self.model.config.model_copy(update=update)


def config_of(case: Case, folder: Path, *overrides: str, guidance: float = 1.0) -> RunConfig[Any]:
    height, width, frames = case.sizes[0]
    settings = (
        f"model.path={folder}", "model.shift=null",
        f"model.height={height}", f"model.width={width}", f"model.num_frames={frames}",
        f"model.max_text_tokens={TOKENS}", f"sampling.num_steps={STEPS}", f"sampling.eval_num_steps={STEPS}",
        f"sampling.guidance={guidance}", "sampling.negative_prompt=blurry", "algorithm.samples_per_prompt=2",
        "algorithm.noise={type: flow-sde, level: 0.7}", "algorithm.steps={type: all-but-last}",
        "data.prompts_per_step=3",
    )  # fmt: skip
    return resolve("flowgrpo", case.name, None, [*settings, *overrides], {})


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    from digen.engines.base import WorkerContext
    from digen.presets import payload

    case: Case = request.param
    folder = tmp_path_factory.mktemp("tiny") / case.recipe
    tiny.build(case.recipe, folder)
    config = config_of(case, folder, "generator.batch_size=3")
    store = MemoryStore()
    generator = DiffusersGenerator({**payload(config), "reward": {}}, WorkerContext("g", 0, 1, "cpu", store))
    generator.load()
    generator.model.load_encoders("cpu", torch.float32)
    pipe = generator.model.pipeline_class.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    case.prepare(pipe)
    return Family(case, folder, generator, pipe)


def sampled(family: Family, guidance: float, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and media of digen's sampler without noise; batches of 3 and 1."""
    family.resize(size)
    sampling = {"eval_guidance": guidance, "negative_prompt": "blurry"}
    object.__setattr__(
        family.generator.sampler, "sampling", family.generator.sampler.sampling.model_copy(update=sampling)
    )
    latents, media = family.generator.sampler.evaluate(TEXTS, range(len(TEXTS)), seed=4)
    return latents, media


def expected(family: Family, guidance: float, size: Size, output: str) -> Any:
    shape = family.model.latent_shape
    initial = noise.draw(4, noise.EVALUATION, [(k, 0) for k in range(len(TEXTS))], noise.INITIAL, shape)
    made = family.pipe(**family.case.call(TEXTS, guidance, size), latents=initial, output_type=output)
    return made.frames if hasattr(made, "frames") else made.images


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_without_noise_the_sampler_is_the_plain_pipeline(guidance: float, which: int, family: Family) -> None:
    size = family.case.sizes[which]
    latents, media = sampled(family, guidance, size)
    torch.testing.assert_close(latents, expected(family, guidance, size, "latent"), rtol=0, atol=1e-5)
    pixels = torch.from_numpy((expected(family, guidance, size, "np") * 255).round())
    height, width, frames = size
    shape = (len(TEXTS), height, width, 3) if family.case.sizes is IMAGES else (len(TEXTS), frames, height, width, 3)
    assert media.dtype == torch.uint8
    assert media.shape == pixels.shape == shape
    assert (media.int() - pixels.int()).abs().max() <= 1
    assert media.float().std() > 5  # else this compares one grey with another


def test_text_and_guidance_change_the_latents_by_far_more_than_the_tolerance(family: Family) -> None:
    latents = [sampled(family, guidance, family.case.sizes[0])[0] for guidance in (1.0, 4.0)]
    assert (latents[0] - latents[1]).abs().max() > 1e-3
    size, shape = family.case.sizes[0], family.model.latent_shape
    same = noise.draw(4, 0, [(0, 0)], noise.INITIAL, shape).expand(2, *shape)
    call = family.case.call(TEXTS[:2], 1.0, size)
    made = family.pipe(**call, latents=same.clone(), output_type="latent")
    a, b = made.frames if hasattr(made, "frames") else made.images
    assert (a - b).abs().max() > 1e-3


def test_rows_of_any_timesteps_and_prompts_share_a_forward_as_if_alone(family: Family) -> None:
    """TSP mixes timesteps and prompts of different lengths: neither padding nor neighbours may be seen."""
    family.resize(family.case.sizes[0])
    model = family.model
    guidance, cond = 4.0, family.generator.sampler.conditions.of(TEXTS)
    negative = None if model.embeds_guidance else family.generator.sampler.conditions.of(["blurry"] * len(TEXTS))
    sigma_N = torch.tensor([0.95, 0.4, 0.7, 0.1])
    x = noise.draw(0, 0, [(k, 0) for k in range(4)], noise.INITIAL, model.latent_shape)
    with torch.no_grad():
        together = model.guided_velocity(x, sigma_N, cond, negative, guidance)
        for k in range(4):
            alone_cond = {name: t.to(model.device) for name, t in model.encode(TEXTS[k]).items()}
            alone_negative = None if negative is None else rows_of(negative, torch.tensor([k]))
            alone = model.guided_velocity(x[k : k + 1], sigma_N[k : k + 1], alone_cond, alone_negative, guidance)
            torch.testing.assert_close(together[k : k + 1], alone, rtol=0, atol=1e-5)
        other = model.guided_velocity(x, sigma_N.flip(0), cond, negative, guidance)
    assert all((other[k] - together[k]).abs().max() > 1e-3 for k in range(4))


def test_a_prompt_has_the_same_conditioning_in_every_batch(family: Family) -> None:
    model = family.model
    for text in TEXTS:
        alone, among = model.encode(text), model.collate([model.encode(t) for t in TEXTS])
        row = {name: t[TEXTS.index(text)] for name, t in among.items()}
        length = alone["embeds"].shape[1]
        assert torch.equal(row["embeds"][:length], alone["embeds"][0])
        assert not row["embeds"][length:].any()
        if "mask" in row:
            assert row["mask"].tolist() == [True] * length + [False] * (len(row["mask"]) - length)


def test_cut_prompts_are_counted(family: Family) -> None:
    assert family.model.num_cut([]) == 0
    assert family.model.num_cut(TEXTS[::2]) == 0
    assert family.model.num_cut(["long " * 30, "a cat", "words " * 60]) == 2


def test_replay_gives_the_ratio_one_whatever_is_stacked(
    family: Family, make_worker: Callable[..., Any], make_scored: Callable[..., Any]
) -> None:
    """Prompts of different lengths and all timesteps in one pass; sampled in batches of another size."""
    config = config_of(family.case, family.folder, "generator.batch_size=3", guidance=3.0)
    store = MemoryStore()
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    prompts = tuple(Prompt(k, text) for k, text in enumerate(TEXTS[:2]))
    scored = make_scored(config, generator, MicroBatch(0, 0, prompts, 2, 0))
    for batch_size in (1, 2, 3, 4):
        placement = config.trainer.model_copy(update={"batch_size": batch_size})
        trainer.config = config.model_copy(update={"trainer": placement})
        for tsp in (1, 3, 0):
            stats = trainer.accumulate(scored, tsp, 16.0, True)
            assert stats["ratio"].count == 4 * (STEPS - 1)
            assert stats["ratio_error"].high < 1e-6
            assert stats["log_prob_gap"].high < 1e-6
    assert trainer.optimizer_step(1.0).grad_norm > 0


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch, once: a norm that is not fused
@pytest.mark.parametrize("lora", ["{rank: 2, alpha: 4}", "null"])
def test_bfloat16_stays_close_to_float32(
    lora: str, family: Family, make_worker: Callable[..., Any], make_scored: Callable[..., Any]
) -> None:
    """As the presets of the real models ask for: adapters on a bfloat16 base, all weights in float32 under autocast."""
    small = ("generator.dtype=bfloat16", "trainer.dtype=bfloat16", f"trainer.lora={lora}", "trainer.batch_size=4")
    config = config_of(family.case, family.folder, *small, "sampling.eval_guidance=1", guidance=3.0)
    store = MemoryStore()
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    prompts = tuple(Prompt(k, text) for k, text in enumerate(TEXTS[:2]))
    stats = trainer.accumulate(make_scored(config, generator, MicroBatch(0, 0, prompts, 2, 0)), 0, 16.0, True)
    assert stats["ratio_error"].high < 1e-2
    assert trainer.optimizer_step(1.0).grad_norm > 0
    whole = sampled(family, 1.0, family.case.sizes[0])[0]
    latents = generator.sampler.evaluate(TEXTS, range(len(TEXTS)), seed=4)[0]
    assert latents.dtype == torch.float32
    assert 1e-6 < (latents - whole).abs().mean() < 0.02


def test_the_blocks_are_all_that_repeats_and_adapters_bind_to_every_target(
    family: Family, make_worker: Callable[..., Any]
) -> None:
    config = config_of(family.case, family.folder, "trainer.lora.rank=2", "trainer.lora.alpha=2")
    model = make_worker(DiffusersGenerator, config).model
    lists = [m for m in model.transformer.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0]
    repeated = [m for modules in lists for m in modules if type(m).__name__.endswith("Block")]
    assert {id(m) for m in repeated} == {id(m) for m in model.blocks(model.transformer)}
    bound = [n for n, _ in model.transformer.named_modules() if n.endswith(".lora_A")]
    assert bound
    for target in model.lora_targets:
        assert any(n.endswith(f"{target}.lora_A") for n in bound), target


def test_tiles_are_decoded_to_nearly_the_same_pixels_as_the_whole(family: Family) -> None:
    """Random weights are the worst case: what a tile does not see matters more than with a trained decoder."""
    height, width, frames = 128, 160, 5 if family.case.sizes is VIDEOS else 1
    settings = {"height": height, "width": width, "num_frames": frames, "path": str(family.folder)}
    calls: list[int] = []

    def decoded(tiling: bool) -> torch.Tensor:
        config = family.model.config.model_copy(update={**settings, "vae_tiling": tiling})
        model = type(family.model)(config)
        model.load("cpu", torch.float32, text_encoder=False, decoder=True)
        for name in vars(model.pipeline.vae):  # smaller tiles than any that are of use
            if re.fullmatch(r"tile_sample_(min|stride)_(size|height|width)", name):
                setattr(model.pipeline.vae, name, 96 if "min" in name else 64)
            elif name == "tile_latent_min_size":
                setattr(model.pipeline.vae, name, 12)
        calls.append(0)
        model.pipeline.vae.decoder.register_forward_hook(lambda *_: calls.append(calls.pop() + 1))
        latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
        return torch.as_tensor(model.decode(latents)).float()

    whole, tiled = decoded(tiling=False), decoded(tiling=True)
    assert calls[1] > calls[0]
    assert tiled.shape == whole.shape
    assert 0 < (tiled - whole).abs().mean() < 0.4 * (whole - whole.flip(0)).abs().mean()


def test_a_worker_that_neither_encodes_nor_decodes_loads_the_transformer_alone(family: Family) -> None:
    config = family.model.config.model_copy(update={"path": str(family.folder)})
    bare = type(family.model)(config)
    bare.load("cpu", torch.float32, text_encoder=False, decoder=False)
    loaded = {name for name, part in bare.pipeline.components.items() if part is not None}
    assert loaded <= {"scheduler"} | {n for n in bare.pipeline.components if n not in bare.folders}
    assert bare.latent_shape == family.model.latent_shape
    assert torch.equal(bare.sigmas(7), family.model.sigmas(7))


def test_the_miniature_is_the_same_wherever_it_is_made(family: Family, tmp_path: Path) -> None:
    tiny.build(family.case.recipe, tmp_path / "again")
    for file in (tmp_path / "again").rglob("*.safetensors"):
        assert file.read_bytes() == (family.folder / file.relative_to(tmp_path / "again")).read_bytes(), file
    assert {p.name for p in family.folder.iterdir() if p.is_dir()} == set(family.model.folders)
