"""The end of a step, for those who watch: its row of metrics, and whether too many gradients in a row were not finite.

Invariant: one row for each step, in their order; what ends the run here leaves weights that are sound, and saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from digen.checkpoint.saves import Saves
from digen.config import RunConfig
from digen.errors import DivergedError
from digen.metrics import StepFacts, step_row
from digen.observe.base import Observer, StepRow
from digen.step import GlobalStep
from digen.types import Start, StepReport, Version, merge_stats


class Reports:
    """Tells the observer of every step that has ended; goes on from `start`."""

    def __init__(self, config: RunConfig[Any], observer: Observer, saves: Saves, start: Start) -> None:
        self._most, self._observer, self._saves = config.trainer.max_bad_steps, observer, saves
        self._began_s, self._num_bad_steps = start.elapsed_s, start.num_bad_steps
        self._row: StepRow = {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this."""
        return {"row": self._row, "num_bad_steps": self._num_bad_steps}

    def ended(
        self, step: GlobalStep, report: StepReport, due: Version, now_s: float, busy_s: Mapping[str, float]
    ) -> None:
        """The optimizer step is done. `due`: the version it was generated under; `busy_s`: of each group, since then.

        Raises DivergedError, once the weights are saved, after too many gradients in a row that are not finite.
        """
        length_s, self._began_s = now_s - self._began_s, now_s
        busy = {name: seconds / length_s if length_s else 0.0 for name, seconds in busy_s.items()}
        stats = merge_stats(*(step.stats[index] for index in sorted(step.stats)))
        self._row = step_row(StepFacts(step.index, due, step.scored_in_order(), stats, report, now_s, length_s, busy))
        self._observer.on_step(self._row)
        self._num_bad_steps = 0 if report.finite else self._num_bad_steps + 1
        if self._num_bad_steps:
            sentence = f"step {step.index}: the gradient is not finite, {self._num_bad_steps} steps in a row now"
            if self._num_bad_steps >= self._most:
                self._saves.stop(step.index + 1, DivergedError(f"{sentence}; trainer.max_bad_steps={self._most}"))
            self._observer.on_note(f"{sentence}; nothing was applied")
