"""Whole micro-batches, assists that pause, or parts: step time in virtual time against half of all work.

    python benchmarks/sharing.py

One generator (generate takes 1 s) and one trainer, 16 samples a micro-batch, costs exact, synchronous steps. `bts` is
the best schedule of whole micro-batches (the paper's Algorithm 2); `shared` has `schedule.assist=both` in its place and
`shared-trainer` `schedule.assist=trainer`. `pausing` is an idea that digen does not have: an assist stops at a
denoising step when an update is due, and goes on after it. It is simulated here with 20 denoising steps and with the
best number of assists, found by trying all.
"""

from __future__ import annotations

from itertools import product
from math import inf
from typing import Any

from common import Chart, Costs, Table, arguments, publish, simulated

DENOISING_STEPS = 20
FEW, MANY = (3, 4, 6, 8), (16, 32, 64, 128)
RATIOS = (0.1, 0.2, 0.3, 0.5, 1.0)
SLOWER = (1.0, 1.5, 2.0)
"""What an assist takes, over what a generator takes."""
MODES = ("bts", "shared-trainer", "shared")


def pausing(microbatches: int, update: float, assist: float) -> float:
    """The end of a step whose assists pause for updates, with the best number of assists."""
    return min(_paused(microbatches, update, assist, most) for most in range(microbatches + 1))


def _paused(microbatches: int, update: float, assist: float, most: int) -> float:
    """The same with at most so many assists."""
    now, generated, pending = 0.0, 1.0, microbatches - 1
    ready = updates = begun = left = 0
    while updates < microbatches:
        while generated <= now:
            ready += 1
            generated = generated + 1.0 if pending else inf
            pending = max(pending - 1, 0)
        if ready:
            ready, updates, now = ready - 1, updates + 1, now + update
        elif left or (begun < most and pending):
            if not left:
                pending, begun, left = pending - 1, begun + 1, DENOISING_STEPS
            left, now = left - 1, now + assist / DENOISING_STEPS
            ready += not left
        else:
            now = generated
    return now


def measured(microbatches: int, update: float, assist: float) -> dict[str, Any]:
    """Step times over half of the work that equal sides would have."""
    costs = Costs(generate=1.0, update=update, stacked=update, assist=assist)
    steps = {mode: simulated(mode, costs, microbatches, steps=4, warm_up=2).step_s for mode in MODES}
    return {
        "microbatches": microbatches,
        "update": update,
        "assist": assist,
        "half_s": microbatches * (1 + update) / 2,
        "step_s": {"bts": steps.pop("bts"), "pausing": pausing(microbatches, update, assist), **steps},
    }


def few_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [str(f["microbatches"]), f"{f['update']:g}", *(f"{s / f['half_s']:.3f}" for s in f["step_s"].values())]
        for f in found
    ]


def many_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """By assist cost: what pausing and parts gain over BTS, smallest, mean and largest of the cells."""
    rows = []
    for slower in SLOWER:
        cells = [f["step_s"] for f in found if f["assist"] == slower]
        for mode in ("pausing", *MODES[1:]):
            gains = [100 * (1 - steps[mode] / steps["bts"]) for steps in cells]
            spread = (min(gains), sum(gains) / len(gains), max(gains))
            rows.append([f"{slower:g}", mode, *(f"{round(gain, 1) + 0.0:.1f} %" for gain in spread)])
    return rows


def main() -> None:
    given = arguments(__doc__)
    sizes = MANY[:1] if given.quick else MANY
    few = [measured(b, t, 1.0) for b, t in product(FEW, RATIOS[2:])]
    many = [measured(b, t, slower) for b, t, slower in product(sizes, RATIOS, SLOWER)]
    names = list(few[0]["step_s"])
    tables = [
        Table("Few micro-batches: step time over half of all work", ["micro-batches", "update", *names], few_rows(few)),
        Table(
            f"{sizes[0]} to {sizes[-1]} micro-batches, update 0.1 to 1: shorter than BTS by",
            ["assist", "", "least", "mean", "most"],
            many_rows(many),
        ),
    ]
    chart = Chart(
        [f"{f['microbatches']} / {f['update']:g}" for f in few],
        {name: [f["step_s"][name] / f["half_s"] for f in few] for name in names},
        "step time / half of all work",
        "micro-batches / update over generate",
    )
    publish("sharing", given.out, tables, {"few": few, "many": many}, chart)


if __name__ == "__main__":
    main()
