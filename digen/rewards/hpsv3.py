"""HPS v3 (https://arxiv.org/abs/2508.03789): what people preferred, by Qwen2-VL-7B with a head of three layers.

Value: the first of the head's two outputs (mean and uncertainty of the preference) at the token `<|Reward|>`; without
bounds. The picture is shown with as near to 256 * 28 * 28 pixels as its shape allows, as its authors' code does.
Invariant: the weights are those of the published file, name by name; the instruction is its authors', from a file, and
stands here in no form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from digen.rewards import weights
from digen.rewards.pictures import Count, PictureReward, frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

REWARD = "<|Reward|>"
PICTURE = "<|image_pad|>"
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|>{picture}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen2-VL's template for one picture and one text."""
NUM_PIXELS = 256 * 28 * 28
PLACE = "{text_prompt}"
"""Where the prompt stands in the authors' instruction."""
NAMES = (
    (r"^model\.visual\.", "visual."),
    (r"^model\.language_model\.", "language_model."),
    (r"^model\.", "language_model."),
)
"""Names in files that older and newer releases of transformers wrote, and those of its class today."""


class HPSv3(PictureReward):
    """What people preferred of several pictures for a prompt, by HPS v3; without bounds."""

    name = "hpsv3"

    def __init__(
        self,
        path: str = "HPSv3.safetensors",
        processor: str = "Qwen/Qwen2-VL-7B-Instruct",
        instruction: str = "hpsv3-instruction.txt",
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        device: str = "cpu",
        batch_size: Count = 4,
        frames: Count = 4,
    ) -> None:
        """Options of the term.

        path: the published file. processor: folder or hub id of Qwen2-VL's configuration, tokenizer and settings.
        instruction: a text file with the authors' instruction, in which {text_prompt} and <|Reward|> stand once each.
        """
        get = "hf download MizzenAI/HPSv3 HPSv3.safetensors --local-dir ."
        copy = "INSTRUCTION and then prompt_with_special_token of hpsv3/dataset/data_collator_qwen.py, in a text file"
        self._file = weights.WeightFile(path, "path", (get,))
        self._instruction = weights.WeightFile(instruction, "instruction", (f"{copy} (github.com/MizzenAI/HPSv3)",))
        files = ("config.json", *weights.PREPROCESSOR, *weights.TOKENIZER)
        self._processor = weights.Repository(processor, "processor", files)
        super().__init__([self._file, self._processor, self._instruction], device, batch_size, frames)
        self._dtype, self.num_pixels = dtype, NUM_PIXELS

    def load(self) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Qwen2VLModel

        self.instruction = _instruction(self._instruction.file)
        folder, state = self._processor.folder, load_file(self._file.file)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        self.tokenizer.add_special_tokens({"additional_special_tokens": [REWARD]})
        limits = {"min_pixels": self.num_pixels, "max_pixels": self.num_pixels}
        self.reader = AutoImageProcessor.from_pretrained(folder, backend="pil", **limits)
        config = AutoConfig.from_pretrained(folder)
        renamed = {_renamed(key): value for key, value in state.items() if not key.startswith(("rm_head.", "lm_head."))}
        config.text_config.vocab_size = len(renamed["language_model.embed_tokens.weight"])
        dtype = getattr(torch, self._dtype)
        model, report = Qwen2VLModel.from_pretrained(
            None, config=config, state_dict=renamed, dtype=dtype, output_loading_info=True
        )
        if absent := [key for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in report[kind]]:
            raise ValueError(f"{self._file.path} does not fit {self._processor.path}: {absent[:3]}")
        self.model, self.head = frozen(model, self.device), frozen(_head(state), self.device)
        self.reward_token = self.tokenizer.convert_tokens_to_ids(REWARD)
        self.picture_token = self.tokenizer.convert_tokens_to_ids(PICTURE)

    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        seen = self.reader(images=list(images), return_tensors="pt")
        merged = self.reader.merge_size**2
        sizes = [int(grid.prod()) // merged for grid in seen["image_grid_thw"]]
        texts = [self.text(prompt, size) for prompt, size in zip(prompts, sizes, strict=True)]
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
        ids = tokens["input_ids"]
        states = self.model(
            input_ids=ids,
            attention_mask=tokens["attention_mask"],
            pixel_values=seen["pixel_values"].to(self.device),
            image_grid_thw=seen["image_grid_thw"].to(self.device),
            mm_token_type_ids=(ids == self.picture_token).int(),
            use_cache=False,
        ).last_hidden_state
        outputs: Tensor = self.head(states[ids == self.reward_token].float())
        return outputs[:, 0]

    def text(self, prompt: str, num_patches: int) -> str:
        """What the model reads: the picture's places, then the instruction. Tokens written in a prompt are spelled."""
        plain = prompt.replace("<|", "< |")
        return CHAT.format(picture=PICTURE * num_patches, text=self.instruction.replace(PLACE, plain))


def _instruction(file: Path) -> str:
    text = file.read_text("utf-8")
    if text.count(REWARD) != 1 or text.count(PLACE) != 1:
        raise ValueError(f"{file}: {PLACE} and {REWARD} must stand in it once each")
    return text


def _renamed(key: str) -> str:
    for pattern, name in NAMES:
        key, done = re.subn(pattern, name, key)
        if done:
            break
    return key


def _head(state: Mapping[str, Tensor]) -> Any:
    """Width to 1024, ReLU, to 16, ReLU, to 2, in float32, under the published names."""
    import torch

    layers = {key.removeprefix("rm_head."): value.float() for key, value in state.items() if key.startswith("rm_head.")}
    sizes = [layers[f"{number}.weight"].shape for number in (0, 3, 5)]
    head = torch.nn.Sequential(
        torch.nn.Linear(sizes[0][1], sizes[0][0]),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.05),
        torch.nn.Linear(sizes[1][1], sizes[1][0]),
        torch.nn.ReLU(),
        torch.nn.Linear(sizes[2][1], sizes[2][0]),
    )
    head.load_state_dict(layers)
    return head
