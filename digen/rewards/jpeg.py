"""Size of a sample as a JPEG file: rewards that need no model, so that a run can be tried anywhere.

Source of both formulas: DDPO (https://arxiv.org/abs/2305.13301), in the scale that flow_grpo uses. Invariant: the
value of a sample depends on its pixels alone. A video's size is the mean over its frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from statistics import fmean
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

QUALITY = 95


def jpeg_kilobytes(image: NDArray[np.uint8]) -> float:
    """Size in kB (1000 bytes) of a JPEG file of quality 95. `image`: uint8 (height, width, 3), RGB."""
    file = BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=QUALITY)
    return file.tell() / 1000


def _sizes(media: NDArray[np.uint8]) -> list[float]:
    frames = media if media.ndim == 5 else media[:, None]
    return [fmean(jpeg_kilobytes(frame) for frame in sample) for sample in frames]


class JpegIncompressibility:
    """Size of the sample as a JPEG file in kB: more detail, more noise. About 1 at 32 px."""

    def __call__(self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:  # noqa: ARG002
        return _sizes(media)


class JpegCompressibility:
    """Minus the size of the sample as a JPEG file in kB, divided by 500: flatter, smoother images. At most 0."""

    def __call__(self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:  # noqa: ARG002
        return [-size / 500 for size in _sizes(media)]
