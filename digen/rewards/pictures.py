"""What the rewards share that look at single pictures with a model of their own: missing weights, batches, videos.

Invariant: a value is a function of a sample's own pixels and prompt; what else is in a batch changes it by rounding at
most. Of a video the mean over `frames` frames counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from digen.rewards.frames import mean_over_frames
from digen.rewards.weights import Repository, WeightFile, all_missing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    M = TypeVar("M", bound=nn.Module)

Count = Annotated[int, Field(ge=1)]


class PictureReward(ABC):
    """A model that gives a picture and its prompt a value. `sources`: what it loads."""

    name: ClassVar[str]

    def __init__(
        self, sources: Sequence[Repository | WeightFile], device: str, batch_size: int, num_frames: int
    ) -> None:
        self.sources = list(sources)
        self.device, self._batch_size, self._num_frames = device, batch_size, num_frames

    def missing(self) -> str | None:
        """What must be downloaded first."""
        return all_missing(self.name, self.sources)

    @abstractmethod
    def load(self) -> None:
        """Load what `value` needs. Raises ValueError or RuntimeError for files that are not this reward's."""

    @abstractmethod
    def value(self, images: NDArray[np.uint8], prompts: list[str]) -> Tensor:
        """Values (N,) of pictures (N, height, width, 3) and their prompts."""

    def __call__(self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:  # noqa: ARG002
        return mean_over_frames(media, prompts, self._num_frames, self._scores)

    def _scores(self, images: NDArray[np.uint8], prompts: list[str]) -> list[float]:
        import torch

        size = self._batch_size
        with torch.inference_mode():
            parts = [self.value(images[k : k + size], prompts[k : k + size]) for k in range(0, len(images), size)]
            return [float(value) for value in torch.cat(parts).double().cpu()]


def frozen(model: M, device: str) -> M:
    """The model on this device, as it is used and not trained."""
    return model.eval().requires_grad_(False).to(device)
