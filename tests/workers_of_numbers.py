"""Workers whose model is a number (digen/testing/faulty_processes.py), late or failing at one known place."""

import json
import math
import time
from typing import Any

from digen.engines.base import WorkerContext
from digen.testing.faulty_processes import Worker
from digen.types import MicroBatch, Prompt, ScoredRollout, Shard

LIMIT_S = 60.0
BROKEN = (1, 2)
"""Prompt and sample."""


class Late(Worker):
    """The trainer publishes late."""

    def _push(self, version: int) -> Any:
        time.sleep(0.4)
        return self.books._on_rank("push", self.rank, (version,))


class Held(Worker):
    """A generation for the coming step lasts until the trainer has published new weights and begun to save them."""

    def _generate(self, microbatch: MicroBatch, version: int, rows: tuple[int, ...]) -> Shard:
        limit = time.monotonic() + LIMIT_S
        while microbatch.step > version and not (self.happened / f"saving-{version + 1}").exists():
            assert time.monotonic() < limit, "no new weights came"
            time.sleep(0.005)
        return self.books._on_rank("generate", self.rank, (microbatch, version, rows))

    def _save(self, *args: Any) -> None:
        (self.happened / f"saving-{self.books.version}").touch()
        super()._save(*args)


class Writing(Worker):
    """The trainer writes down with which advantages it trains which samples."""

    def _accumulate(self, scored: ScoredRollout, *rest: Any) -> Any:
        microbatch = scored.rollout.microbatch
        rows = zip(scored.keep, scored.advantages, strict=True)
        said = {"advantages": [value if keep else None for keep, value in rows], "denominator": rest[1]}
        (self.happened.parent / f"trained-{microbatch.step}-{microbatch.index}.json").write_text(json.dumps(said))
        return self.books._on_rank("accumulate", self.rank, (scored, *rest))


class Failing(Writing):
    """One sample of the first step never gets a reward."""

    def __init__(self, payload: Any, context: WorkerContext) -> None:
        super().__init__(payload, context)
        self.books.reward = self._reward
        self._whole, self._short = payload["samples"], payload["samples"] * 3 // 4  # one of four groups is dropped

    def _reward(self, prompt: Prompt, sample: int, value: float) -> float:
        return math.nan if (prompt.id, sample) == BROKEN else value

    def _optimizer_step(self, scale: float) -> Any:
        self.books.samples = self._whole if self.books.version else self._short
        return self.books._on_rank("optimizer_step", self.rank, (scale,))
