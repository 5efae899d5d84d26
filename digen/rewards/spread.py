"""How far the samples of a prompt are from each other: to be watched, with weight 0, not to be trained on.

Invariant: a value depends on the pixels of the samples of its own prompt alone. Formula: the mean absolute difference
of pixel values (0..255) to the nearest other sample of the same prompt; 0 where another is equal to the last pixel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def spread(media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float | None]:  # noqa: ARG001
    """Distance in pixel values to the nearest other sample of the prompt; weight 0 shows a collapse to one image."""
    groups = defaultdict(list)
    for row, prompt in enumerate(prompts):
        groups[prompt].append(row)
    distances: list[float | None] = [None] * len(prompts)
    for rows in groups.values():
        pixels = media[rows].reshape(len(rows), -1).astype("int16")
        for k, row in enumerate(rows):
            others = [abs(pixels[k] - pixels[j]).mean() for j in range(len(rows)) if j != k]
            distances[row] = float(min(others)) if others else None
    return distances
