"""The calls between driver and workers. A backend is a plain synchronous class that lives inside a worker process.

Constructor: `(payload, context: WorkerContext)`, payload being what `digen.presets.payload` made of the config; it must
return at once. Every method is called on all ranks of the group at the same time and returns that rank's part. Paper
section 3.1; rules R8-R11, R15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from digen.checkpoint.manifest import Part, Record
from digen.schedule.tsp import Width
from digen.types import MicroBatch, Published, Ref, Rollout, ScoredRollout, Scores, Shard, Stats, StepReport, Version


class GeneratorBackend(Protocol):
    """Samples, scores, and takes new weights."""

    def encode(self, prompts: Sequence[str]) -> None:
        """Before `load`, if at all: encode these prompts for all workers, as far as no other has, and keep that."""
        ...

    def load(self) -> None:
        """Load model and rewards, before everything below."""
        ...

    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many prompts are longer than the text encoder's limit."""
        ...

    def generate(self, microbatch: MicroBatch, version: Version, rows: tuple[int, ...]) -> Shard:
        """This rank's share of these rows of the micro-batch.

        Raises when the weights here are not of `version`, SyncError when not all bytes of them are the trainer's.
        """
        ...

    def score(self, rollout: Rollout) -> Scores:
        """Raw rewards of this rank's share of the rows; media may have been made by any worker."""
        ...

    def draw(self, rollout: Rollout, rewards: tuple[float, ...], path: Path) -> None:
        """Write a PNG with samples, prompts and rewards, and of videos a moving picture (rank 0 only)."""
        ...

    def pull(self, published: Published) -> str:
        """Take new weights; what a glance at what is now loaded finds (`Published.fingerprint`, if it is that)."""
        ...


class HelpingGenerator(GeneratorBackend, Protocol):
    """A generator with autograd, which computes gradients for the trainer when idle (`schedule.assist`)."""

    def accumulate(self, scored: ScoredRollout, tsp: Width, denominator: float, last: bool) -> Stats:
        """As the trainer's: the same gradient, wherever it is computed (rule R11)."""
        ...

    def hand_gradients(self) -> Ref:
        """Where the gradients are that this rank accumulated since the last time; they are cleared here."""
        ...


class TrainerBackend(GeneratorBackend, Protocol):
    """Accumulates gradients and steps. It can generate and score too: that is TAG and the colocated mode."""

    def accumulate(self, scored: ScoredRollout, tsp: Width, denominator: float, last: bool) -> Stats:
        """Add this micro-batch's gradients, divided by the step's fixed denominator; never changes the weights.

        `last` is True for the step's last micro-batch: sharded trainers reduce gradients only then.
        """
        ...

    def add_gradients(self, handed: Ref) -> None:
        """Add what one rank of a generator handed over to the gradients here."""
        ...

    def optimizer_step(self, gradient_scale: float) -> StepReport:
        """Scale, clip, step once, clear the gradients."""
        ...

    def push(self, version: Version) -> Published:
        """Put the weights of `version` where generators can pull them. Only rank 0's value counts."""
        ...

    def save(self, path: Path, aside: str | None = None, stale: Version | None = None) -> None:
        """Copy what belongs to the checkpoint `path` and begin to write it to the folder `aside` beside it.

        None: to `path` itself, at once. `stale`: with the weights of this older version.
        """
        ...

    def written(self, wait: bool) -> Part | None:
        """What this rank wrote of it, or why it could not; None: it is still at it, and was not to be waited for."""
        ...

    def seal(self, path: Path, aside: str, files: Sequence[Record], facts: Mapping[str, Any]) -> str | None:
        """Make a checkpoint of what all ranks wrote (rank 0 does); why it failed, if it did."""
        ...

    def resume(self, path: Path, version: Version) -> None:
        """Go on from a checkpoint, as if it had never been left."""
        ...

    def begin_from(self, path: Path) -> None:
        """Begin a new run from the weights of a checkpoint."""
        ...
