"""ImageReward: transformers' BLIP with small random weights under the published names, computed again in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, softmax

from digen.config import RewardTerm
from digen.errors import ConfigError
from digen.rewards.base import RewardSet
from digen.rewards.image_reward import MEAN, PIXEL_MEAN, PIXEL_STD, STD, ImageReward
from digen.run import check_rewards

MEDIA: NDArray[np.uint8] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (3, 40, 30, 3), np.uint8)
PROMPTS = ["a red cube", "", "cat " * 60]
METADATA: list[dict[str, Any]] = [{}] * 3
SIDE, PATCH, HEADS, LAYERS = 32, 16, 2, 2
WIDE, NARROW = 24, 16
"""Widths of the vision tower and of the text encoder."""
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
]


def random_state() -> dict[str, Tensor]:
    """All of the published file's names that are read, small."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDE),
        "pos_embed": (1, 1 + (SIDE // PATCH) ** 2, WIDE),
        "patch_embed.proj.weight": (WIDE, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDE,),
        **norm("norm", WIDE),
    }
    for k in range(LAYERS):
        shapes |= {**norm(f"blocks.{k}.norm1", WIDE), **norm(f"blocks.{k}.norm2", WIDE)}
        shapes |= {**linear(f"blocks.{k}.attn.qkv", 3 * WIDE, WIDE), **linear(f"blocks.{k}.attn.proj", WIDE, WIDE)}
        shapes |= {**linear(f"blocks.{k}.mlp.fc1", 2 * WIDE, WIDE), **linear(f"blocks.{k}.mlp.fc2", WIDE, 2 * WIDE)}
    text: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), NARROW),
        "embeddings.position_embeddings.weight": (512, NARROW),
        **norm("embeddings.LayerNorm", NARROW),
    }
    for k in range(LAYERS):
        for attention, seen in (("attention", NARROW), ("crossattention", WIDE)):
            at = f"encoder.layer.{k}.{attention}"
            text |= {**linear(f"{at}.self.query", NARROW, NARROW), **linear(f"{at}.output.dense", NARROW, NARROW)}
            text |= {**linear(f"{at}.self.key", NARROW, seen), **linear(f"{at}.self.value", NARROW, seen)}
            text |= norm(f"{at}.output.LayerNorm", NARROW)
        at = f"encoder.layer.{k}"
        text |= {**linear(f"{at}.intermediate.dense", 40, NARROW), **linear(f"{at}.output.dense", NARROW, 40)}
        text |= norm(f"{at}.output.LayerNorm", NARROW)
    head = {**linear("layers.0", 12, NARROW), **linear("layers.2", 8, 12), **linear("layers.4", 1, 8)}
    groups = {"blip.visual_encoder.": shapes, "blip.text_encoder.": text, "mlp.": head}
    torch.manual_seed(0)
    return {prefix + name: 0.4 * torch.randn(shape) for prefix, part in groups.items() for name, shape in part.items()}


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


class Again:
    """The same model, written down by hand for one picture and one prompt at a time."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = {name: value.double() for name, value in state.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        parts = []
        for one, two, three in zip(q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1), strict=True):
            scores = one @ two.T / one.shape[-1] ** 0.5
            parts.append(softmax(scores if seen is None else scores.masked_fill(~seen, -torch.inf), -1) @ three)
        return torch.cat(parts, -1)

    def picture(self, pixels: Tensor) -> Tensor:
        at = "blip.visual_encoder."
        weight, bias = (self.state[f"{at}patch_embed.proj.{part}"] for part in ("weight", "bias"))
        patches = torch.nn.functional.conv2d(pixels[None], weight, bias, stride=PATCH)[0].flatten(1).T
        x = torch.cat([self.state[f"{at}cls_token"][0], patches]) + self.state[f"{at}pos_embed"][0]
        for k in range(LAYERS):
            block = f"{at}blocks.{k}."
            q, key, v = self.linear(f"{block}attn.qkv", self.norm(f"{block}norm1", x, 1e-6)).chunk(3, -1)
            x = x + self.linear(f"{block}attn.proj", self.attend(q, key, v))
            x = x + self.linear(
                f"{block}mlp.fc2", gelu(self.linear(f"{block}mlp.fc1", self.norm(f"{block}norm2", x, 1e-6)))
            )
        return self.norm(f"{at}norm", x, 1e-6)

    def value(self, pixels: Tensor, tokens: list[int]) -> float:
        at, patches = "blip.text_encoder.", self.picture(pixels)
        seen = torch.tensor([token != 0 for token in tokens])
        words = self.state[f"{at}embeddings.word_embeddings.weight"][tokens]
        x = words + self.state[f"{at}embeddings.position_embeddings.weight"][: len(tokens)]
        x = self.norm(f"{at}embeddings.LayerNorm", x, 1e-12)
        for k in range(LAYERS):
            layer = f"{at}encoder.layer.{k}."
            for name in ("attention", "crossattention"):
                source, mask = (x, seen) if name == "attention" else (patches, None)
                q = self.linear(f"{layer}{name}.self.query", x)
                found = self.attend(
                    q, *(self.linear(f"{layer}{name}.self.{part}", source) for part in ("key", "value")), mask
                )
                x = self.norm(
                    f"{layer}{name}.output.LayerNorm", x + self.linear(f"{layer}{name}.output.dense", found), 1e-12
                )
            inner = gelu(self.linear(f"{layer}intermediate.dense", x))
            x = self.norm(f"{layer}output.LayerNorm", x + self.linear(f"{layer}output.dense", inner), 1e-12)
        score = x[0]
        for name in ("mlp.layers.0", "mlp.layers.2", "mlp.layers.4"):
            score = self.linear(name, score)
        return (float(score[0]) - MEAN) / STD


def by_hand(image: NDArray[np.uint8]) -> Tensor:
    small = Image.fromarray(image).resize((32, 42), Image.Resampling.BICUBIC).crop((0, 5, 32, 37))  # 30 x 40 pixels
    return torch.from_numpy(((np.asarray(small) / 255 - PIXEL_MEAN) / PIXEL_STD).transpose(2, 0, 1))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The weights' file and the tokenizer's folder."""
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("image_reward")
    save_file(random_state(), folder / "weights.safetensors")
    BertTokenizer(vocab={word: k for k, word in enumerate(WORDS)}).save_pretrained(folder / "tokenizer")
    return folder / "weights.safetensors", folder / "tokenizer"


def small(files: tuple[Path, Path], **options: Any) -> ImageReward:
    reward = ImageReward(*map(str, files), **options)
    widths = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    reward.sizes = {
        "vision": {"hidden_size": WIDE, "intermediate_size": 2 * WIDE, **widths},
        "text": {"hidden_size": NARROW, "intermediate_size": 40, **widths},
        "both": {"image_size": SIDE, "patch_size": PATCH, "vocab_size": len(WORDS)},
    }
    return reward


def test_the_value_is_that_of_the_same_model_written_down_again(files: tuple[Path, Path]) -> None:
    reward, again = small(files, batch_size=2), Again(random_state())
    reward.load()
    expected = []
    for image, prompt in zip(MEDIA, PROMPTS, strict=True):
        letters = [WORDS.index(c if k == 0 else f"##{c}") for word in prompt.split() for k, c in enumerate(word)]
        tokens = [2, *letters[:33], 3]
        expected.append(again.value(by_hand(image), tokens + [0] * (35 - len(tokens))))
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(reward(MEDIA, PROMPTS, METADATA), expected, rtol=1e-4, atol=1e-4)


def test_a_video_has_the_mean_of_its_frames(files: tuple[Path, Path]) -> None:
    reward = small(files, frames=2)
    reward.load()
    first, _, last = reward(MEDIA, PROMPTS[:1] * 3, METADATA)
    np.testing.assert_allclose(reward(MEDIA[None], PROMPTS[:1], METADATA[:1]), [(first + last) / 2], rtol=1e-4)


def test_a_file_that_lacks_weights_or_is_of_another_size_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    state = random_state()
    del state["blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"]
    save_file(state, tmp_path / "short.safetensors")
    with pytest.raises(ValueError, match=r"is no ImageReward; missing: encoder\.layer\.1\.crossattention\.self\.key"):
        small((tmp_path / "short.safetensors", files[1])).load()
    wider = small(files)
    wider.sizes = {**wider.sizes, "vision": {**wider.sizes["vision"], "hidden_size": 2 * WIDE}}
    with pytest.raises(RuntimeError, match="size mismatch"):
        wider.load()


def test_what_is_missing_is_said_with_the_commands_that_get_it(make_config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rewards(make_config("reward={image-reward: {}}"))
    message = str(caught.value)
    assert "hf download THUDM/ImageReward ImageReward.pt --local-dir ." in message
    assert "torch.load('ImageReward.pt', map_location='cpu', weights_only=True)" in message
    assert "hf download google-bert/bert-base-uncased --include 'tokenizer*'" in message


def test_it_is_found_by_its_name(files: tuple[Path, Path]) -> None:
    options = dict(zip(("path", "processor"), map(str, files), strict=True))
    rewards = RewardSet({"image-reward": RewardTerm.model_validate(options)}, 60.0)
    assert rewards.missing() == []


def test_the_command_that_makes_a_safetensors_file_makes_one(tmp_path: Path) -> None:
    import subprocess
    import sys

    from safetensors.torch import load_file

    from digen.rewards.weights import to_safetensors

    tensor = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": tensor, "b": tensor.T}, tmp_path / "old.pt")
    command = to_safetensors("old.pt", "new.safetensors").replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=120)
    made = load_file(tmp_path / "new.safetensors")
    assert made["a"].equal(tensor)
    assert made["b"].equal(tensor.T)
