"""A worker that scores and does nothing else (`scoring.devices`), so that rewards are computed beside generation.

Invariant: it loads no model; its scores are those that a generator of one rank would give, since it runs the same code.
"""

from __future__ import annotations

from digen.backends.worker import TorchWorker
from digen.config import GroupConfig


class Scorer(TorchWorker):
    """Rewards of whole micro-batches, whoever generated them."""

    @property
    def placement(self) -> GroupConfig:
        return GroupConfig(devices=self.config.scoring.devices or "cpu")

    @property
    def scores_here(self) -> bool:
        return True

    @property
    def generates_here(self) -> bool:
        return False

    def load(self) -> None:
        self.model = self.new_model()  # of which nothing is loaded: how fast a video runs is all that is asked of it
        self._load_rewards()
