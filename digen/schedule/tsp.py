"""TSP: which (sample, timestep) pairs share one forward and backward pass of the trainer. Paper section 3.2.2.

Invariant: every pair is in exactly one pass, so stacking changes the number of passes and never the summed gradient.
The number of passes is ceil(samples / batch_size) * ceil(timesteps / width).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Width = int | Literal["auto"]
"""Timesteps of a pass; 0: all trained ones; auto: what the worker finds to fit (`digen/backends/stacking.py`)."""


MARGIN: Final = 0.15
"""Share of the free memory that `auto` leaves alone: for fragments, and for longer prompts than were measured."""


class Chunk(NamedTuple):
    """One pass: these samples at these of their trained timesteps (positions in each sample's own list)."""

    samples: slice
    timesteps: slice


def chunks(samples: int, timesteps: int, batch_size: int, width: int) -> tuple[Chunk, ...]:
    """Passes over `samples` with `timesteps` trained steps each: up to `batch_size` samples by `width` steps (0: all).

    The samples of one batch pass through all their steps before the next batch begins.
    """
    width = width or max(timesteps, 1)
    return tuple(
        Chunk(slice(k, min(k + batch_size, samples)), slice(t, min(t + width, timesteps)))
        for k in range(0, samples, batch_size)
        for t in range(0, timesteps, width)
    )


def widest(free: float, per_row: float, batch_size: int) -> int:
    """How many timesteps of so many samples fit into free bytes, where a row needs so many; 1 at least."""
    return max(int(free / (per_row * batch_size)), 1)
