"""Figure 10 of the paper: processor time of one TAG search, by micro-batches and update/generate ratio.

    python benchmarks/search_time.py

One generator, assist as long as generate, scores that take no time: the start of a step, which is the largest search in
it. The search is the one the policy makes (`digen/schedule/bts.py`), with its budget.
"""

from __future__ import annotations

import time
from statistics import median

from common import Chart, Table, arguments, publish

from digen.schedule.bts import NANOSECONDS, Bts, Generator, State, WorkCosts, search

MICROBATCHES = (8, 16, 32, 64, 128, 256)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
DRAWN = (0.1, 0.2, 0.3, 0.5, 1.0)
REPEATS = 9


def search_ms(microbatches: int, ratio: float, repeats: int) -> float:
    """Median processor time in milliseconds."""
    whole = int(NANOSECONDS)
    state = State(microbatches, 0, 0, microbatches, (Generator(),))
    costs = WorkCosts((whole,), (0,), (0,), assist=whole, update=round(ratio * whole), sync=0, max_in_flight=2)
    spent = []
    for _ in range(repeats):
        began = time.process_time()
        search(state, costs, Bts().budget)
        spent.append(1e3 * (time.process_time() - began))
    return median(spent)


def main() -> None:
    given = arguments(__doc__)
    sizes, repeats = (MICROBATCHES[:3], 3) if given.quick else (MICROBATCHES, REPEATS)
    found = {b: {ratio: search_ms(b, ratio, repeats) for ratio in RATIOS} for b in sizes}
    rows = [[str(b), *(f"{ms:.2f}" for ms in by_ratio.values())] for b, by_ratio in found.items()]
    title = f"Processor time of one search in ms (median of {repeats}), by update/generate"
    chart = Chart(
        [str(b) for b in sizes],
        {f"update/generate {ratio:g}": [found[b][ratio] for b in sizes] for ratio in DRAWN},
        "processor time of one search, ms",
        "micro-batches of a step",
        log=True,
    )
    table = Table(title, ["micro-batches", *(f"{ratio:g}" for ratio in RATIOS)], rows)
    document = {"search_ms": [{"microbatches": b, "ratio": r, "ms": ms} for b in sizes for r, ms in found[b].items()]}
    publish("search_time", given.out, [table], document, chart)


if __name__ == "__main__":
    main()
