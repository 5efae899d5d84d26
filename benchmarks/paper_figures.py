"""Figures 17 and 18 of the paper in virtual time: the same driver, costs assumed, the paper's ranges beside ours.

    python benchmarks/paper_figures.py

The paper prints ranges of speedups over naive disaggregation and no costs. What it says, and is taken over: devices
are split evenly between generator and trainer; 32 prompts a step; 20, 30 or 40 denoising steps, of which a fraction of
0.4 or 0.6 is trained; FSDP generates and trains; 16 or 32 GPUs of two testbeds, whose peak rates it gives. What it does
not say is assumed here, once for a testbed and never for a cell:

- 16 samples per prompt, one micro-batch of one prompt on the 8 ranks of 16 GPUs, so 2 samples a rank, one after the
  other (as DanceGRPO samples video); 8 of 16 are trained, one a rank (best-of-n; DanceGRPO keeps 8). On 32 GPUs a
  micro-batch is two prompts on 16 ranks.
- Trained steps: floor(fraction x (steps - 1)) with DanceGRPO (HunyuanVideo), floor(fraction x steps) with FlowGRPO
  (Wan2.1). With TSP a pass holds up to 12 of them, without it one.
- Weights are sharded over the 8 GPUs of a node and kept in host memory (FSDP with CPU offload: Adam's state of 13
  billion weights leaves little of 48 GB, and users report 14 billion running out of 80 GB). So each forward, and each
  recomputation in a backward, copies a float32 shard to the GPU and gathers the whole in bfloat16. That overlaps with
  compute where compute is longer. Guidance (Wan2.1) is a second forward with its own gathers.
- A backward ends in reducing float32 gradients, copying the shard to the host, and adding it to what is there. While
  gradients accumulate that does not overlap: torch waits for the copy, as the addition runs on the CPU (foreach_reduce
  in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), with one thread a rank, which is torchrun's default.
- Backward costs three forwards: gradients, with activations computed again.
- In units of a sample's forward: decoding 2, scoring 1, a switch of the trainer to generation 2, sync and pull 2 each.

Rates are in `Testbed` below. The result hangs on those that TSP saves, so the tables also show others, and no offload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor, inf
from typing import Any, NamedTuple

from common import Chart, Costs, Table, arguments, publish, simulated

from digen.schedule.tsp import chunks

PROMPTS = 32
SAMPLES_A_RANK, TRAINED_A_RANK = 2, 1
TIMESTEPS_A_PASS = 12
RANKS = 8
"""That a model is sharded over."""
BACKWARD = 3.0
DECODE, SCORE, SWITCH, SYNC, PULL = 2.0, 1.0, 2.0, 2.0, 2.0

Range = tuple[float, float]
BARS = {"gap": "GAP", "tsp": "+TSP", "bts": "+TAG", "tcss": "+TCSS"}
BEYOND = {"shared-tcss": "assist=both"}
COSTS = ["model", "forward", "gather", "reduce and add", "one trained timestep", "with TSP"]


class Cell(NamedTuple):
    """One group of bars in a figure."""

    gpus: int
    num_steps: int
    fraction: float


CELLS = tuple(Cell(g, n, f) for g in (16, 32) for n in (20, 30, 40) for f in (0.4, 0.6))


EXTREMES = (Cell(16, 20, 0.4), Cell(16, 20, 0.6), Cell(16, 40, 0.6))
"""The ends of all ranges on 16 GPUs."""


@dataclass(frozen=True, slots=True)
class Testbed:
    """Rates of one GPU and its rank, a second, with all eight of a node at work."""

    compute: float
    """Dense bfloat16 operations, as reached."""
    links: float
    """Bytes of a collective."""
    host: float
    """Bytes between host memory and the GPU; infinite: weights stay on the GPU."""
    add: float
    """Bytes of memory traffic of the rank's CPU thread; infinite: gradients stay on the GPU."""


A = Testbed(compute=0.55 * 155e12, links=4e9, host=10e9, add=10e9)
"""48 GB GPUs without direct links: collectives go through host memory."""
B = Testbed(compute=0.5 * 989e12, links=300e9, host=20e9, add=12e9)
"""80 GB GPUs with direct links."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One model on one testbed."""

    number: int
    model: str
    parameters: float
    operations: float
    """Of a sample's forward, with guidance."""
    guided: bool
    all_but_last: bool
    """Whether the fraction is of all steps but the last."""
    testbed: Testbed
    paper: Mapping[str, Range]

    @property
    def forward(self) -> float:
        """Compute of one sample's forward, s."""
        return self.operations / self.testbed.compute

    @property
    def gather(self) -> float:
        """Weights from the shards in host memory to every GPU, for one forward, s."""
        shard = self.parameters / RANKS
        once = 4 * shard / self.testbed.host + 2 * shard * (RANKS - 1) / self.testbed.links
        return (1 + self.guided) * once

    @property
    def reduce(self) -> float:
        """Gradients to their shards in host memory and added there (two reads and a write), s."""
        shard = 4 * self.parameters / RANKS
        return shard * ((RANKS - 1) / self.testbed.links + 1 / self.testbed.host + 3 / self.testbed.add)

    def passed(self, rows: int) -> float:
        """Forward and backward over so many rows of one rank, s."""
        forward, backward = rows * self.forward, BACKWARD * rows * self.forward
        return max(self.gather, forward) + max(self.gather, backward) + self.reduce

    def update(self, timesteps: int, stacked: int) -> float:
        """One micro-batch's update: a rank's samples, one by one, `stacked` timesteps in one pass; s."""
        passes = chunks(TRAINED_A_RANK, timesteps, 1, stacked)
        return sum(self.passed(c.timesteps.stop - c.timesteps.start) for c in passes)

    def trained(self, cell: Cell) -> int:
        return floor(cell.fraction * (cell.num_steps - self.all_but_last) + 1e-9)

    def costs(self, cell: Cell) -> Costs:
        forward = self.forward
        generate = SAMPLES_A_RANK * (cell.num_steps * max(self.gather, forward) + DECODE * forward)
        return Costs(
            generate=generate,
            update=self.update(self.trained(cell), 1),
            stacked=self.update(self.trained(cell), TIMESTEPS_A_PASS),
            score=SAMPLES_A_RANK * SCORE * forward,
            assist=generate + SWITCH * forward,
            sync=SYNC * forward,
            pull=PULL * forward,
        )

    def speedups(self, cell: Cell, modes: Iterable[str]) -> dict[str, float]:
        """Over naive, by mode."""
        costs, microbatches = self.costs(cell), PROMPTS * 16 // cell.gpus
        naive = simulated("naive", costs, microbatches).step_s
        return {mode: naive / simulated(mode, costs, microbatches).step_s for mode in modes}


FIGURES = (
    Figure(
        number=17,
        model="HunyuanVideo",
        parameters=12.8e9,
        operations=105e12,
        guided=False,
        all_but_last=True,
        testbed=A,
        paper={"gap": (1.52, 1.84), "tsp": (1.62, 2.14), "bts": (2.28, 3.05), "tcss": (2.49, 3.34)},
    ),
    Figure(
        number=18,
        model="Wan2.1",
        parameters=14.3e9,
        operations=216e12,
        guided=True,
        all_but_last=False,
        testbed=B,
        paper={"gap": (1.58, 1.70), "tsp": (1.71, 2.10), "bts": (2.27, 2.79), "tcss": (2.44, 2.85)},
    ),
)


def others(testbed: Testbed) -> Iterator[tuple[str, Testbed]]:
    """Rates that are also shown."""
    for factor in (0.67, 1.0, 1.5, 2.0):
        faster = replace(testbed, links=testbed.links * factor, host=testbed.host * factor)
        yield f"links {faster.links / 1e9:.3g}, host {faster.host / 1e9:.3g}", faster
    yield f"links {testbed.links / 1e9:.3g}, no offload", replace(testbed, host=inf, add=inf)


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


def cost_rows() -> Iterator[list[str]]:
    for figure in FIGURES:
        kept = figure.passed(TIMESTEPS_A_PASS) / TIMESTEPS_A_PASS
        yield [
            figure.model,
            *(f"{x:.2f}" for x in (figure.forward, figure.gather, figure.reduce, figure.passed(1), kept)),
        ]


def other_rows(cells: Iterable[Cell]) -> Iterator[list[str]]:
    """What becomes of the ranges with other rates."""
    for figure in FIGURES:
        for label, testbed in others(figure.testbed):
            other = replace(figure, testbed=testbed)
            costs = [other.costs(cell) for cell in cells]
            gains = [cost.update / cost.stacked for cost in costs]
            ours = ranges(other.speedups(cell, BARS) for cell in cells)
            yield [figure.model, label, span((min(gains), max(gains))), *(span(ours[mode]) for mode in BARS)]


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
    cells, names = CELLS, BARS | BEYOND
    if given.quick:
        cells, names = EXTREMES, BARS
    measured = {figure.number: {cell: figure.speedups(cell, names) for cell in cells} for figure in FIGURES}
    found = {number: ranges(by_cell.values()) for number, by_cell in measured.items()}
    columns = ["model", "GPUs", "steps", "fraction", "update/generate", "TSP gain", *names.values()]
    rows = [row for figure in FIGURES for row in cell_rows(figure, measured[figure.number])]
    varied = [] if given.quick else list(other_rows([cell for cell in CELLS if cell.gpus == 16]))
    tables = [
        compared(found, list(names.values())),
        Table("Seconds of one sample on one rank", COSTS, list(cost_rows())),
        Table("Every cell: update/generate without TSP, and what TSP gains", columns, rows),
        Table("The same with other rates in GB/s, on 16 GPUs", ["model", "rates", "TSP gain", *BARS.values()], varied),
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
