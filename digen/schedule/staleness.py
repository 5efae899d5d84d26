"""TCSS: how much of a global step may be generated before the weights it belongs to exist. Paper section 3.4.

Invariant: the share of stale samples is bounded where work is dispatched, by not starting it; nothing that was
generated is ever thrown away, and no trajectory sees two versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from digen.types import MicroBatch, Version

ROUNDING = 1e-9
"""Of `share * num_samples`: 0.3 * 10 samples is 3 samples."""


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """At most `share` of a step's samples under an older version, which is at most `window - 1` rollouts older.

    A rollout is the `updates_per_rollout` steps in a row that are generated under one version, that of the first.
    """

    share: float = 0.0
    window: int = 2
    updates_per_rollout: int = 1

    @property
    def lag(self) -> int:
        """How many rollouts ahead of the weights generation may run at most; 0 is fully synchronous."""
        return self.window - 1 if self.share > 0 else 0

    def on_policy(self, step: int) -> Version:
        """The version that a step's samples are due under: its own, or that of the first step of its rollout."""
        return step - step % self.updates_per_rollout

    def last_step(self, version: Version) -> int:
        """The last step that may be generated while the weights are of this version."""
        return self.on_policy(version) + (self.lag + 1) * self.updates_per_rollout - 1

    def allows(self, microbatch: MicroBatch, version: Version, already_stale: int, num_samples: int) -> bool:
        """Whether the micro-batch may be generated while the weights are of `version`.

        `already_stale` of its step's `num_samples` samples were started under an older version than is due.
        """
        lag = microbatch.step // self.updates_per_rollout - version // self.updates_per_rollout
        stale = already_stale + microbatch.num_samples
        return lag == 0 or (lag <= self.lag and stale <= self.share * num_samples + ROUNDING)
