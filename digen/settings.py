"""From texts (YAML files, environment variables, command line) to one tree of settings, each with where it came from.

Invariant: layers are applied in the order of precedence, each setting knows its source, and one set of rules reads
values everywhere: YAML 1.2, so `1e-5` is a number and `no` is a text (that a true/false key takes as false).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import yaml

from digen.errors import ConfigError

Keys = tuple[str, ...]
Tree = dict[str, Any]
PREFIX: Final = "DIGEN_"

_SCALARS: Final = (
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    (
        "float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        "-+.0123456789",
    ),
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value for one key. The value is never a filled mapping: that is one setting of {} and one for each key."""

    path: Keys
    value: Any
    origin: str


class _Loader(yaml.SafeLoader):
    """YAML with the number, true/false and null texts of YAML 1.2; a duplicate key is an error."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as in the base class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {name!r}", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` or an older YAML would take for something else."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0 if text[:2] in {"0x", "0o"} else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in _SCALARS:
    _whole = re.compile(f"^(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, list(_first))
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, list(_first))


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """A tree as YAML text that `from_file` reads back as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def from_tree(tree: Tree, name: str) -> list[Setting]:
    """Settings of plain data, all with the same origin."""
    return list(_expand((), tree, {}, name))


def from_file(text: str, name: str) -> list[Setting]:
    """Settings of a YAML file; origins are `name:line`. Raises ConfigError with line and column for what is no YAML."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        tree = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}{at}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # a date in month 13, keys that are lists
        raise ConfigError(f"{name}: {error}") from error
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: got {tree!r}; a configuration file is a mapping of sections")
    try:
        lines = dict(_lines(node, ()))
        return list(_expand((), tree, {path: f"{name}:{line}" for path, line in lines.items()}, name))
    except RecursionError as error:
        raise ConfigError(f"{name}: a section contains itself, or there are thousands in one another") from error


def from_environment(environ: Mapping[str, str]) -> list[Setting]:
    """Settings of `DIGEN_TRAINER__LEARNING_RATE=1e-5` and its like: two underscores go one level down."""
    settings: list[Setting] = []
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        settings += _expand(path, parse_value(environ[name], name), {}, f"environment variable {name}")
    return settings


def from_overrides(overrides: Sequence[str]) -> list[Setting]:
    """Settings of `section.key=value`. A key with dots in it is quoted: `reward."my/file.py:name".weight=2`."""
    settings: list[Setting] = []
    for text in overrides:
        dotted, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r'("[^"]+"|[^."]+)(\.("[^"]+"|[^."]+))*', dotted):
            raise ConfigError(f"got {text!r} on the command line; allowed: section.key=value")
        path = tuple(quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|([^."]+)', dotted))
        settings += _expand(path, parse_value(value, dotted), {}, "command line")
    return settings


def parse_value(text: str, name: str) -> Any:
    """One value by the rules of the files: `[..]`, `{..}` and quoted texts are YAML, all else is one plain scalar."""
    text = text.strip()
    if text[:1] in {"[", "{", '"', "'"}:
        try:
            return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: cannot read {text!r}: {getattr(error, 'problem', error)}") from error
    loader = _Loader("")
    tag: str = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return loader.construct_object(yaml.ScalarNode(tag, text))


def merge(defaults: Tree, settings: Iterable[Setting], open_keys: Collection[Keys]) -> Tree:
    """Apply settings in order, mappings key by key.

    But a mapping with keys of the user's choice (`open_keys`: rewards, environment) is replaced when given as a whole.
    """
    tree = deepcopy(defaults)
    for setting in settings:
        *parents, last = setting.path
        node = tree
        for key in parents:
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        if setting.value != {}:
            node[last] = setting.value
        elif setting.path in open_keys or not isinstance(node.get(last), dict):
            node[last] = {}
    return tree


def without_other_types(layers: Iterable[list[Setting]], types: Collection[Keys]) -> list[list[Setting]]:
    """Drop the options of types that a higher layer replaced; `types` are the keys that choose a section's type.

    A layer's options belong to the type that this layer names. A layer that names none speaks of the final type.
    """
    kept = list(layers)
    for key in types:
        named = [[s.value for s in layer if s.path == key][-1:] for layer in kept]
        final = [value for values in named for value in values][-1:]
        section = key[:-1]
        for k, layer in enumerate(kept):
            if named[k] and named[k] != final:
                kept[k] = [s for s in layer if s.path[: len(section)] != section]
    return kept


def source(settings: Sequence[Setting], path: Keys) -> str:
    """Where the value at `path` comes from: the last setting of this key, of what it is in or of what is in it."""
    origins = [s.origin for s in settings if all(a == b for a, b in zip(s.path, path, strict=False))]
    return origins[-1] if origins else "default"


def _expand(path: Keys, value: Any, origins: Mapping[Keys, str], default: str) -> Iterator[Setting]:
    if not isinstance(value, dict):
        yield Setting(path, value, origins.get(path, default))
        return
    if path:
        yield Setting(path, {}, origins.get(path, default))
    for key, part in value.items():
        yield from _expand((*path, str(key)), part, origins, default)


def _lines(node: yaml.Node | None, path: Keys) -> Iterator[tuple[Keys, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner)
