"""ImageReward (https://arxiv.org/abs/2304.05977): what people think of a picture for its prompt, by BLIP and a head.

Value: the head's output for BLIP's text tokens that have seen the picture, at the first token, minus 0.1672 and divided
by 1.0333 (mean and std over its authors' data): about -2 to 2. Invariant: the weights are those of the published file,
name by name: one that is missing or of another shape is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from digen.rewards import weights
from digen.rewards.clip import linear_head
from digen.rewards.pictures import Count, PictureReward, frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's output, from the authors' code."""
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LONGEST = 35
"""Tokens of a prompt; the rest is cut."""
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SIZES = {"image_size": 224, "patch_size": 16, "vocab_size": 30524}

RENAMED = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.", ".self_attn."),
    (r"^norm\.", "post_layernorm."),
)
"""Names of the vision tower in the published file, and in transformers."""


class ImageReward(PictureReward):
    """What people think of a picture for its prompt, by ImageReward: about -2 to 2."""

    name = "image-reward"

    def __init__(
        self,
        path: str = "ImageReward.safetensors",
        processor: str = "google-bert/bert-base-uncased",
        device: str = "cpu",
        batch_size: Count = 16,
        frames: Count = 4,
    ) -> None:
        """`path`: the published file as safetensors. `processor`: the tokenizer's folder or hub id."""
        source = "ImageReward.pt"
        commands = (f"hf download THUDM/ImageReward {source} --local-dir .", weights.to_safetensors(source, path))
        self._file = weights.WeightFile(path, "path", commands)
        self._processor = weights.Repository(processor, "processor", weights.TOKENIZER)
        super().__init__([self._file, self._processor], device, batch_size, frames)
        self.sizes: Mapping[str, Mapping[str, int]] = {"vision": VISION, "text": TEXT, "both": SIZES}

    def load(self) -> None:
        from safetensors.torch import load_file
        from transformers import AutoTokenizer

        state = load_file(self._file.file)
        self.vision, self.text = (frozen(part, self.device) for part in self._towers(state))
        self.head = linear_head(state, "mlp.layers.").to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(self._processor.folder)

    def _towers(self, state: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """BLIP's vision tower and its text encoder with cross-attention, with these weights."""
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        both = self.sizes["both"]
        picture = {key: both[key] for key in ("image_size", "patch_size")}
        seen = {"encoder_hidden_size": self.sizes["vision"]["hidden_size"], "vocab_size": both["vocab_size"]}
        vision = BlipVisionModel(BlipVisionConfig(**self.sizes["vision"], **picture, layer_norm_eps=1e-6))
        text = BlipTextModel(BlipTextConfig(**self.sizes["text"], **seen, is_decoder=True), add_pooling_layer=False)
        renamed = {_renamed(key): value for key, value in _under(state, "blip.visual_encoder.").items()}
        for tower, values in ((vision, renamed), (text, _under(state, "blip.text_encoder."))):
            absent, _ = tower.load_state_dict(values, strict=False)
            if absent := [key for key in absent if not key.endswith("position_ids")]:
                raise ValueError(f"{self._file.path} is no ImageReward; missing: {', '.join(absent[:3])}")
        return vision.float(), text.float()

    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        import torch

        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=LONGEST, return_tensors="pt"
        ).to(self.device)
        pixels = torch.stack([self.pixels(image) for image in images]).to(self.device)
        patches = self.vision(pixel_values=pixels).last_hidden_state
        states = self.text(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], encoder_hidden_states=patches
        ).last_hidden_state
        scores: Tensor = self.head(states[:, 0])[:, 0]
        return (scores - MEAN) / STD

    def pixels(self, image: NDArray[np.uint8]) -> Tensor:
        """(3, side, side): the shorter side resized, bicubic, the centre cut out, in CLIP's scale of colours."""
        import numpy as np
        import torch
        from PIL import Image

        side = self.sizes["both"]["image_size"]
        height, width = (length * side // min(image.shape[:2]) for length in image.shape[:2])
        small = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
        left, top = round((width - side) / 2), round((height - side) / 2)
        colours = torch.from_numpy(np.asarray(small.crop((left, top, left + side, top + side))).copy()).float() / 255
        return ((colours - torch.tensor(PIXEL_MEAN)) / torch.tensor(PIXEL_STD)).permute(2, 0, 1)


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _renamed(key: str) -> str:
    for pattern, name in RENAMED:
        key = re.sub(pattern, name, key)
    return key
