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
from abc import abstractmethod
from bisect import bisect_right
from itertools import accumulate
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from digen.algos.base import StepSelector
from digen.config import Count, NonNegative
from digen.errors import ConfigError

_GROUP = -1
"""Stands for the sample index in draws that a whole group shares."""
_ALL_PROMPTS = -1
"""Stands for the prompt in draws that all groups of a step share."""


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


class Windowed(StepSelector):
    """`size` neighbouring steps within [low, high) are trained, the same for all samples of a group.

    Subclasses say where the window begins. It is always whole: never shorter at the end of its range, never empty.
    """

    size: Count = 2
    """Steps."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step that a window may hold."""
    high: Count | None = None
    """First step beyond all windows; None: half of the steps."""
    noise: Literal["window", "all"] = "window"
    """Steps with noise: only the trained ones, or all."""

    @model_validator(mode="after")
    def _fits_range(self) -> Self:
        if self.high is not None and self.size > self.high - self.low:
            raise ValueError(
                f"a window of size={self.size} does not fit into low={self.low} to high={self.high} (exclusive)"
            )
        return self

    def check(self, num_steps: int) -> None:
        """Raises ConfigError when the range holds the last step, or (high unset) cannot hold the window."""
        super().check(num_steps)
        high = self.end(num_steps)
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

    def end(self, num_steps: int) -> int:
        """First step beyond all windows."""
        return num_steps // 2 if self.high is None else self.high

    @abstractmethod
    def start(self, seed: int, step: int, prompt_id: int, num_steps: int) -> int:
        """First step of the window."""

    def _window(self, seed: int, step: int, prompt_id: int, num_steps: int) -> tuple[int, ...]:
        start = self.start(seed, step, prompt_id, num_steps)
        return tuple(range(start, start + self.size))


class Window(Windowed):
    """A window that is drawn, or slides by `stride` at every global step (Flow-GRPO-Fast).

    `Window(size=3, low=0, high=3)` trains exactly the first three steps.
    """

    type: Literal["window"] = "window"
    stride: Annotated[int, Field(ge=0)] = 0
    """Denoising steps that the window moves on by at each global step, from `low` and back to it at the end.

    0: it does not slide, a window is drawn for every global step and prompt.
    """

    def start(self, seed: int, step: int, prompt_id: int, num_steps: int) -> int:
        positions = self.end(num_steps) - self.low - self.size + 1
        shift = step * self.stride if self.stride else _draw(seed, step, prompt_id, _GROUP, 0)
        return self.low + shift % positions


class MovingWindow(Windowed):
    """A window that stays for some global steps, for all prompts, and then moves on (MixGRPO).

    Unlike the reference's, which grows shorter at the end of the range and is empty at the last of its positions, it
    goes back to the beginning once it has been at the end.
    """

    type: Literal["moving-window"] = "moving-window"
    size: Count = 4
    """Steps."""
    high: Count | None = None
    """First step beyond all windows; None: the last step."""
    order: Literal["progressive", "random"] = "progressive"
    """From the first steps to the last and again, or a position drawn at every move."""
    stride: Count = 1
    """Denoising steps between two neighbouring positions; at most `size`, so that none is left out."""
    every: Count | None = None
    """Global steps that the window stays at a position; None: 25, or 1 with `order=random`."""
    decay: NonNegative = 0.0
    """It stays ceil(every exp(-decay (start - decay_after))) beyond step `decay_after`; MixGRPO's decay is 0.1."""
    decay_after: Annotated[int, Field(ge=0)] = 13
    """Denoising step up to which it stays for `every` global steps."""

    @model_validator(mode="after")
    def _has_no_gap(self) -> MovingWindow:
        if self.stride > self.size:
            raise ValueError(f"stride={self.stride} leaves steps out between windows of size={self.size}")
        if self.order == "random" and self.decay > 0:
            raise ValueError(f"decay={self.decay} is for windows that move on in order, got order=random")
        return self

    def end(self, num_steps: int) -> int:
        return num_steps - 1 if self.high is None else self.high

    def start(self, seed: int, step: int, prompt_id: int, num_steps: int) -> int:
        starts = self.positions(num_steps)
        every = self.every or (1 if self.order == "random" else 25)
        if self.order == "random":
            return starts[_draw(seed, step // every, _ALL_PROMPTS, _GROUP, 0) % len(starts)]
        stays = [math.ceil(every * math.exp(-self.decay * max(at - self.decay_after, 0))) for at in starts]
        ends = list(accumulate(stays))
        return starts[bisect_right(ends, step % ends[-1])]

    def positions(self, num_steps: int) -> list[int]:
        """First steps of all windows, in order; together the windows cover the range."""
        last = self.end(num_steps) - self.size
        return [*range(self.low, last, self.stride), last]


Steps = Annotated[AllButLast | RandomFraction | Window | MovingWindow, Field(discriminator="type")]
"""Any of the built-in selectors, chosen by `type`."""
