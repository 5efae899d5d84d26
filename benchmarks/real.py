"""Runs of a few steps on real workers that are loaded once, for benchmarks that compare settings of the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from digen.config import RunConfig
from digen.driver import Driver
from digen.engines.base import Engine, WorkerGroup
from digen.presets import step_prompts
from digen.rewards.total import total
from digen.run import load
from digen.schedule.costs import Costs
from digen.testing import Recorder
from digen.workload import SCORER, TRAINER


class Workers:
    """The groups of a run. What calls cost is carried from one run to the next.

    Invariant: every run begins with the same weights, under version 0.
    """

    def __init__(self, engine: Engine, groups: Mapping[str, WorkerGroup]) -> None:
        self.engine, self.groups = engine, groups
        self.sampling = [group for name, group in groups.items() if name != SCORER]
        self.costs = Costs()

    async def begin(self, prompts: Sequence[str]) -> None:
        """Load, with these prompts encoded."""
        await load(self.groups, prompts=prompts)
        self.start = (await self.groups[TRAINER].call("push", 0))[0]

    async def run(self, config: RunConfig[Any]) -> Recorder:
        """All steps of this config, which may differ from what the workers know in `schedule` and `steps`."""
        for group in self.sampling:
            await group.call("pull", self.start)
        seen, steps = Recorder(), config.steps
        assert steps is not None
        driver = Driver(
            config,
            [group for group in self.sampling if group.name != TRAINER],
            self.groups[TRAINER],
            scorer=self.groups.get(SCORER),
            prompts=step_prompts(config),
            num_steps=steps,
            total=partial(total, terms=config.reward),
            drop=self.engine.store.drop,
            observer=seen,
            costs=self.costs,
        )
        await driver.run()
        self.costs = driver.costs
        return seen
