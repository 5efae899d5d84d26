"""The rewards on CLIP: transformers' own classes with small random weights, formulas computed again in float64."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from digen.config import RewardTerm
from digen.errors import ConfigError, RewardError
from digen.models import tiny_text
from digen.rewards.base import RewardSet
from digen.rewards.clip import Aesthetic, Clip, ClipScore, HPSv2, PickScore, linear_head
from digen.run import check_rewards

MEDIA: NDArray[np.uint8] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (5, 40, 30, 3), np.uint8)
PROMPTS = ["a red cube", "two cats", "", "a sign", "x" * 200]
METADATA: list[dict[str, Any]] = [{}] * 5
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of two small layers, with tokenizer and preprocessor, as transformers saves it."""
    path = tmp_path_factory.mktemp("clip")
    encoder, tokenizer = tiny_text.clip(projected=True)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8}
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=48, projection_dim=16, **small)
    text = CLIPTextConfig(**{**encoder.config.to_dict(), "projection_dim": 16})
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    torch.manual_seed(0)
    model = CLIPModel(config)
    for parameter in model.parameters():  # large enough for scores to differ
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE}, "image_mean": MEAN, "image_std": STD, "resample": 3,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    layers = {"layers.0": (6, 16), "layers.2": (4, 6), "layers.4": (1, 4)}
    state = {f"{name}.weight": torch.randn(shape) for name, shape in layers.items()}
    save_file({**state, **{f"{name}.bias": torch.randn(shape[0]) for name, shape in layers.items()}}, path / "head.st")
    return path


def loaded(kind: type[Clip], folder: Path, **options: Any) -> Any:
    more = {"head": str(folder / "head.st")} if kind is Aesthetic else {}
    reward = kind(str(folder), str(folder), **more, **options)  # type: ignore[call-arg]
    assert reward.missing() is None
    reward.load()
    return reward


def pixels(image: NDArray[np.uint8]) -> torch.Tensor:
    """Shorter side to 32, centre, colours in CLIP's scale: by hand, in float64."""
    height, width = image.shape[:2]
    scale = SIDE / min(height, width)
    small = Image.fromarray(image).resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
    top, left = (small.height - SIDE) // 2, (small.width - SIDE) // 2
    cut = np.asarray(small, np.float64)[top : top + SIDE, left : left + SIDE] / 255
    return torch.from_numpy(((cut - MEAN) / STD).transpose(2, 0, 1))


def embeddings(folder: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Of pictures and prompts, by the model's own forward in float64, and its logit scale."""
    model = CLIPModel.from_pretrained(folder).double().eval()
    _, tokenizer = tiny_text.clip()
    pictures, texts = [], []
    with torch.no_grad():
        for image, prompt in zip(MEDIA, PROMPTS, strict=True):
            tokens = tokenizer([prompt], truncation=True, max_length=77, return_tensors="pt")
            found = model(pixel_values=pixels(image)[None], **tokens)
            pictures.append(found.image_embeds[0] / found.image_embeds[0].norm())
            texts.append(found.text_embeds[0] / found.text_embeds[0].norm())
    return torch.stack(pictures), torch.stack(texts), float(model.logit_scale.detach().exp())


@pytest.mark.parametrize(("kind", "divisor"), [(ClipScore, 30), (PickScore, 26), (HPSv2, None)])
def test_the_value_is_the_formula_of_its_source(kind: type[Clip], divisor: int | None, folder: Path) -> None:
    pictures, texts, scale = embeddings(folder)
    cosines = (pictures * texts).sum(-1)
    expected = cosines if divisor is None else scale * cosines / divisor
    assert expected.std() > 1e-3
    found = loaded(kind, folder)(MEDIA, PROMPTS, METADATA)
    np.testing.assert_allclose(
        found, expected.numpy(), rtol=1e-4, atol=1e-5 * (1 if divisor is None else scale / divisor)
    )


def test_the_aesthetic_value_is_a_chain_of_linear_layers_on_the_pictures_embedding(folder: Path) -> None:
    from safetensors.torch import load_file

    state = {name: value.double() for name, value in load_file(folder / "head.st").items()}
    pictures, _, _ = embeddings(folder)
    for name in ("layers.0", "layers.2", "layers.4"):
        pictures = pictures @ state[f"{name}.weight"].T + state[f"{name}.bias"]
    found = loaded(Aesthetic, folder)(MEDIA, PROMPTS, METADATA)
    np.testing.assert_allclose(found, pictures[:, 0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [ClipScore, PickScore, HPSv2, Aesthetic])
def test_a_value_does_not_depend_on_the_batch_and_a_video_has_the_mean_of_its_frames(
    kind: type[Clip], folder: Path
) -> None:
    reward = loaded(kind, folder, batch_size=2, frames=3)
    alone = [reward(MEDIA[k : k + 1], PROMPTS[k : k + 1], METADATA[:1])[0] for k in range(5)]
    np.testing.assert_allclose(reward(MEDIA, PROMPTS, METADATA), alone, rtol=1e-4, atol=1e-5)
    video = np.stack([MEDIA[[0, 1, 2, 3, 4]], MEDIA[[4, 4, 4, 4, 4]]])  # of five frames the first, the third, the last
    frames = [reward(MEDIA[k : k + 1], [PROMPTS[0]], METADATA[:1])[0] for k in (0, 2, 4)]
    last = reward(MEDIA[4:], [PROMPTS[1]], METADATA[:1])[0]
    np.testing.assert_allclose(reward(video, PROMPTS[:2], METADATA[:2]), [np.mean(frames), last], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [ClipScore, PickScore, HPSv2])
def test_the_prompt_of_another_sample_has_another_value(kind: type[Clip], folder: Path) -> None:
    reward = loaded(kind, folder)
    assert reward(MEDIA[:2], PROMPTS[:2], METADATA[:2])[0] != reward(MEDIA[:2], PROMPTS[1::-1], METADATA[:2])[0]


def test_a_set_loads_and_scores_it_by_name_and_passes_the_workers_device_on(folder: Path) -> None:
    options = {"path": str(folder), "processor": str(folder)}
    rewards = RewardSet({"hpsv2": RewardTerm.model_validate(options)}, 60.0, device="cpu")
    rewards.load()
    (values,) = rewards.score(MEDIA, PROMPTS, METADATA).values()
    assert list(values) == loaded(HPSv2, folder)(MEDIA, PROMPTS, METADATA)
    with pytest.raises((RuntimeError, AssertionError)):
        RewardSet({"hpsv2": RewardTerm.model_validate(options)}, 60.0, device="nowhere").load()


# --- what is missing ---


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("clip-score", ["hf download openai/clip-vit-large-patch14 --include 'config.json' --include '*.safetensors'"]),
        (
            "pickscore",
            ["hf download yuvalkirstain/PickScore_v1 ", "hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K "],
        ),
        ("hpsv2", ["hf download adams-story/HPSv2-hf "]),
        ("aesthetic", ["hf download trl-lib/ddpo-aesthetic-predictor aesthetic-model.pth", "weights_only=True"]),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_gets_it_before_anything_loads(
    name: str, commands: list[str], make_config: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rewards(make_config(f"reward={{{name}: {{}}}}"))
    assert f"the weights of {name} are not on this machine" in str(caught.value)
    assert all(command in str(caught.value) for command in commands)


def test_an_incomplete_folder_is_named_with_what_it_lacks(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert (
        ClipScore(str(tmp_path), str(folder)).missing()
        == f"clip-score: path={tmp_path} is not complete; missing: *.safetensors"
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part1.safetensors", "b": "part2.safetensors"}}'
    )
    (tmp_path / "part1.safetensors").touch()
    assert ClipScore(str(tmp_path), str(folder)).missing()
    (tmp_path / "part2.safetensors").touch()
    assert ClipScore(str(tmp_path), str(folder)).missing() is None
    with pytest.raises(RewardError, match="nobody/nothing is neither a folder nor in the hub's cache"):
        ClipScore("nobody/nothing", str(folder)).load()


def test_asking_what_is_missing_imports_no_torch() -> None:
    program = (
        "import sys\nfrom digen.config import RewardTerm\nfrom digen.rewards.base import RewardSet\n"
        "names = ['clip-score', 'pickscore', 'hpsv2', 'aesthetic']\n"
        "assert len(RewardSet({n: RewardTerm() for n in names}, 1.0).missing()) == 4\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_layers_that_make_no_head_are_refused() -> None:
    wrong = {"layers.0.weight": torch.ones(3, 2), "layers.0.bias": torch.ones(3)}
    with pytest.raises(ValueError, match=r"make no head: \[\(2, 3\)\]"):
        linear_head(wrong, "layers.")
    with pytest.raises(ValueError, match="make no head"):
        linear_head({}, "layers.")
