"""The reward of `ablation.py`: it takes no time, and it is smooth.

Invariant: a pixel that rounds the other way changes it by 1 / 256 of that pixel's share. (The size of a JPEG file jumps
by bytes instead, and advantages, which divide by the spread within a group, make whole weights out of that.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def brightness(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:  # noqa: ARG001
    """Mean brightness of each image, 0 to 1."""
    return [float(image.mean()) / 255 for image in media]
