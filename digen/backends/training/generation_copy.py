"""A whole copy of the model with which each rank of a sharded trainer generates on its own (`generate_with=copy`).

Invariant: it generates under the trainer's weights of that moment; between two calls it takes host memory alone. Paper
section 4 (the context switch of TAG).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from digen.types import Version
from digen.weights.state import trainable


class GenerationCopy:
    """A module in host memory, which is up to date with the weights of `version`; None: not yet."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.version: Version | None = None

    @torch.no_grad()
    def refresh(self, version: Version, wholes: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trained weights of a version, one after the other; nothing is gathered for one that is here."""
        if version == self.version:
            return
        own = trainable(self.module)
        for name, whole in wholes:
            own[name].copy_(whole)
        self.version = version

    @contextmanager
    def loaded(self, device: torch.device) -> Iterator[nn.Module]:
        """The copy on a device, whose memory is free again afterwards."""
        if device.type == "cpu":
            yield self.module
            return
        tensors = list(chain(self.module.parameters(), self.module.buffers()))
        host = [tensor.data for tensor in tensors]
        try:
            for tensor, data in zip(tensors, host, strict=True):
                tensor.data = data.to(device)
            yield self.module
        finally:
            for tensor, data in zip(tensors, host, strict=True):
                tensor.data = data
