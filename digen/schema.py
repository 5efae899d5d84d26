"""What keys a config type has, what each allows, and a readable line for each problem that validation finds.

Invariant: everything here is read from the pydantic types; a new key or a plugin algorithm's key needs nothing added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from digen.errors import one_of
from digen.settings import Keys, Tree

ANY_NAME = "<name>"
"""Stands in a path for a key of the user's choice."""
_WORDS = {int: "a whole number", float: "a number", str: "text", Path: "a path", NoneType: "null"}
_WORDS |= {bool: "true or false (also yes/no, on/off, 1/0)"}
_SIGNS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}


def keys(section: type[BaseModel]) -> dict[Keys, FieldInfo]:
    """Every key path below a section, sections themselves included; of a union, the keys of all its types."""
    found: dict[Keys, FieldInfo] = {}
    for name, field in section.model_fields.items():
        found.setdefault((name,), field)
        for inner in _sections(field.annotation):
            below = (name, ANY_NAME) if _mapping(field.annotation) else (name,)
            found |= {(*below, *path): f for path, f in keys(inner).items() if (*below, *path) not in found}
    return found


def open_keys(known: Mapping[Keys, FieldInfo]) -> set[Keys]:
    """Paths of mappings whose keys are the user's choice."""
    return {path for path, field in known.items() if _mapping(field.annotation)}


def type_keys(known: Mapping[Keys, FieldInfo]) -> set[Keys]:
    """Paths of keys that choose the type of their section."""
    return {path for path in known if path[-1] == "type" and len(path) > 1}


def defaults(section: type[BaseModel]) -> Tree:
    """The tree of a section's default values; keys without default are left out."""
    fields = section.model_fields.items()
    return {n: plain(f.get_default(call_default_factory=True)) for n, f in fields if not f.is_required()}  # type: ignore[call-arg]


def plain(value: Any) -> Any:
    """A value with sections and mappings as dictionaries."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def allowed(field: FieldInfo) -> str:
    """What a key takes, in words: `a number > 0 or null`."""
    words = _words(field.annotation)
    return " ".join([words, *_bounds(field.metadata)])


def _words(annotation: Any) -> str:
    match get_origin(annotation):
        case None if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return f"a section with {', '.join(annotation.model_fields)}"
        case None:
            return _WORDS.get(annotation, "text")
        case origin if origin is Annotated:
            inner, *metadata = get_args(annotation)
            return " ".join([_words(inner), *_bounds(metadata)])
        case origin if origin is Literal:
            return ", ".join(map(str, get_args(annotation)))
        case origin if origin in {Union, UnionType}:
            return " or ".join(_words(a) for a in get_args(annotation))
        case origin if issubclass(origin, Mapping):
            return "a mapping"
    items = [_words(a) for a in get_args(annotation) if a is not Ellipsis]
    return f"a list of {items[0]}" + (f", {len(items)} of them" if len(items) > 1 else "")


def _bounds(metadata: Sequence[Any]) -> list[str]:
    """Bounds among a field's metadata, those inside a reused `Field(...)` too."""
    flat = [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    signs = [(m, *_SIGNS[type(m)]) for m in flat if type(m) in _SIGNS]
    parts = [f"{sign} {getattr(m, name)}" for m, name, sign in signs]
    return [" and ".join(parts)] if parts else []


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _mapping(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)
