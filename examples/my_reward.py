"""A reward of your own: how much of the colour that the prompt names is in the sample.

digen run flowgrpo --reward examples/my_reward.py:named_colour
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = ("red", "green", "blue")


def named_colour(
    media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]], *, key: str = "color"
) -> list[float | None]:
    """Mean of that channel above the other two, in [0, 1]; None, a failed score, where no colour is named."""
    pixels = media.reshape(len(media), -1, 3) / 255.0  # images and videos alike
    scores: list[float | None] = []
    for sample, prompt, row in zip(pixels, prompts, metadata, strict=True):
        words = [str(row.get(key, "")), *prompt.lower().split()]
        channel = next((COLOURS.index(word) for word in words if word in COLOURS), None)
        scores.append(None if channel is None else _excess(sample, channel))
    return scores


def _excess(pixels: NDArray[np.float64], channel: int) -> float:
    others = np.delete(pixels, channel, axis=1).max(axis=1)
    return float(np.maximum(pixels[:, channel] - others, 0.0).mean())
