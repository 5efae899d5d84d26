"""Rewards whose own code needs an environment of its own: what `remote` asks, with what each must be told.

- `geneval`: share of what the prompt asks for that a detector found, or all or nothing, 0 to 1: Mask2Former and CLIP
  (https://arxiv.org/abs/2310.11513).
- `video-align`: quality, motion and alignment with the text, each in stds of its training data, summed: VideoReward
  (https://arxiv.org/abs/2501.13918).

Which of these a service computes is its own to say; the scales are those of the authors' code. Invariant: a sample that
the reward is not made for is not sent, and has no score (rule R17).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from digen.rewards.remote import Remote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

ASKED = ("tag", "include")
"""Metadata of GenEval's prompt files: the kind of prompt, and the objects with count, colour and position."""


class GenEval(Remote):
    """Whether the objects that the prompt asks for are there, by a detector behind the reward service's protocol."""

    def __call__(
        self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]
    ) -> list[float | None]:
        whole = [k for k, row in enumerate(metadata) if all(row.get(key) for key in ASKED)]
        if len(whole) < len(metadata):
            absent = len(metadata) - len(whole)
            log.warning("geneval: %d of %d prompts have no metadata %s; no score", absent, len(metadata), ASKED)
        if not whole:
            return [None] * len(metadata)
        found = super().__call__(media[whole], [prompts[k] for k in whole], [metadata[k] for k in whole])
        scores = dict(zip(whole, found, strict=True))
        return [scores.get(k) for k in range(len(metadata))]


class VideoAlign(Remote):
    """How good a video is and how well it fits its prompt, by VideoReward behind the reward service's protocol."""

    def __call__(
        self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]
    ) -> list[float | None]:
        if media.ndim != 5:
            raise ValueError("video-align scores videos; these samples are images")
        return super().__call__(media, prompts, metadata)
