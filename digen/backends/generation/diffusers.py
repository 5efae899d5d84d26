"""The generator that samples with the model's own diffusers modules, for any model family.

Invariant: what it returns depends on weights and identities only. It has autograd: where `schedule.assist` allows, it
accumulates gradients when it has nothing to generate, with the trainer's own code.
"""

from __future__ import annotations

from digen.backends.accumulation import AccumulatingWorker
from digen.config import GroupConfig
from digen.types import Ref


class DiffusersGenerator(AccumulatingWorker):
    """Samples with diffusers modules in this process, any model family (diffusers)."""

    @property
    def placement(self) -> GroupConfig:
        return self.config.generator

    def load(self) -> None:
        super().load()
        if self.config.schedule.generators_help:
            self.load_base()

    def hand_gradients(self) -> Ref:
        """Where the gradients are that this rank accumulated since it last handed some over; they are cleared here."""
        handed = self._store("gradients", self.gradients())
        self.model.transformer.zero_grad(set_to_none=True)
        return handed
