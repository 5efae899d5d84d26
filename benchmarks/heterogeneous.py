"""Fast and slow replicas in virtual time: step time against total work over total speed, by schedule.

    python benchmarks/heterogeneous.py

The trainer has speed 1; a replica that is k times slower takes k times as long for everything. Update takes half of
generate (1 s), a score 0.02 s, sync and pull 0.05 s; 16 and 48 micro-batches a step. The bound is all work of a step
divided by the sum of all speeds: nobody idles, nobody waits for the last. `colocated` cannot be here: it has no
replicas of different speed.
"""

from __future__ import annotations

from typing import Any

from common import Chart, Costs, Table, arguments, publish, simulated

COSTS = Costs(generate=1.0, update=0.5, stacked=0.5, score=0.02, sync=0.05, pull=0.05)
MIXES = {
    "1": (1.0,),
    "2": (2.0,),
    "4": (4.0,),
    "1 + 2": (1.0, 2.0),
    "1 + 4": (1.0, 4.0),
    "2 + 4": (2.0, 4.0),
    "1 + 1 + 4": (1.0, 1.0, 4.0),
    "1 + 2 + 4": (1.0, 2.0, 4.0),
    "2 + 4 + 4 + 4": (2.0, 4.0, 4.0, 4.0),
}
MODES = ("gap", "bts", "tcss", "shared", "shared-tcss")
SIZES: tuple[int, ...] = (16, 48)
STEPS = 24
"""Under TCSS a step leaves more or less for the next: their mean needs many."""


def bound_s(slower: tuple[float, ...], microbatches: int) -> float:
    """Work of a step at speed 1 over the sum of speeds."""
    work = microbatches * (COSTS.generate + COSTS.score + COSTS.stacked)
    return work / (1.0 + sum(1.0 / factor for factor in slower))


def main() -> None:
    given = arguments(__doc__)
    sizes, mixes, steps = SIZES, MIXES, STEPS
    if given.quick:
        sizes, mixes, steps = SIZES[:1], {name: MIXES[name] for name in ("1", "4", "1 + 2")}, 8
    found: list[dict[str, Any]] = [
        {
            "microbatches": b,
            "slower": slower,
            "bound_s": bound_s(slower, b),
            "step_s": {mode: simulated(mode, COSTS, b, slower=slower, steps=steps).step_s for mode in MODES},
        }
        for b in sizes
        for slower in mixes.values()
    ]
    tables = []
    for b in sizes:
        rows = [
            [
                name,
                f"{f['bound_s']:.2f}",
                *(f"{s:.2f} ({100 * (s / f['bound_s'] - 1):+.0f} %)" for s in f["step_s"].values()),
            ]
            for name, f in zip(mixes, [f for f in found if f["microbatches"] == b], strict=True)
        ]
        title = f"Step time in s, {b} micro-batches; in brackets what is above the bound"
        tables.append(Table(title, ["replicas, times slower", "bound", *MODES], rows))
    chart = Chart(
        list(mixes),
        {mode: [f["step_s"][mode] / f["bound_s"] for f in found[: len(mixes)]] for mode in MODES[1:]},
        f"step time / bound, {sizes[0]} micro-batches",
        "how many times slower each replica is than the trainer",
    )
    publish("heterogeneous", given.out, tables, {"heterogeneous": found}, chart)


if __name__ == "__main__":
    main()
