"""What the driver itself costs, and how a step scales, with 1 to 512 simulated generator replicas.

    python benchmarks/scaling.py

Overhead: workers that take no time, on the real event loop; processor time of driver and simulation together, divided
by micro-batches. Scaling: replicas that take 1 s for a micro-batch, in virtual time, four micro-batches a step for
each, and a trainer with half as much to do as one of them; the share of a step in which the replicas generate, without
and with TCSS (staleness 0.5). What is missing without it is the last updates, behind which nothing can be generated.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
from common import Chart, Costs, Table, arguments, publish, simulated

from digen.testing import Recorder, SimulatedGroup, simulated_config, simulated_driver
from digen.types import Span

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EACH = 4
"""Micro-batches of a step for each replica."""
SHORTEST_RUN = 384
"""Micro-batches that a measured run has at least."""


class Silent(Recorder):
    """Keeps no spans, as a run does not."""

    def on_span(self, span: Span) -> None:
        pass


def overhead_ms(replicas: int, repeats: int) -> float:
    """Least processor time of several runs, in milliseconds for each micro-batch."""
    microbatches, best = EACH * replicas, float("inf")
    steps = max(2, SHORTEST_RUN // microbatches)
    for _ in range(repeats):
        groups = [SimulatedGroup(f"generator-{k}", record=False) for k in range(replicas)]
        trainer, config = SimulatedGroup("trainer", record=False), simulated_config(steps=steps)
        driver = simulated_driver(config, groups, trainer, Silent(), prompts_per_step=microbatches)
        began = time.process_time()
        anyio.run(driver.run)
        best = min(best, time.process_time() - began)
    return 1e3 * best / (steps * microbatches)


def efficiency(mode: str, replicas: int) -> float:
    """Generation time at perfect scaling, as a share of the step."""
    costs = Costs(generate=1.0, update=0.5 / replicas, stacked=0.5 / replicas)
    return EACH / simulated(mode, costs, EACH * replicas, slower=(1.0,) * replicas).step_s


def main() -> None:
    given = arguments(__doc__)
    replicas = REPLICAS[:5] if given.quick else REPLICAS
    found: list[dict[str, Any]] = [
        {
            "replicas": n,
            "overhead_ms": overhead_ms(n, 1 if given.quick else 3),
            "efficiency": {mode: efficiency(mode, n) for mode in ("gap", "gap-tcss")},
        }
        for n in replicas
    ]
    rows = [
        [
            str(f["replicas"]),
            str(EACH * f["replicas"]),
            f"{f['overhead_ms']:.2f}",
            f"{f['replicas'] * f['overhead_ms'] / 10:.2f} %",
            *(f"{100 * share:.1f} %" for share in f["efficiency"].values()),
        ]
        for f in found
    ]
    columns = [
        "replicas", "micro-batches a step", "driver ms a micro-batch", "driver's core busy", "generating", "with TCSS",
    ]  # fmt: skip
    title = "Driver and scaling; the last three columns are for micro-batches of 1 s"
    chart = Chart(
        [str(n) for n in replicas],
        {"driver and simulation": [f["overhead_ms"] for f in found]},
        "processor time of the driver, ms a micro-batch",
        "generator replicas",
    )
    publish("scaling", given.out, [Table(title, columns, rows)], {"scaling": found}, chart)


if __name__ == "__main__":
    main()
