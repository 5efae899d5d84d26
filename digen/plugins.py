"""Finding plugins by name: entry points (the built-ins too) or `path/to/file.py:Name` or `module.sub:Name`.

Invariant: `target` and `available` import no plugin; they read its source. So an unknown name, a missing file, a
missing attribute or a missing optional dependency is known, in one sentence, before anything is loaded.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import (
    Distribution,
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from typing import Literal, NamedTuple, get_args

from digen.errors import PluginError, one_of

Kind = Literal["algorithms", "models", "generators", "trainers", "rewards", "engines", "transports", "policies"]
"""The part of an entry point group's name after `digen.`."""
_IMPORTING = RLock()
KINDS: tuple[Kind, ...] = get_args(Kind)
FILE_MODULE = "digen_file_"
"""Prefix of the module name that a plugin file gets; the rest is its stem and a checksum of its path."""


class Plugin(NamedTuple):
    """One installed plugin, as `digen list` shows it."""

    name: str
    summary: str
    """First line of its docstring; empty when the source cannot be read."""
    source: str
    """Distribution that it comes from, e.g. `digen`."""
    problem: str = ""
    """Why it cannot be used here; empty where nothing is known against it."""


def find(kind: Kind, name: str) -> object:
    """Import a plugin and return the class or function. Raises PluginError."""
    return load(target(kind, name))


def target(kind: Kind, name: str) -> str:
    """Where a plugin is, without importing it: `module:Name` or `/absolute/file.py:Name` (what `load` takes).

    Raises PluginError when the name is unknown, the file, module or attribute is missing, or an extra is not installed.
    """
    if ":" in name:
        return _checked(kind, name, name, _digen())
    found = _installed(kind, name)
    return _checked(kind, name, _where(found), found.dist)


def _checked(kind: Kind, name: str, where: str, dist: Distribution | None) -> str:
    location, _, attribute = where.rpartition(":")
    if location.endswith(".py"):
        location = str(Path(location).expanduser().absolute())
    tree = _parse(location, f"{_singular(kind)} {name!r}")
    _check_attribute(tree, location, attribute, _singular(kind))
    _check_extras(tree, dist, f"{_singular(kind)} {name!r}")
    return f"{location}:{attribute}"


def load(where: str) -> object:
    """Import `module:Name` or `/path/file.py:Name`. A file is imported once per process. Raises PluginError."""
    location, _, attribute = where.rpartition(":")
    try:
        module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except ImportError as error:
        raise PluginError(f"{where} cannot be imported: {error}{_install_hint(error)}") from error
    except PluginError:
        raise
    except Exception as error:  # a plugin's own code, which may raise anything while it is imported
        raise PluginError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [n for n in vars(value) if not n.startswith("_")]
            raise PluginError(one_of(f"name in {location}", part, names))
        value = getattr(value, part)
    return value


def origin(value: type) -> str:
    """Inverse of `load`: where a class was defined, for another process to import it."""
    module = value.__module__
    location = sys.modules[module].__file__ if module.startswith(FILE_MODULE) else module
    return f"{location}:{value.__qualname__}"


def installed_name(kind: Kind, where: str) -> str | None:
    """The entry point's name of what `target` or `origin` gave; None for what was found by its path."""
    return next((e.name for e in _group(kind) if _where(e) == where), None)


def folder(kind: Kind, name: str) -> Path:
    """Folder of a plugin's source file: a model keeps its bundled files there. Imports nothing. Raises PluginError."""
    location = target(kind, name).rpartition(":")[0]
    path = Path(location) if location.endswith(".py") else _source(location)
    assert path is not None, "target() has read it"
    return path.parent


def attribute(kind: Kind, name: str, key: str) -> object | None:
    """A plugin class's attribute, its own or inherited, where that is written as a literal; else None.

    Imports nothing. Raises PluginError when there is no such plugin.
    """
    location, _, found = target(kind, name).rpartition(":")
    return _attribute(location, found, key)


def available(kind: Kind) -> list[Plugin]:
    """The installed plugins of a kind, by name; a broken one with what is wrong with it. Imports none of them."""
    return [
        Plugin(found.name, _summary(found), _source_of(found), _problem(kind, found))
        for found in sorted(_group(kind), key=lambda e: (e.name, _source_of(e)))
    ]


def _problem(kind: Kind, found: EntryPoint) -> str:
    try:
        _checked(kind, found.name, _where(found), found.dist)
        _installed(kind, found.name)
    except PluginError as error:
        return str(error)
    return ""


def _source_of(found: EntryPoint) -> str:
    return found.dist.name if found.dist else "unknown"


def _singular(kind: Kind) -> str:
    return "policy" if kind == "policies" else kind.removesuffix("s")


@cache
def _group(kind: Kind) -> EntryPoints:
    """Entry points of a kind. What is installed does not change under a running process, and reading it takes 30 ms."""
    return entry_points(group=f"digen.{kind}")


def _digen() -> Distribution | None:
    try:
        return distribution("digen")
    except PackageNotFoundError:
        return None


def _installed(kind: Kind, name: str) -> EntryPoint:
    group = _group(kind)
    if name not in group.names:
        raise PluginError(one_of(_singular(kind), name, [*group.names, "path/to/file.py:Name"]))
    offers = {_where(found): found for found in group.select(name=name)}
    if len(offers) > 1:
        shown = " and ".join(f"{_source_of(found)} ({where})" for where, found in sorted(offers.items()))
        raise PluginError(f"{_singular(kind)} {name!r} is offered by {shown}; ask for one by what is in brackets")
    return next(iter(offers.values()))


def _where(found: EntryPoint) -> str:
    return f"{found.module}:{found.attr}"


def _load_file(path: Path) -> object:
    name = f"{FILE_MODULE}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    with _IMPORTING:  # two workers of one process may ask for the same file at once
        return sys.modules[name] if name in sys.modules else _execute(name, path)


def _execute(name: str, path: Path) -> object:
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PluginError(f"plugin file {path} does not exist")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# --- reading source instead of importing it ---


def _source(location: str) -> Path | None:
    """Source file of a module. Only finds: importing a submodule's parents could be slow or fail."""
    top, *rest = location.split(".")
    spec: ModuleSpec | None = sys.modules[top].__spec__ if top in sys.modules else find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def _parse(location: str, what: str) -> ast.Module:
    path = Path(location) if location.endswith(".py") else _source(location)
    if path is None or not path.is_file():
        noun = "file" if location.endswith(".py") else "module"
        raise PluginError(f"{what}: {noun} {location} does not exist")
    source = path.read_bytes() if path.suffix == ".py" else b"from compiled import *"
    try:
        with _IMPORTING:  # Python 3.11 raises SystemError where two threads make syntax trees at once
            return ast.parse(source, str(path))
    except SyntaxError as error:
        raise PluginError(f"{what}: {path}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # a NUL byte
        raise PluginError(f"{what}: {path}: {error}") from error


def _top_level(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, statement) of everything a module defines at its top, also under `if` and `try`."""
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop(0)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((n.asname or n.name, node) for n in names)
            case ast.Assign() | ast.AnnAssign():
                yield from ((n.id, node) for n in ast.walk(node) if isinstance(n, ast.Name))
            case ast.If() | ast.Try() | ast.With():
                queue.extend(ast.iter_child_nodes(node))
            case ast.ExceptHandler(body=body):
                queue.extend(body)


def _check_attribute(tree: ast.Module, location: str, attribute: str, kind: str) -> None:
    names = dict(_top_level(tree))
    if attribute.partition(".")[0] not in names and not {"*", "__getattr__"} & names.keys():
        defined = [n for n, node in names.items() if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        raise PluginError(one_of(f"{kind} in {location}", attribute, [n for n in defined if not n.startswith("_")]))


def _lineage(location: str, name: str) -> list[tuple[str, ast.ClassDef]]:
    """A class and all its bases, depth first; where a class comes twice the last place counts, as in Python's order."""
    try:
        node = dict(_top_level(_parse(location, name))).get(name)
    except PluginError:  # a base class of another package, say, that is no source file
        return []
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return _lineage(node.module, next(n.name for n in node.names if name in (n.name, n.asname)))
    if not isinstance(node, ast.ClassDef):
        return []
    return [(location, node)] + [
        found for base in node.bases if isinstance(base, ast.Name) for found in _lineage(location, base.id)
    ]


def _attribute(location: str, name: str, key: str) -> object | None:
    ordered = {(where, node.name): node for where, node in reversed(_lineage(location, name))}
    for node in reversed(ordered.values()):
        for statement in node.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=found)])
                    | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr())
                ) if found == key:
                    return _literal(statement.value)
    return None


def _literal(node: ast.expr | None) -> object | None:
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:
        return None


def _summary(found: EntryPoint) -> str:
    try:
        tree = _parse(found.module, found.name)
    except PluginError:
        return ""
    node = dict(_top_level(tree)).get(found.attr.partition(".")[0])
    documented = node if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else tree
    text = ast.get_docstring(documented) or ast.get_docstring(tree) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


# --- optional dependencies ---


def _extras(dist: Distribution | None) -> dict[str, str]:
    """Import name -> extra that installs it, from a distribution's metadata; `dev` is nobody's first choice."""
    pattern = re.compile(r"^\s*([\w.-]+).*extra\s*==\s*['\"]([\w-]+)['\"]")
    matches = [m for m in map(pattern.match, (dist.requires if dist else None) or ()) if m]
    return {m[1].replace("-", "_").lower(): m[2] for m in matches if m[2] != "dev"}


def _imports(node: ast.AST) -> Iterator[str]:
    """Top-level packages that the code imports anywhere, but for tries and type checks: those can do without."""
    match node:
        case ast.Try():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Import(names=names):
            yield from (n.name.partition(".")[0] for n in names)
        case ast.ImportFrom(module=str(module), level=0):
            yield module.partition(".")[0]
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _imports(child)


def _check_extras(tree: ast.Module, dist: Distribution | None, what: str) -> None:
    extras = _extras(dist)
    for package in _imports(tree):
        extra = extras.get(package.lower())
        if extra and dist and package not in sys.modules and find_spec(package) is None:
            raise PluginError(f"{what} needs {package}: pip install '{dist.name}[{extra}]'")


def _install_hint(error: ImportError) -> str:
    package = (error.name or "").partition(".")[0]
    extra = _extras(_digen()).get(package.lower())
    return f": pip install 'digen[{extra}]'" if extra else ""
