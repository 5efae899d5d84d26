"""TAG: whether an idle trainer generates a micro-batch itself. Paper sections 3.3 and 4.

Invariant: a policy is a pure function of the facts of one bubble; it is asked once per bubble, when the trainer has
nothing it may train, no score of the step is under way and a micro-batch is left to take (rules R3, R7).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from digen.errors import ConfigError
from digen.schedule.costs import Costs
from digen.types import SpanKind


@dataclass(frozen=True, slots=True)
class Activity:
    """What one generator is doing and for how many seconds it has been; `kind` is None when it is idle."""

    worker: str
    kind: SpanKind | None = None
    step: int = -1
    elapsed_s: float = 0.0
    pulls: bool = False
    """Whether it must pull weights after this and before it generates again."""


@dataclass(frozen=True, slots=True)
class Bubble:
    """The driver's state when the trainer falls idle: counts of the current step's micro-batches, and who does what.

    num_microbatches = pending + being generated + unscored + being scored + ready + trained.
    """

    step: int
    num_microbatches: int
    pending: int
    """Not yet started."""
    unscored: int
    """In SQ: a trainer's own rollout waits there behind the generator's current task."""
    ready: int
    """In UQ, though the trainer may not take them yet (naive mode, or another one's turn)."""
    trained: int
    assisted: int
    """Taken by the trainer so far."""
    trainer: str
    generators: tuple[Activity, ...]
    max_in_flight: int
    """Generation calls that may be under way at once."""
    ahead: int
    """Of the next step, what generators may start under the present weights once nothing is pending (TCSS)."""
    naive: bool
    """Whether updates wait for the step's last score."""

    @property
    def updates_left(self) -> int:
        return self.num_microbatches - self.trained


class TagPolicy(Protocol):
    """Decides about one bubble."""

    def assists(self, bubble: Bubble, costs: Costs) -> bool:
        """Whether the trainer should generate the next pending micro-batch."""
        ...


@dataclass(frozen=True, slots=True)
class NoTag:
    """The trainer never generates."""

    def assists(self, bubble: Bubble, costs: Costs) -> bool:  # noqa: ARG002 - a policy is free not to look
        return False


@dataclass(frozen=True, slots=True)
class StaticTag:
    """The trainer fills the first bubbles of every step, up to `num_assists` of them (the paper's Static TAG)."""

    num_assists: int

    def assists(self, bubble: Bubble, costs: Costs) -> bool:  # noqa: ARG002 - it needs no costs
        return bubble.assisted < self.num_assists


def parse(text: str) -> TagPolicy:
    """The policy that `schedule.tag` names. Raises ConfigError."""
    from digen.schedule.bts import Bts  # it is made of the words above

    if text == "none":
        return NoTag()
    if text == "bts":
        return Bts()
    if match := re.fullmatch(r"static\((\d+)\)", text.replace(" ", "")):
        return StaticTag(int(match[1]))
    raise ConfigError(f"schedule.tag: got {text!r}. Allowed: none, static(n) with n = 0, 1, 2, ..., bts")
