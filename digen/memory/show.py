"""A memory plan as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from digen.memory.placement import RESERVE, MemoryPlan, setting
from digen.memory.ranks import RankMemory

_ABOUT = {
    "parameters": "what a rank keeps of the transformer",
    "base copy": "of full weights, for the KL term",
    "optimizer": "moments",
    "copies": "average, old policy",
    "gradients": "until the optimizer step",
    "gathered": "parameters of other ranks, on their way",
    "activations": "of a forward and backward pass",
    "trajectories": "the micro-batch that is trained",
    "decoder": "VAE",
    "text encoders": "alone, before the model is loaded",
    "sampling": "a denoising step, or the decoder",
    "samples": "of a generate call",
    "generation": "a generate call of the trainer (TAG)",
    "generation copy": "only while it generates",
}


def show_memory(plan: MemoryPlan, console: Console) -> None:
    """Print the parts of each group's ranks, their peaks, and the placement or what is missing."""
    for rank in plan.ranks:
        console.print(_table(rank))
        console.print()
    console.print(f"a step's samples take {_gb(plan.rollouts)} GB of the host's shared memory")
    if plan.memory is not None:
        usable = plan.memory * (1 - RESERVE)
        console.print(f"of {plan.memory / 1e9:g} GB a rank may use {usable / 1e9:g}: {RESERVE:.0%} are left alone")
    for problem in plan.problems:
        console.print(Text(f"does not fit: {problem}"))
    if plan.fits:
        where = "" if plan.gpus is None else f" on {plan.gpus} GPUs"
        console.print(f"fits{where}" + (" with" if plan.added else " as it is configured"))
    elif plan.added:
        console.print("nearest:")
    for key, value in plan.added.items():
        console.print(Text(f"  {setting(key, value)}"))


def _table(rank: RankMemory) -> Table:
    ranks = f"{rank.ranks} ranks" if rank.ranks > 1 else "1 rank"
    width = f", tsp {rank.width}" if rank.width else ""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"{rank.group} ({ranks}{width})", min_width=28)
    table.add_column("GB a rank", justify="right")
    table.add_column("")
    for name, nbytes in rank.parts.items():
        if nbytes:
            table.add_row(name, _gb(nbytes), _ABOUT.get(name, ""))
    table.add_row("peak", _gb(rank.peak), f"while it does: {rank.when}", style="bold")
    if rank.host:
        table.add_row("host memory", _gb(rank.host), "what is off the device")
    return table


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes < 1e11 else f"{nbytes / 1e9:.0f}"
