"""Which denoising steps get noise and which are trained. Paper section 2.1 (the set S_i).

Invariant: every answer is a pure function of (run seed, global step, prompt, sample), so that a resumed run, another
worker or another schedule gets the same one (R8), and noise falls on the same steps for all samples of a group (R13).
Draws come from a hash, not from a library's generator: they never change with a version.
"""
# ruff: noqa: ARG002 (a selector may depend on less than it is told)

from __future__ import annotations

import hashlib
import math
import struct
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from digen.algos.base import StepSelector
from digen.config import Count
from digen.errors import ConfigError

_GROUP = -1
"""Stands for the sample index in draws that a whole group shares."""


def _draw(seed: int, step: int, prompt_id: int, sample: int, index: int) -> int:
    """A 64-bit number that looks random and belongs to this identity."""
    identity = struct.pack("<5q", seed, step, prompt_id, sample, index)
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8, person=b"digen.steps").digest(), "little")


class AllButLast(StepSelector):
    """Noise on all steps, all trained but the last (Flow-GRPO)."""

    type: Literal["all-but-last"] = "all-but-last"

    def noisy(self, seed: int, step: int, prompt_id: int, num_steps: int) -> tuple[int, ...]:
        return tuple(range(num_steps))

    def trained(self, seed: int, step: int, prompt_id: int, sample: int, num_steps: int) -> tuple[int, ...]:
        return tuple(range(num_steps - 1))

    def num_trained(self, num_steps: int) -> int:
        return num_steps - 1


class RandomFraction(StepSelector):
    """Noise on all steps, a random share of them trained, never the last (DanceGRPO)."""

    type: Literal["random-fraction"] = "random-fraction"
    fraction: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.6
    """Share of the steps that is trained: their number is rounded down, at least 1 and at most all but the last."""
    of: Literal["all", "all-but-last"] = "all"
    """What the share is of: 0.4 of 10 steps is 4 of all, 3 of all but the last (as DanceGRPO counts)."""
    per_sample: bool = True
    """Every sample trains its own steps (DanceGRPO); False: one choice for the samples of a group."""

    def noisy(self, seed: int, step: int, prompt_id: int, num_steps: int) -> tuple[int, ...]:
        return tuple(range(num_steps))

    def trained(self, seed: int, step: int, prompt_id: int, sample: int, num_steps: int) -> tuple[int, ...]:
        who = sample if self.per_sample else _GROUP
        order = sorted(range(num_steps - 1), key=lambda i: _draw(seed, step, prompt_id, who, i))
        return tuple(sorted(order[: self.num_trained(num_steps)]))

    def num_trained(self, num_steps: int) -> int:
        whole = num_steps if self.of == "all" else num_steps - 1
        exact = math.floor(self.fraction * whole + 1e-9)  # 0.29 * 100 is 28.999... in binary, and means 29
        return min(max(exact, 1), num_steps - 1)


class Window(StepSelector):
    """`size` neighbouring steps within [low, high) are trained, the same for all samples of a group (Flow-GRPO-Fast).

    `Window(size=3, low=0, high=3)` trains exactly the first three steps.
    """

    type: Literal["window"] = "window"
    size: Count = 2
    """Steps."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step that a window may hold."""
    high: Count | None = None
    """First step beyond all windows; None: half of the steps."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Denoising steps that the window moves on by at each global step, from `low` and back to it at the end.

    0: it does not slide, a window is drawn for every global step and prompt.
    """
    noise: Literal["window", "all"] = "window"
    """Steps with noise: only the trained ones, or all."""

    @model_validator(mode="after")
    def _fits_range(self) -> Window:
        if self.high is not None and self.size > self.high - self.low:
            raise ValueError(
                f"a window of size={self.size} does not fit into low={self.low} to high={self.high} (exclusive)"
            )
        return self

    def check(self, num_steps: int) -> None:
        """Raises ConfigError when the range holds the last step, or (high unset) cannot hold the window."""
        super().check(num_steps)
        high = self._high(num_steps)
        if high > num_steps - 1:
            raise ConfigError(
                f"algorithm.steps.high={high}: the last of sampling.num_steps={num_steps} steps is never trained; "
                f"allowed: at most {num_steps - 1}"
            )
        if self.size > high - self.low:
            raise ConfigError(
                f"algorithm.steps.size={self.size} does not fit into steps {self.low} to {high} (exclusive), "
                f"sampling.num_steps={num_steps}; set algorithm.steps.high (at most {num_steps - 1})"
            )

    def noisy(self, seed: int, step: int, prompt_id: int, num_steps: int) -> tuple[int, ...]:
        return tuple(range(num_steps)) if self.noise == "all" else self._window(seed, step, prompt_id, num_steps)

    def trained(self, seed: int, step: int, prompt_id: int, sample: int, num_steps: int) -> tuple[int, ...]:
        return self._window(seed, step, prompt_id, num_steps)

    def num_trained(self, num_steps: int) -> int:
        return self.size

    def _high(self, num_steps: int) -> int:
        return num_steps // 2 if self.high is None else self.high

    def _window(self, seed: int, step: int, prompt_id: int, num_steps: int) -> tuple[int, ...]:
        positions = self._high(num_steps) - self.low - self.size + 1
        shift = step * self.stride if self.stride else _draw(seed, step, prompt_id, _GROUP, 0)
        start = self.low + shift % positions
        return tuple(range(start, start + self.size))


Steps = Annotated[AllButLast | RandomFraction | Window, Field(discriminator="type")]
"""Any of the built-in selectors, chosen by `type`."""
