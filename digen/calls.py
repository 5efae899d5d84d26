"""Calls that may be repeated: generation, scoring, sample grids. What fails is tried again, then it is an error.

Invariant: an update is never repeated (rule R18) and so is not here; a reward that failed is never 0 (R17).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from digen import gather
from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import WorkerDied, WorkerError
from digen.observe.files import RunFolder
from digen.types import MicroBatch, Rollout, Scores, Version


class Calls:
    """`schedule.retries` more attempts for each. `total`: each row's reward; `folder`: None draws no sample grid."""

    def __init__(
        self,
        config: RunConfig[Any],
        total: Callable[[Scores], tuple[float, ...]],
        folder: RunFolder | None,
        note: Callable[[str], None],
    ) -> None:
        self._retries, self._grid_every = config.schedule.retries, config.observe.grid_every
        self._total, self._folder, self._note = total, folder, note

    async def generate(
        self, group: WorkerGroup, microbatch: MicroBatch, version: Version, rows: tuple[int, ...]
    ) -> Rollout:
        """These rows of the micro-batch, by all ranks of the group together."""
        shards = await self.attempt(group, "generate", microbatch, version, rows)
        return gather.rollout(microbatch, version, rows, shards, group.name)

    async def score(self, group: WorkerGroup, rollout: Rollout) -> Scores:
        """Single rewards of all rows. What failed is asked for again, `schedule.retries` times (rule R17)."""
        microbatch = rollout.microbatch
        scores = gather.scores(microbatch, await self.attempt(group, "score", rollout), group.name)
        for attempt in range(self._retries):
            if not (failed := gather.failed(scores)):
                break
            self._note(f"step {microbatch.step}: {len(failed)} rewards failed, trying again ({attempt + 1})")
            parts = await self.attempt(group, "score", rollout)
            scores = gather.mend(scores, gather.scores(microbatch, parts, group.name))
        await self.draw(group, rollout, scores)
        return scores

    async def draw(self, group: WorkerGroup, rollout: Rollout, scores: Scores) -> None:
        """The sample grid of every `observe.grid_every` steps. A picture that fails is no reason to stop a run."""
        step, every = rollout.microbatch.step, self._grid_every
        if self._folder is None or rollout.microbatch.index > 0 or not every or step % every:
            return
        try:
            await group.call("draw", rollout, self._total(scores), self._folder.sample_grid(step))
        except WorkerDied:
            raise
        except WorkerError as error:
            self._note(f"step {step}: no sample grid: {error}")

    async def attempt(self, group: WorkerGroup, method: str, *args: Any) -> tuple[Any, ...]:
        """Repeat what fails, `schedule.retries` times, then raise the first cause. Never for an update (rule R18)."""
        causes: list[WorkerError] = []
        while True:
            try:
                return await group.call(method, *args)
            except WorkerDied:
                raise
            except WorkerError as error:
                causes.append(error)
            if len(causes) > self._retries:
                raise causes[0]
            self._note(f"{causes[-1]}; trying again ({len(causes)})")
