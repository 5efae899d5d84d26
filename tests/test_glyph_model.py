"""The bundled model is a plain diffusers pipeline: small, loadable without digen, and its images can be read."""

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

ROOT = Path(__file__).parent.parent
GLYPH = ROOT / "digen" / "models" / "glyph"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pipe() -> Any:
    pipe = QwenImagePipeline.from_pretrained(GLYPH)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts(name: str) -> list[str]:
    return (GLYPH / "prompts" / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def quoted(prompt: str) -> str:
    return prompt.split('"')[1]


def generate(pipe: Any, texts: list[str], **settings: Any) -> np.ndarray:
    """Images (K, 32, 32, 3) in [0, 1]; sample k starts from seed k."""
    generators = [torch.Generator().manual_seed(k) for k in range(len(texts))]
    settings = {"true_cfg_scale": 1.0, "num_inference_steps": 10, **settings}
    return pipe(texts, height=32, width=32, generator=generators, output_type="np", **settings).images


@pytest.fixture(scope="module")
def pretraining() -> ModuleType:
    """The script that made the model, as a module."""
    spec = importlib.util.spec_from_file_location("pretrain_glyph", ROOT / "examples" / "pretrain_glyph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_all_its_files_are_at_most_8_megabytes() -> None:
    files = [path for path in GLYPH.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 8 * MEGABYTE


def test_the_parts_are_qwen_images_own_classes(pipe: Any) -> None:
    names = {name: type(part).__name__ for name, part in pipe.components.items()}
    assert names == {
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    }
    assert all(weight.dtype == torch.float32 for weight in pipe.transformer.parameters())


def test_the_prefix_of_the_prompt_template_is_the_34_tokens_that_the_pipeline_drops(pipe: Any) -> None:
    prefix = pipe.prompt_template_encode.split("{}")[0]
    assert len(pipe.tokenizer(prefix).input_ids) == pipe.prompt_template_encode_start_idx == 34


def test_words_of_a_prompt_are_one_token_and_quoted_texts_one_token_per_character(pipe: Any) -> None:
    tokens = pipe.tokenizer.tokenize('small red letters "CAT2" on a white background')
    spelled = ["Ġ" + '"', "C", "A", "T", "2", '"']
    assert tokens == ["small", "Ġred", "Ġletters", *spelled, "Ġon", "Ġa", "Ġwhite", "Ġbackground"]
    for prompt in prompts("train") + prompts("heldout"):
        assert all(character in pipe.tokenizer.tokenize(prompt) for character in quoted(prompt))


def test_training_and_heldout_prompts_share_neither_a_prompt_nor_a_quoted_text() -> None:
    train, heldout = prompts("train"), prompts("heldout")
    assert (len(train), len(heldout)) == (384, 64)
    assert all(prompt.count('"') == 2 and 2 <= len(quoted(prompt)) <= 4 for prompt in train + heldout)
    assert len({*train, *heldout}) == len({quoted(prompt) for prompt in train + heldout}) == 448


def test_the_vae_gives_back_what_it_was_given(pipe: Any, pretraining: ModuleType) -> None:
    train, _ = pretraining.prompt_sets(0)
    pixels = pretraining.to_tensor([pretraining.render(scene) for scene in train[:8]])
    with torch.no_grad():
        restored = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mean).sample
    assert (restored - pixels).abs().mean() < 0.05


def test_the_shipped_prompts_are_those_of_the_pretraining_script(pretraining: ModuleType) -> None:
    train, heldout = pretraining.prompt_sets(0)
    assert prompts("train") == [scene.prompt for scene in train]
    assert prompts("heldout") == [scene.prompt for scene in heldout]


def test_one_seed_gives_one_image_and_guidance_changes_it(pipe: Any) -> None:
    prompt = prompts("heldout")[:1]
    first = generate(pipe, prompt)
    assert np.array_equal(first, generate(pipe, prompt))
    guided = generate(pipe, prompt, true_cfg_scale=3.0, negative_prompt=" ")
    assert np.isfinite(guided).all()
    assert np.abs(guided - first).mean() > 0.001


def test_colours_of_the_prompt_are_the_colours_of_the_image(pipe: Any) -> None:
    yellow, cyan = generate(pipe, ['a yellow sign that says "CAT"', 'a cyan sign that says "CAT"'])
    edge = np.s_[:4]
    assert yellow[edge, :, 0].mean() > yellow[edge, :, 2].mean() + 0.3
    assert cyan[edge, :, 2].mean() > cyan[edge, :, 0].mean() + 0.1


def test_its_images_are_read_sometimes_but_not_always(pipe: Any) -> None:
    rapidocr = pytest.importorskip("rapidocr")
    from rapidocr.ch_ppocr_rec import TextRecInput

    chosen = prompts("heldout")[:16]
    images = (generate(pipe, chosen) * 255).round().astype(np.uint8)
    crops = [np.ascontiguousarray(image.repeat(2, axis=1)[:, :, ::-1]) for image in images]
    engine = rapidocr.RapidOCR(params={"Global.log_level": "error", "Rec.rec_img_shape": [3, 48, 96]})
    recognise = engine._load_rec_model()
    read = recognise(TextRecInput(img=crops, return_word_box=False)).txts
    exact = sum(quoted(prompt) in text.upper() for prompt, text in zip(chosen, read, strict=True))
    assert 2 <= exact < len(chosen)


def test_the_pretraining_script_makes_a_pipeline_that_loads(pretraining: ModuleType, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames `past_key_values` to `cache`
        pretraining.main([str(tmp_path), "--quick"])
    torch.set_num_threads(threads)
    pipe = QwenImagePipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    assert generate(pipe, ['a sign that says "OK"'], num_inference_steps=2).shape == (1, 32, 32, 3)
    written = (tmp_path / "prompts" / "heldout.txt").read_text(encoding="utf-8")
    assert written.splitlines() == prompts("heldout")


def test_prompts_are_encoded_in_pretraining_as_the_pipeline_encodes_them(pipe: Any, pretraining: ModuleType) -> None:
    texts = [*prompts("heldout")[:3], " "]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        ours, mask = pretraining.encode_prompts(pipe, texts)
        theirs, their_mask = pipe.encode_prompt(texts)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(mask, their_mask)
