"""The denoising loop on the real bundled model, against diffusers' own pipeline and against itself in other shapes."""

from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from digen import plugins
from digen.backends import noise
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.types import MicroBatch

TEXTS = ['a sign that says "OPEN"', 'small red letters "CAT" on a white background']


@pytest.fixture(scope="module")
def pipeline() -> Any:
    pipe = QwenImagePipeline.from_pretrained(plugins.folder("models", "glyph"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_without_noise_the_sampler_is_the_plain_pipeline(
    guidance: float, pipeline: Any, make_config: Any, make_worker: Any
) -> None:
    config = make_config("sampling.eval_num_steps=10", f"sampling.eval_guidance={guidance}", "generator.batch_size=8")
    generator = make_worker(DiffusersGenerator, config)
    latents, media = generator.sampler.evaluate(TEXTS, [0, 1], seed=4)
    initial = noise.draw(4, noise.EVALUATION, [(0, 0), (1, 0)], noise.INITIAL, generator.model.latent_shape)
    call = {
        "prompt": TEXTS,
        "negative_prompt": [" ", " "] if guidance > 1 else None,
        "true_cfg_scale": guidance,
        "height": 32,
        "width": 32,
        "num_inference_steps": 10,
    }
    expected = pipeline(**call, latents=initial.clone(), output_type="latent").images
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    images = pipeline(**call, latents=initial.clone(), output_type="np").images
    difference = media.int() - torch.from_numpy((images * 255).round()).int()
    assert difference.abs().max() <= 1


@pytest.mark.parametrize("kind", ["flow-sde", "dance-sde", "cps"])
def test_an_sde_step_with_noise_level_zero_is_the_euler_step(kind: str, make_config: Any, make_worker: Any) -> None:
    from digen.algos.base import Transition
    from digen.algos.sde import euler

    config = make_config(f"algorithm.noise.type={kind}")
    generator = make_worker(DiffusersGenerator, config)
    strategy = type(config.algorithm.noise)(level=0)
    sigmas = generator.model.sigmas(10)
    cond = generator.sampler.conditions.of(TEXTS[:1])
    x = noise.draw(0, 0, [(0, 0)], noise.INITIAL, generator.model.latent_shape)
    with torch.no_grad():
        for i in range(10):
            at = Transition.at(sigmas, torch.tensor([i]), x.ndim)
            v = generator.sampler.velocity(x, at.sigma.reshape(-1), cond, None, 1.0)
            mean, std = strategy.mean_std(x, v, at)
            assert float(std.max()) == 0
            plain = euler(x, v, at)
            torch.testing.assert_close(mean, plain, rtol=0, atol=1e-6 * max(1.0, float(plain.abs().max())))
            x = plain


def test_only_trained_steps_are_kept_and_they_chain(make_config: Any, make_worker: Any, make_microbatch: Any) -> None:
    config = make_config("algorithm.steps={type: window, size: 3, low: 0, high: 3}", "algorithm.noise.type=flow-sde")
    generator = make_worker(DiffusersGenerator, config)
    microbatch = make_microbatch(config)
    tensors, media = generator.sampler.rollout(microbatch, range(8))
    assert tensors["latents"].shape == tensors["next_latents"].shape == (8, 3, *generator.model.latent_shape)
    assert tensors["log_probs"].shape == (8, 3)
    assert {t.dtype for n, t in tensors.items() if n in {"latents", "next_latents", "log_probs"}} == {torch.float32}
    assert tensors["steps"].tolist() == [[0, 1, 2]] * 8
    assert torch.equal(tensors["next_latents"][:, :2], tensors["latents"][:, 1:])
    assert media.shape == (8, 32, 32, 3)
    assert media.dtype == torch.uint8
    identities = [(p.id, s) for p, s in map(microbatch.identity, range(8))]
    expected = noise.draw(config.seed, 0, identities, noise.INITIAL, generator.model.latent_shape)
    assert torch.equal(tensors["latents"][:, 0], expected)


def test_the_recorded_log_prob_is_that_of_a_normal_distribution_in_float64(
    make_config: Any, make_worker: Any, make_microbatch: Any
) -> None:
    config = make_config("algorithm.noise={type: flow-sde, level: 0.7}", "algorithm.steps.type=all-but-last")
    generator = make_worker(DiffusersGenerator, config)
    tensors, _ = generator.sampler.rollout(make_microbatch(config), range(8))
    sigmas = tensors["sigmas"].double()
    cond = generator.sampler.conditions.of([p.text for p in make_microbatch(config).prompts])
    for k in range(0, 8, 3):
        for i in range(5):
            x, y = tensors["latents"][k : k + 1, i], tensors["next_latents"][k, i].double()
            row = {name: t[tensors["prompt"][k : k + 1]] for name, t in cond.items()}
            with torch.no_grad():
                v = generator.sampler.velocity(x, sigmas[i : i + 1].float(), row, None, 1.0)[0].double()
            s, h = sigmas[i], sigmas[i] - sigmas[i + 1]
            g = 0.7 * (s / (1 - (s if s < 1 - 1e-3 else sigmas[1]))).sqrt()
            mean = x[0].double() - h * (v + g**2 / (2 * s) * (x[0].double() + (1 - s) * v))
            expected = torch.distributions.Normal(mean, g * h.sqrt()).log_prob(y).mean()
            assert float(tensors["log_probs"][k, i]) == pytest.approx(float(expected), abs=2e-5)


def test_p42_a_sample_is_the_same_in_whatever_micro_batch_and_shard_it_is_made(
    make_config: Any, make_worker: Any, make_microbatch: Any
) -> None:
    config = make_config()
    generator = make_worker(DiffusersGenerator, config)
    whole = make_microbatch(config, prompts=3)
    tensors, media = generator.sampler.rollout(whole, range(12))
    for k, prompt in enumerate(whole.prompts):
        single = MicroBatch(whole.step, 5, (prompt,), 4, whole.seed)
        part, part_media = generator.sampler.rollout(single, range(4))
        for name in ("latents", "next_latents", "log_probs", "steps"):
            assert torch.equal(part[name], tensors[name][4 * k : 4 * k + 4])
        assert torch.equal(part_media, media[4 * k : 4 * k + 4])
    rows = whole.rows(1, 2)  # the second of two ranks
    shard, _ = generator.sampler.rollout(whole, rows)
    torch.testing.assert_close(shard["next_latents"], tensors["next_latents"][list(rows)], rtol=0, atol=1e-5)


def test_p40_guidance_counts_and_each_sample_has_the_text_of_its_own_prompt_in_every_batch(
    make_config: Any, make_worker: Any
) -> None:
    """Two prompts of unlike lengths, two samples of each; this model's text masks are all ones."""
    texts, ids = [text for text in TEXTS for _ in range(2)], [0, 1, 2, 3]
    found = {}
    for guidance in (1.0, 4.0):
        config = make_config(f"sampling.eval_guidance={guidance}", "sampling.eval_num_steps=4")
        generator = make_worker(DiffusersGenerator, config)
        generator.model.load_encoders("cpu", torch.float32)
        lengths = {len(generator.model.encode(text)["embeds"][0]) for text in TEXTS}
        assert len(lengths) == 2
        together, _ = generator.sampler.evaluate(texts, ids, seed=4)
        alone = [generator.sampler.evaluate([text], [k], seed=4)[0] for text, k in zip(texts, ids, strict=True)]
        torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
        found[guidance] = together
    assert (found[4.0] - found[1.0]).abs().max() > 1e-2


def test_a_shared_initial_noise_leaves_the_step_noise_different(
    make_config: Any, make_worker: Any, make_microbatch: Any
) -> None:
    for shared in (False, True):
        generator = make_worker(DiffusersGenerator, make_config(f"algorithm.same_initial_noise={shared}".lower()))
        tensors, _ = generator.sampler.rollout(make_microbatch(generator.config, prompts=1), range(4))
        first = tensors["latents"][:, 0]
        assert all(torch.equal(first[0], row) for row in first[1:]) == shared
        step = tensors["next_latents"][:, 0]
        assert not any(torch.equal(step[a], step[b]) for a in range(4) for b in range(a))


def test_the_clean_prediction_is_decoded_where_the_recipe_says_so(
    make_config: Any, make_worker: Any, make_microbatch: Any
) -> None:
    media = {}
    for decode in ("sample", "clean"):
        config = make_config(
            f"algorithm.decode={decode}", "algorithm.steps.type=random-fraction", algorithm="dancegrpo"
        )
        generator = make_worker(DiffusersGenerator, config)
        media[decode] = generator.sampler.rollout(make_microbatch(config, prompts=1), range(4))[1]
    assert not torch.equal(media["sample"], media["clean"])  # the last step of Dance-SDE adds noise


def test_black_white_and_grey_latents_arrive_as_0_255_and_128(
    make_config: Any, make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards get uint8 RGB: the decoder's range of -1 to 1 is mapped once, here."""
    generator = make_worker(DiffusersGenerator, make_config())
    vae = generator.model.pipeline.vae
    for value, expected in ((-1.0, 0), (1.0, 255), (0.0, 128), (3.0, 255)):
        constant = torch.full((2, 3, 1, 32, 32), value)
        monkeypatch.setattr(vae, "decode", lambda *_, constant=constant, **__: (constant,))
        media = generator.model.decode(torch.zeros(2, *generator.model.latent_shape))
        assert media.shape == (2, 32, 32, 3)
        assert media.dtype == torch.uint8
        assert torch.equal(media, torch.full_like(media, expected))
