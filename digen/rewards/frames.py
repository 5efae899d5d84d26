"""Videos for rewards of images: which frames are looked at, and one value out of theirs.

Invariant: an image is a video of one frame: its value is that of the frame, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` indices of `count`, at equal distances, the first and the last among them; all if there are fewer."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count // 2]
    return [math.floor(k * (count - 1) / (wanted - 1) + 0.5) for k in range(wanted)]


def mean_over_frames(
    media: NDArray[np.uint8],
    prompts: Sequence[str],
    wanted: int,
    score: Callable[[NDArray[np.uint8], list[str]], Sequence[float]],
) -> list[float]:
    """`score(images (N, height, width, 3), prompts)` of every sample; of a video the mean over so many frames."""
    frames = media[:, spread(media.shape[1], wanted)] if media.ndim == 5 else media[:, None]
    each = frames.shape[1]
    values = score(frames.reshape(-1, *frames.shape[2:]), [prompt for prompt in prompts for _ in range(each)])
    return [fmean(values[k : k + each]) for k in range(0, len(values), each)]
