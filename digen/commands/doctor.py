"""`digen doctor [RUN | ALGORITHM]`. Invariant: exit code 1 exactly if something is wrong, as with a failed test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from digen.errors import ConfigError


def doctor(
    run_or_algorithm: Annotated[
        str, typer.Argument(metavar="[RUN_OR_ALGORITHM]", help="Folder of a run, or what `digen run` takes.")
    ] = "flowgrpo",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    model: Annotated[str | None, typer.Option(help="Model; glyph if nothing else says.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings, e.g. a run's config.yaml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Check a run for what usually goes wrong; or, given an algorithm, make two tiny steps and check those."""
    from digen.cli import _console, _emit, _reported

    with _reported(debug):
        from digen.doctor import diagnose_run, diagnose_settings, show

        if Path(run_or_algorithm).is_dir():
            if overrides or model or config:
                raise ConfigError(f"{run_or_algorithm} is a run: it has its settings; leave out --model and the like")
            report = diagnose_run(Path(run_or_algorithm))
        else:
            words = list(overrides or ())
            if "=" in run_or_algorithm:
                run_or_algorithm, words = "flowgrpo", [run_or_algorithm, *words]
            report = diagnose_settings(run_or_algorithm, model, config, words, os.environ)
        if as_json:
            _emit(report.as_dict())
        else:
            show(report, _console(stderr=False))
        if report.wrong:
            raise typer.Exit(1)
