"""TAG: whether an idle trainer generates a micro-batch itself. Paper sections 3.3 and 4.

Invariant: a policy is a pure function of the facts of one bubble; it is asked once per bubble, when the trainer has
nothing it may train, no score of the step is under way and a micro-batch is left to take (rules R3, R7).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from digen import plugins
from digen.errors import ConfigError, PluginError
from digen.schedule.costs import Costs
from digen.types import SpanKind


@dataclass(frozen=True, slots=True)
class Activity:
    """What one worker is doing and for how many seconds it has been; `kind` is None when it is idle."""

    worker: str
    kind: SpanKind | None = None
    step: int = -1
    elapsed_s: float = 0.0
    pulls: bool = False
    """Whether it must pull weights after this and before it generates again."""
    rows: int = 0
    """Samples that its work is about."""


@dataclass(frozen=True, slots=True)
class Bubble:
    """The driver's state when a worker falls idle: counts of the current step's micro-batches, and who does what.

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
    trainer: Activity
    generators: tuple[Activity, ...]
    max_in_flight: int
    """Generation calls that may be under way at once."""
    ahead: int
    """Of the next step, what generators may start under the present weights once nothing is pending (TCSS)."""
    naive: bool
    """Whether updates wait for the step's last score."""
    rows: int = 0
    """Samples of a micro-batch."""
    kept: int = 0
    """Samples of a micro-batch that are trained."""
    pending_rows: int = 0
    """Samples that are not yet started."""
    next_rows: int = 0
    """Those of the micro-batch whose turn it is."""
    unscored_rows: int = 0
    """Samples that have no score, not yet generated ones included."""
    untaken: int = 0
    """Samples that nobody has begun to train, not yet generated ones included."""
    next_ready: int = 0
    """Those of the first micro-batch in UQ."""
    scorer: Activity | None = None
    """The worker that scores, if the generators do not."""

    @property
    def updates_left(self) -> int:
        return self.num_microbatches - self.trained


class Choice(NamedTuple):
    """What a policy wants: how many samples of the next micro-batch the trainer generates; 0: it skips the bubble."""

    rows: int
    latency_s: float | None = None
    """Seconds from now to the end of the step's sync, if the policy knows."""


class TagPolicy(Protocol):
    """Decides about one bubble."""

    def choose(self, bubble: Bubble, costs: Costs) -> Choice:
        """How much of the next pending micro-batch the trainer should generate."""
        ...


@dataclass(frozen=True, slots=True)
class StaticTag:
    """The trainer fills the first bubbles of every step, up to `num_assists` of them (the paper's Static TAG)."""

    num_assists: int

    def choose(self, bubble: Bubble, costs: Costs) -> Choice:  # noqa: ARG002 - it needs no costs
        return Choice(bubble.next_rows if bubble.assisted < self.num_assists else 0)


NONE = StaticTag(0)
"""The trainer never generates."""


def parse(text: str) -> TagPolicy:
    """The policy that `schedule.tag` names: `none`, `static(n)`, or a plugin, made without arguments. ConfigError."""
    if text == "none":
        return NONE
    if match := re.fullmatch(r"static\((\d+)\)", text.replace(" ", "")):
        return StaticTag(int(match[1]))
    allowed = "Allowed: none, static(n) with n = 0, 1, 2, ..., or the name of a policy"
    try:
        kind = plugins.find("policies", text)
    except PluginError as error:
        raise ConfigError(f"schedule.tag: got {text!r}. {allowed}: {error}") from error
    if not isinstance(kind, type) or not hasattr(kind, "choose"):
        raise ConfigError(f"schedule.tag: {text!r} is no policy, it has no `choose(bubble, costs)`. {allowed}")
    policy: TagPolicy = kind()
    return policy
