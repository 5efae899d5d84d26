"""Modules that lie in host memory, and are on a device only while a call needs them.

Invariant: the host memory always has them; what is on the device is a copy that lives as long as the call. So there is
nothing to write back or to lose, weights that arrive in between are loaded where they stay, and all are bit-equal.
Paper section 4 (the context switch of TAG).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


class Offloaded:
    """Parameters and buffers of some modules. On a CPU, whose memory is the host's, a loaded copy saves nothing."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Take them off the device, into pinned memory: page-locked memory is copied from several times as fast."""
        self.device = device
        named = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
        self.tensors = list({id(tensor): tensor for tensor in named}.values())
        for tensor in self.tensors:
            host = tensor.data.cpu()
            tensor.data = host.pin_memory() if device.type == "cuda" else host

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """All of them on the device, until the end. Gradients that they get meanwhile stay there."""
        host = [tensor.data for tensor in self.tensors]
        try:
            for tensor, data in zip(self.tensors, host, strict=True):
                tensor.data = data.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            for tensor, data in zip(self.tensors, host, strict=True):
                tensor.data = data


def give_back(device: torch.device) -> None:
    """What torch keeps for its next tensor goes back to the device, for other processes that use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
