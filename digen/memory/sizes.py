"""What must be known of a model to say what a rank holds of it.

Invariant: plain numbers; who counts them is `digen/memory/measure.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as a worker keeps it."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Weights:
    """A transformer's: those of each block, then those outside of blocks; and its buffers, which are never divided."""

    units: tuple[tuple[Weight, ...], ...]
    buffers: int
    """Bytes."""

    @property
    def all(self) -> Iterator[Weight]:
        return chain.from_iterable(self.units)

    @property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.all if weight.trained]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.all)


class Sizes(Protocol):
    """A model as one group of workers keeps it. All in bytes."""

    @property
    def weights(self) -> Weights: ...

    @property
    def encoders(self) -> int:
        """All text encoders."""
        ...

    @property
    def decoder(self) -> int:
        """The VAE."""
        ...

    @property
    def latents(self) -> int:
        """One sample's."""
        ...

    @property
    def num_latents(self) -> int:
        """Latents that a rollout keeps of one trained step of a sample: before and after it, and what is recorded."""
        ...

    @property
    def media(self) -> int:
        """One sample's, as uint8."""
        ...

    @property
    def conditioning(self) -> int:
        """One prompt's, the longest that the settings allow, with what guidance leads away from."""
        ...

    def pass_bytes(self, rows: int, *, trained: bool, checkpointed: bool = False) -> int:
        """What a forward pass over so many rows needs besides weights; `trained`: with the backward pass after it.

        Gradients of weights are not counted, but for those on their way.
        """
        ...

    def decode_bytes(self, rows: int) -> int:
        """What decoding so many samples needs besides weights."""
        ...
