"""What every reward must do (docs/rewards.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from digen.config import RewardTerm
from digen.errors import ConfigError
from digen.rewards.base import RewardSet


class RewardContract:
    """Subclass it as `class TestMine(RewardContract)` and set `reward`: a name, `path.py:name` or `module:name`."""

    reward: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    prompts: ClassVar[Sequence[str]] = ('a sign "OPEN"', "a red cube", 'a sign "SUN"', "a blue sphere")
    metadata: ClassVar[Sequence[Mapping[str, Any]]] = ({}, {}, {}, {})
    size: ClassVar[int] = 32
    """Edge of the images, in pixels."""
    is_video: ClassVar[bool] = False
    """Whether it is asked about video too."""
    judges_groups: ClassVar[bool] = False
    """Whether a score may depend on the other samples of its prompt."""
    tolerance: ClassVar[float] = 1e-6
    """Between the scores of a sample alone and among others, or scored twice."""

    def test_it_can_be_checked_without_being_loaded_and_options_that_it_lacks_are_refused(self) -> None:
        RewardSet({self.reward: self._term()}, 30.0).check()
        signature = RewardTerm.model_validate({**self.options, "not_an_option_of_it": 1})
        with pytest.raises(ConfigError, match="not_an_option_of_it"):
            RewardSet({self.reward: signature}, 30.0).check()

    def test_a_score_is_a_number_or_none_for_each_sample_in_order(self) -> None:
        scores = self._scores(self._media())
        assert len(scores) == len(self.prompts)
        assert any(map(math.isfinite, scores)), "no sample has a score"

    def test_scoring_twice_gives_the_same_and_leaves_the_media_alone(self) -> None:
        media = self._media()
        before = media.copy()
        assert self._same(self._scores(media), self._scores(media))
        assert (media == before).all()

    def test_a_sample_has_the_score_that_it_has_alone_whatever_else_is_scored(self) -> None:
        """Else the cut into micro-batches, or the number of workers, would change what is learned."""
        if self.judges_groups:
            pytest.skip("it compares the samples of a group")
        media, number = self._media(), len(self.prompts)
        together = self._scores(media)
        alone = [self._scores(media[k : k + 1], [k])[0] for k in range(number)]
        turned = self._scores(media[::-1], list(range(number))[::-1])
        assert self._same(alone, together)
        assert self._same(turned[::-1], together)

    def test_video_is_scored_too(self) -> None:
        if not self.is_video:
            pytest.skip("it is for images")
        video = np.repeat(self._media()[:, None], 5, axis=1)
        assert any(map(math.isfinite, self._scores(video)))

    def _term(self) -> RewardTerm:
        return RewardTerm.model_validate(dict(self.options))

    def _media(self) -> NDArray[np.uint8]:
        """One image for each prompt: rings of colour, each another."""
        y, x = np.mgrid[0 : self.size, 0 : self.size] / self.size
        waves = [np.sin(8 * np.hypot(x - 0.2 * k, y - 0.1 * c) + k) for k in range(len(self.prompts)) for c in range(3)]
        images = np.stack(waves).reshape(len(self.prompts), 3, self.size, self.size).transpose(0, 2, 3, 1)
        return ((images + 1) * 127.5).astype(np.uint8)

    def _scores(self, media: NDArray[np.uint8], rows: Sequence[int] | None = None) -> tuple[float, ...]:
        rewards = RewardSet({self.reward: self._term()}, 60.0)
        rewards.load()
        asked = range(len(self.prompts)) if rows is None else rows
        (scores,) = rewards.score(media, [self.prompts[k] for k in asked], [self.metadata[k] for k in asked]).values()
        return scores

    def _same(self, a: Sequence[float], b: Sequence[float]) -> bool:
        return all((math.isnan(x) and math.isnan(y)) or abs(x - y) <= self.tolerance for x, y in zip(a, b, strict=True))
