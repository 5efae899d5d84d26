"""`digen new algorithm|reward|model NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="algorithm, reward or model.")],
    name: Annotated[str, typer.Argument(help="Of the package and of the plugin, e.g. branch-weighted.")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="New or empty folder; NAME if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Begin a plugin of your own: a package with a working example and the tests that it has to pass."""
    from digen.cli import _emit, _reported

    with _reported(debug):
        from digen.new import create

        made = create(kind, name, to)
        if as_json:
            _emit(made.as_dict())
            return
        typer.echo("\n".join(map(str, made.files)))
        typer.echo(f"\nnext: cd {made.folder} && pip install -e '.[test]' && pytest\nthen: {made.command}")
