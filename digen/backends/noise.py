"""Noise that belongs to a sample, not to a worker (rule R8).

Invariant: the same (run seed, step, prompt, sample, stream) gives the same bits on every device, in every batch, order,
process and schedule. Drawn on the CPU in float32, then moved.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

INITIAL: Final = -1
"""Stream of the initial latents; the noise of denoising step i has stream i."""
EVALUATION: Final = -1
"""Global step of evaluation samples, which belong to no training step."""


def seed_of(seed: int, step: int, prompt_id: int, sample: int, stream: int) -> int:
    """A 63-bit seed for one draw: a hash, so that neighbouring identities have unrelated noise."""
    identity = struct.pack("<5q", seed, step, prompt_id, sample, stream)
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1


def draw(seed: int, step: int, identities: Iterable[tuple[int, int]], stream: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise (N, *shape), float32 on the CPU, one row per (prompt id, sample index)."""
    generator = torch.Generator()
    rows = []
    for prompt_id, sample in identities:
        generator.manual_seed(seed_of(seed, step, prompt_id, sample, stream))
        rows.append(torch.randn(shape, generator=generator))
    return torch.stack(rows)
