"""Checkpoints, the driver's half: when one is due, and what becomes of it while training goes on.

Invariant: one is written at a time; the trainer is held up only while it copies. A save that fails costs a note and is
tried again where the next is due; only the last one of a run must succeed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import CheckpointError, DigenError
from digen.observe.files import RunFolder
from digen.types import Version


@dataclass(frozen=True, slots=True)
class Begun:
    """A checkpoint that the trainer is writing to the folder `aside`, and what is to stand in it besides tensors."""

    path: Path
    aside: str
    facts: Mapping[str, Any]


class Saves:
    """The checkpoints of a run of `num_steps` that begins with `version`; `folder`: None saves nothing."""

    def __init__(
        self,
        config: RunConfig[Any],
        folder: RunFolder | None,
        num_steps: int,
        version: Version,
        note: Callable[[str], None],
    ) -> None:
        self._every, self._num_steps, self._folder, self._note = config.checkpoint.every, num_steps, folder, note
        self._newest = version
        self._begun: Begun | None = None
        self._reason: DigenError | None = None
        self._asked, self._rollout = False, config.trainer.updates_per_rollout

    def ask(self, version: Version, reason: DigenError) -> bool:
        """`stop`, where that is of use: False when these weights are saved already, or no run could go on from them.

        What is being written is waited for.
        """
        before, self._reason = self._reason, reason
        if self._begun or (self.due(version) and version % self._rollout == 0):
            self._asked = True
            return True
        self._reason = before
        return False

    def stop(self, version: Version, reason: DigenError) -> None:
        """End the run, with these weights saved: nothing that is not finite was applied to them.

        `reason` is raised here if they are saved already, else when they are.
        """
        self._reason = reason
        if not self.due(version):
            raise reason

    def due(self, version: Version) -> bool:
        """Whether the present weights are still to be saved: every `checkpoint.every` steps, and those of the end."""
        due = self._reason or version == self._num_steps or (self._every > 0 and version % self._every == 0)
        new = self._newest < version or (self._asked and self._begun is not None)
        return self._folder is not None and bool(due) and new

    async def save(
        self, trainer: WorkerGroup, version: Version, stale: Version | None, facts: Mapping[str, Any]
    ) -> None:
        """Begin to save; what a run ends with is waited for. `stale`: older weights that belong to it, by version.

        Raises CheckpointError when the last one cannot be written, and what `stop` was given.
        """
        assert self._folder is not None
        await self.finish(trainer)
        if self._reason and self._asked and (self._newest >= version or version % self._rollout):
            raise self._reason
        if self._reason:  # at any version: the weights of the rollout before may not be there any more
            stale, facts = None, {**facts, "stale": {}}
        path, self._newest = self._folder.checkpoint(version), version
        self._begun = Begun(path, f".{path.name}.{secrets.token_hex(4)}.partial", {**facts, "stale_version": stale})
        await trainer.call("save", path, self._begun.aside, stale)
        if not self._reason and version < self._num_steps:
            return
        problem = await self.finish(trainer)
        if self._reason:
            raise self._reason
        if problem:
            raise CheckpointError(f"{path} cannot be written: {problem}")

    async def finish(self, trainer: WorkerGroup, *, wait: bool = True) -> str | None:
        """Make a checkpoint of what was begun, once it is written; why it failed, if it did."""
        if self._begun is None:
            return None
        parts = await trainer.call("written", wait)
        if any(part is None for part in parts):
            return None
        begun, self._begun = self._begun, None
        problem: str | None = next((part.problem for part in parts if part.problem), None)
        files = [file for part in parts for file in part.files]
        problem = problem or (await trainer.call("seal", begun.path, begun.aside, files, begun.facts))[0]
        if problem:
            kept = "checkpoints from before are untouched; the next is saved where it is due"
            self._note(f"{begun.path} could not be written: {problem}; {kept}")
        return problem
