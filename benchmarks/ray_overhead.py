"""What a call and a handover of tensors cost with the engine `ray`, next to the engine `process`, on this machine.

    python benchmarks/ray_overhead.py

Two groups of one rank. A call without arguments, as the driver sees it (median); tensors that one group stores and the
other reads (best of several), and how many of their bytes came through the driver.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import anyio
import torch
from common import Chart, Table, arguments, publish

from digen.engines.base import WorkerContext, WorkerSpec
from digen.engines.process import ProcessEngine
from digen.engines.ray import RayEngine
from digen.types import Ref

MEGABYTES, CALLS, ROUNDS = 64, 500, 5


class Side:
    """Stores and reads."""

    def __init__(self, _: object, context: WorkerContext) -> None:
        self.store, self.number = context.store, 0

    def nothing(self) -> None:
        pass

    def put(self, nbytes: int) -> Ref:
        self.number += 1
        return self.store.put(f"tensors/{self.number}", {"x": torch.ones(nbytes, dtype=torch.uint8)})

    def get(self, ref: Ref) -> int:
        return int(self.store.get(ref)["x"].sum(dtype=torch.int64))


async def measure(engine: Any, nbytes: int, calls: int, rounds: int) -> dict[str, float]:
    """Seconds, by what they were spent on."""
    specs = [WorkerSpec(name, f"{Path(__file__)}:Side", None, threads=1) for name in ("one", "two")]
    began = time.perf_counter()
    async with engine.open(specs) as groups:
        found = {"start": time.perf_counter() - began}
        times = [await _seconds(groups["one"], "nothing") for _ in range(calls)]
        found["call"] = statistics.median(times)
        handovers = []
        for _ in range(rounds):
            began = time.perf_counter()
            (ref,) = await groups["one"].call("put", nbytes)
            assert await groups["two"].call("get", ref) == (nbytes,)
            handovers.append(time.perf_counter() - began)
            engine.store.drop(ref)
        found["handover"] = min(handovers)
        began = time.perf_counter()
    return {**found, "stop": time.perf_counter() - began}


async def _seconds(group: Any, method: str) -> float:
    began = time.perf_counter()
    await group.call(method)
    return time.perf_counter() - began


WHAT = {"start": "start two groups", "call": "a call", "handover": "a handover", "stop": "stop"}


def main() -> None:
    given = arguments(__doc__)
    nbytes, calls, rounds = (1 << 20, 20, 1) if given.quick else (MEGABYTES << 20, CALLS, ROUNDS)
    engines = {"process": ProcessEngine(), "ray": RayEngine()}
    found = {name: anyio.run(measure, engine, nbytes, calls, rounds) for name, engine in engines.items()}
    ray = engines["ray"]
    driver = {
        "calls": ray.traffic.calls,
        "message_bytes": ray.traffic.sent_bytes + ray.traffic.received_bytes,
        "tensor_bytes": ray.store.tensor_bytes,
    }
    title = (
        f"Milliseconds; a handover is {nbytes >> 20} MB from one group to another. With `ray` {driver['tensor_bytes']} "
        f"of these bytes came through the driver, and {driver['message_bytes']} bytes of {driver['calls']} calls"
    )
    rows = [
        [name, *(f"{1e3 * seconds[what]:.{2 if what == 'call' else 0}f}" for what in WHAT)]
        for name, seconds in found.items()
    ]
    series = {name: [1e3 * seconds[what] for what in WHAT] for name, seconds in found.items()}
    chart = Chart(list(WHAT.values()), series, "milliseconds", "what the driver waits for", log=True)
    publish(
        "ray_overhead",
        given.out,
        [Table(title, ["engine", *WHAT.values()], rows)],
        {"engines": found, "driver": driver},
        chart,
    )


if __name__ == "__main__":
    main()
