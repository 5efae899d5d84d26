"""Rewards that compare a picture with its prompt by the embeddings of a CLIP model, and one of the picture alone.

| reward | value | model |
|---|---|---|
| `clip-score` | exp(logit scale) * cosine / 30, about 0.5 to 1.2 | CLIP ViT-L/14 (https://arxiv.org/abs/2103.00020) |
| `pickscore` | exp(logit scale) * cosine / 26, about 0.7 to 0.95 | PickScore (https://arxiv.org/abs/2305.01569) |
| `hpsv2` | cosine, about 0.2 to 0.35 | HPS v2 (https://arxiv.org/abs/2306.09341) |
| `aesthetic` | a linear head on the picture's embedding, about 1 to 10 | LAION's predictor on CLIP ViT-L/14 |

The divisors 30 and 26 are flow_grpo's. Invariant: embeddings have length 1 and are made in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from digen.rewards import weights
from digen.rewards.pictures import Count, PictureReward, frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

LAION_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
OPENAI_L = "openai/clip-vit-large-patch14"


class Clip(PictureReward):
    """What the rewards of this file share: a CLIP model in float32 and its embeddings, normalised."""

    published: ClassVar[tuple[str, str]]
    """What `path` and `processor` are if they are not set."""

    def __init__(
        self,
        path: str | None = None,
        processor: str | None = None,
        device: str = "cpu",
        batch_size: Count = 16,
        frames: Count = 4,
    ) -> None:
        """Options of the term.

        path: folder or hub id of the weights; None: the published ones. processor: the same of tokenizer and settings.
        device: where the model is. batch_size: pictures in one pass. frames: so many of a video count.
        """
        model, reader = self.published
        self._path = weights.Repository(path or model, "path", weights.MODEL)
        files = (*weights.PREPROCESSOR, *weights.TOKENIZER)
        self._processor = weights.Repository(processor or reader, "processor", files)
        super().__init__([self._path, self._processor], device, batch_size, frames)

    def load(self) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        found = CLIPModel.from_pretrained(self._path.folder, use_safetensors=True, dtype="float32")
        self.model = frozen(found, self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(self._processor.folder)
        self.reader = AutoImageProcessor.from_pretrained(self._processor.folder, backend="pil")

    def cosines(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        """Cosines (N,) of the embeddings of pictures and their prompts."""
        return (self.images(images) * self.texts(prompts)).sum(-1)

    @property
    def scale(self) -> Tensor:
        """What a cosine is multiplied by to be a logit: about 100."""
        scale: Tensor = self.model.logit_scale.exp()
        return scale

    def images(self, images: NDArray[np.uint8]) -> Tensor:
        """Embeddings (N, C) of length 1 of pictures (N, height, width, 3)."""
        pixels = self.reader(images=list(images), return_tensors="pt")["pixel_values"].to(self.device)
        pooled = self.model.vision_model(pixel_values=pixels).pooler_output
        return _unit(self.model.visual_projection(pooled))

    def texts(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings (N, C) of length 1 of prompts, which are cut at the model's length (77 tokens)."""
        limit = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        pooled = self.model.text_model(
            input_ids=tokens["input_ids"].to(self.device), attention_mask=tokens["attention_mask"].to(self.device)
        ).pooler_output
        return _unit(self.model.text_projection(pooled))


def _unit(embedding_NC: Any) -> Tensor:
    unit: Tensor = embedding_NC / embedding_NC.norm(dim=-1, keepdim=True)
    return unit


class ClipScore(Clip):
    """How well a picture fits its prompt, by CLIP: logit / 30."""

    name = "clip-score"
    published = (OPENAI_L, OPENAI_L)

    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        return self.scale * self.cosines(images, prompts) / 30


class PickScore(Clip):
    """What people preferred of two pictures for a prompt, by a CLIP model trained on Pick-a-Pic: logit / 26."""

    name = "pickscore"
    published = ("yuvalkirstain/PickScore_v1", LAION_H)

    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        return self.scale * self.cosines(images, prompts) / 26


class HPSv2(Clip):
    """What people preferred of several pictures for a prompt, by a CLIP model trained on HPD v2: the cosine.

    The weights are OpenCLIP's ViT-H/14 in transformers' format: which release of HPS v2 they are is theirs to say.
    """

    name = "hpsv2"
    published = ("adams-story/HPSv2-hf", LAION_H)

    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        return self.cosines(images, prompts)


class Aesthetic(Clip):
    """How good a picture looks, whatever its prompt: LAION's linear head on CLIP's embedding of length 1."""

    name = "aesthetic"
    published = (OPENAI_L, OPENAI_L)

    def __init__(
        self,
        path: str | None = None,
        processor: str | None = None,
        head: str = "aesthetic.safetensors",
        device: str = "cpu",
        batch_size: Count = 16,
        frames: Count = 4,
    ) -> None:
        """`head`: a file with the layers of the head (sac+logos+ava1-l14-linearMSE), named as LAION names them."""
        super().__init__(path, processor, device, batch_size, frames)
        source = "aesthetic-model.pth"
        commands = (
            f"hf download trl-lib/ddpo-aesthetic-predictor {source} --local-dir .",
            weights.to_safetensors(source, head),
        )
        self._head = weights.WeightFile(head, "head", commands)
        self.sources.append(self._head)

    def load(self) -> None:
        from safetensors.torch import load_file

        super().load()
        self.head = linear_head(load_file(self._head.file), "layers.").to(self.device)

    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:  # noqa: ARG002
        scores: Tensor = self.head(self.images(images))
        return scores[:, 0]


def linear_head(state: Mapping[str, Tensor], prefix: str) -> Any:
    """Linear layers one after the other (there is nothing between them once dropout is off), in order of their numbers.

    `state` has `<prefix><number>.weight` and `.bias`. Raises ValueError when it has none or they do not fit.
    """
    import torch

    numbers = sorted(
        int(key.removeprefix(prefix).split(".")[0])
        for key in state
        if key.endswith(".weight") and key.startswith(prefix)
    )
    layers = []
    for number in numbers:
        weight, bias = (state[f"{prefix}{number}.{part}"] for part in ("weight", "bias"))
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
        layers.append(layer)
    widths = [(layer.in_features, layer.out_features) for layer in layers]
    if not layers or any(a[1] != b[0] for a, b in pairwise(widths)) or widths[-1][1] != 1:
        raise ValueError(f"{prefix}*: these linear layers make no head: {widths}")
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)
