"""The memory plan of a run: its models counted, its ranks added up, a placement looked for.

Invariant: nothing is loaded or downloaded, and no device is touched.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from digen import plugins
from digen.backends.worker import TorchWorker
from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import ConfigError
from digen.memory.measure import CountedModel
from digen.memory.placement import MemoryPlan, Side, place
from digen.memory.sizes import Sizes
from digen.presets import payload


def plan_memory(
    config: RunConfig[Any], gpus: int | None = None, memory: float | None = None, given: Collection[str] = ()
) -> MemoryPlan:
    """What every rank of a run needs; with `gpus`, placed on so many devices with `memory` bytes each.

    given: dotted keys that are not to be changed. Raises ConfigError for numbers that make no sense, and for backends
    and models of which nothing is known.
    """

    def count(config: RunConfig[Any], side: Side) -> Sizes:
        group = config.trainer if side == "trainer" else config.generator
        return CountedModel(_worker(config, side), cuda=gpus is not None or group.devices != "cpu")

    return place(config, count, gpus, memory, given)


def _worker(config: RunConfig[Any], side: Side) -> TorchWorker:
    """A worker that loads nothing: it says what it would keep, and in which dtype."""
    backend = config.trainer.backend if side == "trainer" else config.generator.backend
    kind = plugins.find("trainers" if side == "trainer" else "generators", backend)
    if not isinstance(kind, type) or not issubclass(kind, TorchWorker):
        raise ConfigError(f"{side}.backend={backend} cannot be planned: its models are not digen's")
    context = WorkerContext(side, 0, 1, "cpu", MemoryStore())
    return cast("TorchWorker", cast("Any", kind)(payload(config), context))
