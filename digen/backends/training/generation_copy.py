"""A whole copy of the model with which each rank of a sharded trainer generates on its own (`generate_with=copy`).

Invariant: it generates under the trainer's weights of that moment; between two calls it takes host memory alone. Paper
section 4 (the context switch of TAG).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from digen.backends.offload import Offloaded
from digen.types import Version
from digen.weights.state import trainable


class GenerationCopy:
    """A module in host memory, which is up to date with the weights of `version`; None: not yet."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.offloaded = module, Offloaded([module], device)
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
