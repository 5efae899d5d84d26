"""Running a suite without pytest's collection, to ask which of its tests a plugin does not pass.

Invariant: each test has an instance of its own, as pytest gives it, and folders of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest


def failing(suite: type, folder: Path, **settings: Any) -> set[str]:
    """Names of the tests of `suite` that fail with these settings (`reward="..."`); skipped ones do not count.

    folder: for what tests write; any that exists.
    """
    return {name for name, arguments in _cases(suite) if not _passes(suite, name, arguments, folder, settings)}


def _cases(suite: type) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(test, its arguments) of all that the suite defines; of parametrized ones, each."""
    for name in sorted(n for n in vars(suite) if n.startswith("test_")):
        marks = [mark for mark in getattr(vars(suite)[name], "pytestmark", []) if mark.name == "parametrize"]
        if not marks:
            yield name, {}
            continue
        keys, rows = marks[0].args
        for row in rows:
            yield name, {keys: row} if isinstance(keys, str) else dict(zip(keys, row, strict=True))


def _passes(suite: type, name: str, arguments: Mapping[str, Any], folder: Path, settings: Mapping[str, Any]) -> bool:
    case = suite()
    for key, value in settings.items():
        setattr(case, key, value)
    test = getattr(case, name)
    place = {"tmp_path": Path(mkdtemp(dir=folder))} if "tmp_path" in signature(test).parameters else {}
    try:
        test(**arguments, **place)
    except pytest.skip.Exception:
        return True
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever a plugin or an assertion raises
        return False
    return True
