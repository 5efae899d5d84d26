"""HPS v3: transformers' Qwen2-VL with small random weights under both kinds of published names, the head by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn.functional import relu
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from digen.errors import ConfigError
from digen.rewards.hpsv3 import HPSv3
from digen.run import check_rewards

MEDIA: NDArray[np.uint8] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (3, 60, 40, 3), np.uint8)
PROMPTS = ["a red cube", "two cats and a far longer prompt", ""]
METADATA: list[dict[str, Any]] = [{}] * 3
INSTRUCTION = "Rate this: {text_prompt}\nIt is <|Reward|> of ten."
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
SMALL = {
    "text": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "vision": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Qwen2-VL's files, HPS v3's weights under both kinds of names, and an instruction."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("hpsv3")
    vocab = {piece: k for k, piece in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL])}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=SPECIAL)
    tokenizer.save_pretrained(folder)
    config = Qwen2VLConfig(
        text_config={**SMALL["text"], "vocab_size": len(vocab) + 9, "bos_token_id": None, "eos_token_id": None},
        vision_config=SMALL["vision"],
        image_token_id=vocab["<|image_pad|>"],
        video_token_id=vocab["<|video_pad|>"],
        vision_start_token_id=vocab["<|vision_start|>"],
        vision_end_token_id=vocab["<|vision_end|>"],
    )
    config.save_pretrained(folder)
    reader = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(reader))
    (folder / "instruction.txt").write_text(INSTRUCTION)
    torch.manual_seed(0)
    config.text_config.vocab_size = len(vocab) + 1  # as after resizing for one more token
    model = Qwen2VLForConditionalGeneration(config)
    new = {name: 0.3 * torch.randn_like(value) for name, value in model.state_dict().items()}
    shapes = {"0": (24, 32), "3": (16, 24), "5": (2, 16)}
    head = {f"rm_head.{k}.weight": torch.randn(shape) for k, shape in shapes.items()}
    head |= {f"rm_head.{k}.bias": torch.randn(shape[0]) for k, shape in shapes.items()}
    old = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): v
        for name, v in new.items()
    }
    assert old.keys() != new.keys()
    save_file({**new, **head}, folder / "new.safetensors")
    save_file({**old, **head}, folder / "old.safetensors")
    return folder


def loaded(files: Path, names: str = "new", **options: Any) -> HPSv3:
    texts = (str(files / f"{names}.safetensors"), str(files), str(files / "instruction.txt"))
    reward = HPSv3(*texts, dtype="float32", **options)
    reward.num_pixels = 6 * 28 * 28
    assert reward.missing() is None
    reward.load()
    return reward


def by_hand(files: Path, reward: HPSv3, image: NDArray[np.uint8], prompt: str) -> float:
    """One picture at a time through the class with the language head, in float64; the reward's head written down."""
    from safetensors.torch import load_file

    state = {name: value.double() for name, value in load_file(files / "new.safetensors").items()}
    config = Qwen2VLConfig.from_pretrained(files)
    config.text_config.vocab_size = state["lm_head.weight"].shape[0]
    model = Qwen2VLForConditionalGeneration(config).double().eval()
    model.load_state_dict({name: value for name, value in state.items() if not name.startswith("rm_head")})
    seen = reward.reader(images=[image], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == [[1, 6, 4]]
    letters = lambda text: reward.tokenizer(text)["input_ids"]  # noqa: E731
    special = {token: reward.tokenizer.convert_tokens_to_ids(token) for token in (*SPECIAL, "<|Reward|>")}
    before, after = INSTRUCTION.replace("{text_prompt}", prompt).split("<|Reward|>")
    ids = [
        special["<|im_start|>"],
        *letters("system\nYou are a helpful assistant."), special["<|im_end|>"], *letters("\n"),
        special["<|im_start|>"], *letters("user\n"), special["<|vision_start|>"], *[special["<|image_pad|>"]] * 6,
        special["<|vision_end|>"], *letters(before), special["<|Reward|>"], *letters(after), special["<|im_end|>"],
        *letters("\n"), special["<|im_start|>"], *letters("assistant\n"),
    ]  # fmt: skip
    tokens = torch.tensor([ids])
    with torch.no_grad():
        states = model(
            input_ids=tokens,
            pixel_values=seen["pixel_values"].double(),
            image_grid_thw=seen["image_grid_thw"],
            mm_token_type_ids=(tokens == special["<|image_pad|>"]).int(),
            output_hidden_states=True,
        ).hidden_states[-1]
    x = states[0, ids.index(special["<|Reward|>"])]
    for k in (0, 3, 5):
        x = state[f"rm_head.{k}.weight"] @ (relu(x) if k else x) + state[f"rm_head.{k}.bias"]
    return float(x[0])


def test_the_value_is_the_heads_first_output_at_the_reward_token(files: Path) -> None:
    reward = loaded(files)
    expected = [by_hand(files, reward, image, prompt) for image, prompt in zip(MEDIA, PROMPTS, strict=True)]
    assert np.std(expected) > 1e-2
    np.testing.assert_allclose(reward(MEDIA, PROMPTS, METADATA), expected, rtol=1e-4, atol=1e-4)


def test_files_of_older_and_newer_releases_are_read_alike(files: Path) -> None:
    assert loaded(files, "old")(MEDIA, PROMPTS, METADATA) == loaded(files, "new")(MEDIA, PROMPTS, METADATA)


def test_a_value_does_not_depend_on_the_batch_and_a_video_has_the_mean_of_its_frames(files: Path) -> None:
    reward = loaded(files, batch_size=2, frames=2)
    alone = [reward(MEDIA[k : k + 1], PROMPTS[k : k + 1], METADATA[:1])[0] for k in range(3)]
    np.testing.assert_allclose(reward(MEDIA, PROMPTS, METADATA), alone, rtol=1e-3, atol=1e-4)
    first, _, last = reward(MEDIA, PROMPTS[:1] * 3, METADATA)
    np.testing.assert_allclose(reward(MEDIA[None], PROMPTS[:1], METADATA[:1]), [(first + last) / 2], rtol=1e-3)


def test_a_prompt_cannot_write_tokens_of_the_model(files: Path) -> None:
    reward = loaded(files)
    tricky = ["a cat <|Reward|> <|image_pad|>"] * 3
    assert len(reward(MEDIA, tricky, METADATA)) == 3


def test_files_that_do_not_fit_are_refused(files: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(files / "new.safetensors")
    del state["model.language_model.norm.weight"]
    save_file(state, tmp_path / "short.safetensors")
    reward = HPSv3(str(tmp_path / "short.safetensors"), str(files), str(files / "instruction.txt"))
    with pytest.raises(ValueError, match=r"does not fit .*language_model\.norm\.weight"):
        reward.load()
    (tmp_path / "instruction.txt").write_text("{text_prompt}")
    with pytest.raises(ValueError, match="must stand in it once each"):
        HPSv3(str(files / "new.safetensors"), str(files), str(tmp_path / "instruction.txt")).load()


def test_what_is_missing_is_said_with_where_it_is(make_config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rewards(make_config("reward={hpsv3: {}}"))
    message = str(caught.value)
    assert "hf download MizzenAI/HPSv3 HPSv3.safetensors --local-dir ." in message
    assert (
        "hf download Qwen/Qwen2-VL-7B-Instruct --include 'config.json' --include 'preprocessor_config.json'" in message
    )
    assert "prompt_with_special_token of hpsv3/dataset/data_collator_qwen.py" in message
