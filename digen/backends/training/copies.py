"""Copies of the trained weights that a trainer keeps: the policy that samples, and the one that training began with.

Invariant: a copy is in this rank's parts, as the weights are, and is saved and read as they are, bit for bit. While it
stands in for the weights of the model nobody else may read these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

OLD_POLICY: Final = "old_policy/weights.safetensors"
"""In a checkpoint: the policy that samples where that is not the trained one, but an average of it (DiffusionNFT)."""
START: Final = "start/weights.safetensors"
"""In a checkpoint: the weights of `--init-from`, which are what losses call the base."""


class Copy:
    """`parts`: this rank's parts of the copied weights, by name."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, parts: Mapping[str, Tensor]) -> Copy:
        """In memory of its own."""
        return cls({name: part.detach().clone() for name, part in parts.items()})

    @torch.no_grad()
    def load(self, parts: Mapping[str, Tensor]) -> None:
        """Be a copy of these."""
        for name, own in self.parts.items():
            own.copy_(parts[name])

    @torch.no_grad()
    def follow(self, parts: Mapping[str, Tensor], keeps: float) -> None:
        """Keep such a share of itself and take the rest from these; 0: be their copy."""
        if keeps == 0:
            return self.load(parts)
        for name, own in self.parts.items():
            own.copy_(own * keeps + parts[name] * (1 - keeps))
        return None

    @contextmanager
    def instead_of(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the model of these parts has the weights of the copy, and the copy holds the model's.

        They are exchanged tensor by tensor: there is no third set of all.
        """
        self._exchange(live)
        try:
            yield
        finally:
            self._exchange(live)

    @torch.no_grad()
    def _exchange(self, live: Mapping[str, Tensor]) -> None:
        for name, own in self.parts.items():
            held = own.clone()
            own.copy_(live[name])
            live[name].copy_(held)
