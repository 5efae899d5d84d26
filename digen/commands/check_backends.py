"""`digen check-backends`. Invariant: exit code 1 exactly if something differs by more than rounding explains."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from digen.backends.compare import Comparison

SETTINGS: Final = (
    "algorithm.samples_per_prompt=4", "algorithm.steps={type: all-but-last}", "sampling.num_steps=6", "steps=1",
    "sampling.eval_num_steps=6", "schedule.mode=pipelined", "schedule.tag=static(1)", "schedule.assist=none",
    "schedule.staleness=0", "trainer.backend=local", "trainer.ranks=1", "trainer.lr_schedule=constant",
    "trainer.warmup_steps=0", "generator.replicas=1", "generator.ranks=1", "engine.name=process",
    "weights.transport=null", "algorithm.old_log_prob=rollout",
)  # fmt: skip
"""A run of two groups, small enough for any model; what is asked for beside it counts more."""


def check_backends(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    model: Annotated[str, typer.Option(help="Model.")] = "glyph",
    generator: Annotated[str, typer.Option(help="generator.backend; it is compared with diffusers.")] = "vllm-omni",
    config: Annotated[Path | None, typer.Option(help="YAML file with settings, e.g. a run's config.yaml.")] = None,
    out: Annotated[Path, typer.Option(help="The picture of both.")] = Path("backends.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Sample with two backends from the same weights and noise, before and after an update, and compare."""
    from digen.cli import _console, _emit, _reported

    with _reported(debug):
        # Engines write to both, and change how they write.
        with os.fdopen(os.dup(2), "w") as aside, redirect_stdout(aside), redirect_stderr(aside):
            found = _compared(model, generator, config, list(overrides or ()), out)
        if as_json:
            _emit(found.as_dict())
        else:
            _show(found, _console(stderr=False))
        if not found.ok:
            raise typer.Exit(1)


def _compared(model: str, generator: str, config: Path | None, overrides: list[str], out: Path) -> Comparison:
    from digen.preflight import check_packages, check_weights
    from digen.presets import resolve

    with TemporaryDirectory(prefix="digen-backends-") as place:
        prompts = Path(place) / "prompts.txt"  # some models bring none
        prompts.write_text("a\nb\n")
        named = [f"generator.backend={json.dumps(generator)}", f"data.prompts={json.dumps(str(prompts))}"]
        small = ["data.prompts_per_step=2", "schedule.prompts_per_microbatch=1", "reward={jpeg-compressibility: {}}"]
        asked = resolve("flowgrpo", model, config, [*SETTINGS, *named, *small, *overrides], os.environ)
        check_packages("generators", asked.generator.backend)
        check_weights(asked.model)
        from digen.backends.compare import compare

        return compare(asked, out)


def _show(found: Comparison, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(f"{found.model}: {found.generator} and diffusers", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("weights", "what", "step", "largest difference", "allowed", ""):
        table.add_column(title, justify="right" if "step" in title or "diff" in title else "left")
    for each in found.differences:
        verdict = Text("ok", "green") if each.ok else Text("differs", "red")
        step = "" if each.step is None else str(each.step)
        table.add_row(each.weights, each.what, step, f"{each.found:.2g}", f"{each.allowed:.2g}", verdict)
    console.print(table)
    console.print(f"side by side: {found.picture}", highlight=False, soft_wrap=True)
