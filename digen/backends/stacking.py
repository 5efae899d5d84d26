"""`trainer.tsp: auto`: how many timesteps one pass of this worker takes. Paper section 3.2.2.

Invariant: the width changes how often the model is run and how much memory that takes, never the gradient (rule R11).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from digen.schedule.tsp import MARGIN, widest
from digen.types import Version

logger = logging.getLogger(__name__)


class Memory(Protocol):
    """What there is to know about a device's memory, in bytes."""

    def start(self) -> None:
        """Forget the highest use so far."""
        ...

    def used(self) -> int:
        """Highest use since `start`, less the use at `start`."""
        ...

    def free(self) -> int:
        """What a pass could take now."""
        ...


class CudaMemory:
    """As torch's allocator sees it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)

    def used(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def free(self) -> int:
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept


class Stacking:
    """The width for `auto`: all trained steps where there is no memory to measure (a CPU), else measured.

    The first version that is trained here takes one timestep a pass while the memory of each pass is measured; after it
    everything that stays in memory is there, the optimizer's state too. From the next version on the width is the
    largest with which a pass, taken to need as much for each further row as for those measured, fits into what is free.
    """

    def __init__(self, memory: Memory | None) -> None:
        self.memory = memory
        self.width: int | None = None
        self._measured_at: Version | None = None
        self._per_row = 0.0

    @classmethod
    def on(cls, device: torch.device) -> Stacking:
        return cls(CudaMemory(device) if device.type == "cuda" else None)

    def choose(self, version: Version, batch_size: int) -> int:
        """Timesteps of a pass under this version for `batch_size` samples at a time; 0: all trained ones."""
        if self.memory is None:
            return 0
        if self._measured_at is None:
            self._measured_at = version
        if self.width is None and version != self._measured_at and self._per_row:
            free = (1 - MARGIN) * self.memory.free()
            self.width = widest(free, self._per_row, batch_size)
            logger.info("trainer.tsp=auto: %d timesteps a pass, %.3g bytes a row", self.width, self._per_row)
        return self.width or 1

    @contextmanager
    def measured(self, rows: int) -> Iterator[None]:
        """Around a pass over so many rows (samples x timesteps)."""
        if self.memory is None or self.width is not None or self._measured_at is None:
            yield
            return
        self.memory.start()
        yield
        self._per_row = self.memory.used() / rows  # the last one counts: the first also makes the gradients
