"""The generator that samples with the model's own diffusers modules, for any model family.

Invariant: what it returns depends on weights and identities only. It has autograd: where `schedule.assist` allows, it
accumulates gradients when it has nothing to generate, with the trainer's own code.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from digen.backends.accumulation import AccumulatingWorker
from digen.config import GroupConfig
from digen.schedule.tsp import Width
from digen.types import Ref, ScoredRollout, Stats


class DiffusersGenerator(AccumulatingWorker):
    """Samples with diffusers modules in this process, any model family (diffusers)."""

    @property
    def placement(self) -> GroupConfig:
        return self.config.generator

    def _load_model(self) -> None:
        super()._load_model()
        if self.config.schedule.generators_help:
            self.load_base()

    def resting(self) -> Iterable[nn.Module | None]:
        if not self.config.generator.offload_between_calls:
            return ()
        return self.model.transformer, self.base, self.decoder

    def accumulate(self, scored: ScoredRollout, tsp: Width, denominator: float, last: bool) -> Stats:
        with self.on_device():
            return super().accumulate(scored, tsp, denominator, last)

    def hand_gradients(self) -> Ref:
        """Where the gradients are that this rank accumulated since it last handed some over; they are cleared here."""
        handed = self._store("gradients", self.gradients())
        self.model.transformer.zero_grad(set_to_none=True)
        return handed
