"""Figures 17 and 18 of the paper in virtual time: the same driver, costs assumed, the paper's ranges beside ours.

    python benchmarks/paper_figures.py

The paper prints ranges of speedups over naive disaggregation and no costs. What it says, and is taken over: devices
are split evenly between generator and trainer; 32 prompts a step; 20, 30 or 40 denoising steps, of which a fraction of
0.4 or 0.6 is trained; FSDP generates and trains; 16 or 32 GPUs. What it does not say is assumed here, once for every
cell of a figure, in units of F, the compute of one sample's forward pass (with guidance) on one GPU:

- 16 samples per prompt, one micro-batch of one prompt on the 8 ranks of 16 GPUs, so 2 samples a rank, one after the
  other (as DanceGRPO samples video); 8 of 16 are trained, one a rank (best-of-n; DanceGRPO keeps 8). On 32 GPUs a
  micro-batch is two prompts on 16 ranks.
- Trained steps: floor(fraction x (steps - 1)) with DanceGRPO (HunyuanVideo), floor(fraction x steps) with FlowGRPO
  (Wan2.1).
- A pass costs something however few rows it has, above all the gathering of FSDP's shards, and hides it behind compute
  where that is longer. Over n rows a rank needs max(A, n F) forward and max(A + R, 3 n F) backward (gradients, with
  activations computed again), where A is one gather and R one reduction of gradients: R = 2.2 A (float32 is twice the
  bytes of bfloat16, and reductions are a tenth slower). Without TSP n = 1; with TSP a pass holds up to 8 timesteps.
- A = 4 F for HunyuanVideo and 2.5 F for Wan2.1.
- Decoding takes 2 F and scoring 1 F a sample, a switch of the trainer to generation 2 F, sync and pull 2 F each.

A/F is the one figure that the result hangs on: it is what TSP gains. So the tables also show other values of it. What
it would mean for the hardware, and why it cannot be much smaller, is in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any, NamedTuple

from common import Chart, Costs, Table, arguments, publish, simulated

from digen.schedule.tsp import chunks

PROMPTS = 32
SAMPLES_A_RANK, TRAINED_A_RANK = 2, 1
TIMESTEPS_A_PASS = 8
BACKWARD = 3.0
REDUCTION = 2.2
"""Of a gather."""
DECODE, SCORE, SWITCH, SYNC, PULL = 2.0, 1.0, 2.0, 2.0, 2.0

Range = tuple[float, float]
BARS = {"gap": "GAP", "tsp": "+TSP", "bts": "+TAG", "tcss": "+TCSS"}
BEYOND = {"shared-tcss": "assist=both"}


class Cell(NamedTuple):
    """One group of bars in a figure."""

    gpus: int
    num_steps: int
    fraction: float


CELLS = tuple(Cell(g, n, f) for g in (16, 32) for n in (20, 30, 40) for f in (0.4, 0.6))


EXTREMES = (Cell(16, 20, 0.4), Cell(16, 20, 0.6), Cell(16, 40, 0.6))
"""The ends of all ranges on 16 GPUs."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One model on one testbed; `gather` is A / F."""

    number: int
    model: str
    gather: float
    all_but_last: bool
    """Whether the fraction is of all steps but the last."""
    paper: Mapping[str, Range]

    def passed(self, rows: int) -> float:
        """Forward and backward over so many rows of one rank."""
        return max(self.gather, rows) + max(self.gather * (1 + REDUCTION), BACKWARD * rows)

    def update(self, timesteps: int, stacked: int) -> float:
        """One micro-batch's update: a rank's samples, one by one, `stacked` timesteps in one pass."""
        passes = chunks(TRAINED_A_RANK, timesteps, 1, stacked)
        return sum(self.passed(c.timesteps.stop - c.timesteps.start) for c in passes)

    def trained(self, cell: Cell) -> int:
        return floor(cell.fraction * (cell.num_steps - self.all_but_last) + 1e-9)

    def costs(self, cell: Cell) -> Costs:
        generate = SAMPLES_A_RANK * (cell.num_steps * max(self.gather, 1.0) + DECODE)
        return Costs(
            generate=generate,
            update=self.update(self.trained(cell), 1),
            stacked=self.update(self.trained(cell), TIMESTEPS_A_PASS),
            score=SAMPLES_A_RANK * SCORE,
            assist=generate + SWITCH,
            sync=SYNC,
            pull=PULL,
        )

    def speedups(self, cell: Cell, modes: Iterable[str]) -> dict[str, float]:
        """Over naive, by mode."""
        costs, microbatches = self.costs(cell), PROMPTS * 16 // cell.gpus
        naive = simulated("naive", costs, microbatches).step_s
        return {mode: naive / simulated(mode, costs, microbatches).step_s for mode in modes}


FIGURES = (
    Figure(
        17,
        "HunyuanVideo",
        4.0,
        True,
        {"gap": (1.52, 1.84), "tsp": (1.62, 2.14), "bts": (2.28, 3.05), "tcss": (2.49, 3.34)},
    ),
    Figure(
        18,
        "Wan2.1",
        2.5,
        False,
        {"gap": (1.58, 1.70), "tsp": (1.71, 2.10), "bts": (2.27, 2.79), "tcss": (2.44, 2.85)},
    ),
)
OTHER_GATHERS: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)


def ranges(cells: Iterable[Mapping[str, float]]) -> dict[str, Range]:
    """Smallest and largest speedup of each mode over the cells."""
    cells = list(cells)
    return {mode: (min(cell[mode] for cell in cells), max(cell[mode] for cell in cells)) for mode in cells[0]}


def reached(ours: Range, paper: Range) -> bool:
    return round(ours[0], 2) >= paper[0] and round(ours[1], 2) >= paper[1]


def span(low_high: Range) -> str:
    return f"{low_high[0]:.2f}-{low_high[1]:.2f}"


def compared(found: Mapping[int, Mapping[str, Range]], names: Sequence[str]) -> Table:
    """The paper's ranges and ours; what is beyond the paper has no counterpart."""
    rows = []
    for figure in FIGURES:
        ours, blank = found[figure.number], [""] * (len(names) - len(BARS))
        paper = [span(figure.paper[mode]) for mode in BARS]
        verdict = ["yes" if reached(ours[mode], figure.paper[mode]) else "no" for mode in BARS]
        rows.append([f"figure {figure.number}, {figure.model}", "paper", *paper, *blank])
        rows.append(["", "here", *map(span, ours.values())])
        rows.append(["", "at or above", *verdict, *blank])
    return Table("Speedup over naive, smallest to largest of the cells", ["", "", *names], rows)


def cell_rows(figure: Figure, cells: Mapping[Cell, Mapping[str, float]]) -> Iterator[list[str]]:
    for cell, speedups in cells.items():
        costs = figure.costs(cell)
        ratios = [costs.update / costs.generate, costs.update / costs.stacked]
        yield [
            figure.model,
            str(cell.gpus),
            str(cell.num_steps),
            f"{cell.fraction}",
            *(f"{x:.2f}" for x in (*ratios, *speedups.values())),
        ]


def other_rows(gathers: Iterable[float], cells: Iterable[Cell]) -> Iterator[list[str]]:
    """What becomes of the ranges where a gather takes another time."""
    for figure in FIGURES:
        for gather in gathers:
            other = replace(figure, gather=gather)
            costs = [other.costs(cell) for cell in cells]
            gains = [cost.update / cost.stacked for cost in costs]
            ours = ranges(other.speedups(cell, BARS) for cell in cells)
            yield [figure.model, f"{gather:g}", span((min(gains), max(gains))), *(span(ours[mode]) for mode in BARS)]


def as_json(figure: Figure, cells: Mapping[Cell, Mapping[str, float]]) -> dict[str, Any]:
    ours = ranges(cells.values())
    return {
        "figure": figure.number,
        "model": figure.model,
        "paper": figure.paper,
        "here": ours,
        "reached": all(reached(ours[mode], figure.paper[mode]) for mode in BARS),
        "cells": [
            {**cell._asdict(), "costs": asdict(figure.costs(cell)), "speedup": speedups}
            for cell, speedups in cells.items()
        ],
    }


def main() -> None:
    given = arguments(__doc__)
    cells, gathers, names = CELLS, OTHER_GATHERS, BARS | BEYOND
    if given.quick:
        cells, gathers, names = EXTREMES, (), BARS
    measured = {figure.number: {cell: figure.speedups(cell, names) for cell in cells} for figure in FIGURES}
    found = {number: ranges(by_cell.values()) for number, by_cell in measured.items()}
    columns = ["model", "GPUs", "steps", "fraction", "update/generate", "TSP gain", *names.values()]
    rows = [row for figure in FIGURES for row in cell_rows(figure, measured[figure.number])]
    others = list(other_rows(gathers, [cell for cell in CELLS if cell.gpus == 16]))
    tables = [
        compared(found, list(names.values())),
        Table("Every cell: update/generate without TSP, and what TSP gains", columns, rows),
        Table("The same with other A/F, on 16 GPUs", ["model", "A/F", "TSP gain", *BARS.values()], others),
    ]
    series = {
        f"{figure.model}, {whose}": [by_mode[mode] for mode in BARS]
        for figure in FIGURES
        for whose, by_mode in (("paper", figure.paper), ("here", found[figure.number]))
    }
    chart = Chart(list(BARS.values()), series, "speedup over naive, range over the cells", "ideas added one by one")
    document = {"figures": [as_json(figure, measured[figure.number]) for figure in FIGURES]}
    publish("paper_figures", given.out, [t for t in tables if t.rows], document, chart)


if __name__ == "__main__":
    main()
