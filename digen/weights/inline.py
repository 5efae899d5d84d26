"""Weights in the engine's own store: one process, where all workers are threads.

Invariant: the store holds a copy, which no optimizer step reaches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from digen.weights.base import Ticket, WeightTransport
from digen.weights.layout import Layout

WEIGHTS = "weights"


class InlineTransport(WeightTransport):
    """A copy in the memory of one process, for engine inline."""

    def place(self, layout: Layout) -> Ticket:
        return Ticket(layout, "", {WEIGHTS: torch.empty(layout.nbytes, dtype=torch.uint8)})

    def send(self, ticket: Ticket, tensors: Mapping[str, Tensor]) -> None:
        ticket.layout.pack(tensors, ticket.carried[WEIGHTS])

    def receive(self, ticket: Ticket, into: Mapping[str, Tensor]) -> None:
        buffer = ticket.carried[WEIGHTS]
        ticket.layout.check_size(buffer.numel(), f"the entry {WEIGHTS!r} of the store")
        ticket.layout.unpack(buffer, into)

    def free(self, ticket: Ticket) -> None:
        """The copy went with the ticket."""
