"""`digen new`: a plugin package of one's own that works and is tested before its author changes a line.

Invariant: written whole into a new folder, or refused with nothing written; names that would hide another plugin or
module are refused.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any, Final

from digen import plugins
from digen.errors import ConfigError, one_of
from digen.observe.files import write_atomic

KINDS: Final[Mapping[str, tuple[plugins.Kind, str, str]]] = {
    "algorithm": ("algorithms", "An algorithm for digen.", "digen run {name} --model glyph --dry-run"),
    "reward": ("rewards", "A reward for digen.", "digen run flowgrpo --reward {name} --dry-run"),
    "model": ("models", "A model for digen.", "digen sample {name} --prompt 'a sign \"OPEN\"'"),
}
"""Kind of plugin, as it is asked for -> its entry points, what the package says of itself, a command to try it with."""


@dataclass(frozen=True, slots=True)
class Created:
    """The files of a new package, and the command that shows that it works."""

    folder: Path
    files: tuple[Path, ...]
    command: str

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"folder": str(self.folder), "files": [str(path) for path in self.files], "command": self.command}


def create(kind: str, name: str, to: Path | None = None) -> Created:
    """Write the package `name` into the folder `to` (None: one of that name, here). Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(one_of("kind of plugin", kind, KINDS))
    group, summary, command = KINDS[kind]
    module = _module(group, name)
    folder = Path(name) if to is None else to
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; choose another folder with --to")
    words = {
        "name": name,
        "module": module,
        "class_name": "".join(part.capitalize() for part in name.split("-")),
        "group": group,
        "summary": summary,
        "command": command.format(name=name),
    }
    texts = {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        f"{module}.py": f"{kind}.py.txt",
        f"tests/test_{module}.py": f"test_{kind}.py.txt",
    }
    for path, template in texts.items():
        write_atomic(folder / path, Template(_template(template)).substitute(words))
    return Created(folder, tuple(folder / path for path in texts), words["command"])


def _template(name: str) -> str:
    return (files("digen") / "templates" / name).read_text("utf-8")


def _module(group: plugins.Kind, name: str) -> str:
    """The module of a plugin of this name. ConfigError when that is no name for one, or is taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError(f"name: got {name!r}; allowed: lower-case words of letters and digits, joined by -")
    module = name.replace("-", "_")
    if name in {found.name for found in plugins.available(group)}:
        raise ConfigError(f"name: {name!r} is one of digen's or of an installed plugin (`digen list`); choose another")
    if keyword.iskeyword(module) or find_spec(module) is not None:
        raise ConfigError(f"name: module {module!r} is there already and would be hidden; choose another name")
    return module
