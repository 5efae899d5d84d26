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
from pydantic import BaseModel
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
        below: Keys = (name,)
        if _mapping(field.annotation):
            below = (name, ANY_NAME)
            found[below] = FieldInfo(annotation=_value_type(field.annotation))
        for inner in _sections(field.annotation):
            for path, field_inside in keys(inner).items():
                found[*below, *path] = _either(found.get((*below, *path)), field_inside)
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
    return {n: plain(f.get_default(call_default_factory=True)) for n, f in fields if not f.is_required()}


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


def _either(known: FieldInfo | None, other: FieldInfo) -> FieldInfo:
    """One field for a key that several types of a union have: the first, or any of their `type` names."""
    if known is None or get_origin(other.annotation) is not Literal or known.annotation == other.annotation:
        return known or other
    choices: Any = Union[known.annotation, other.annotation]  # noqa: UP007 - made at run time
    return FieldInfo(annotation=choices, default=known.default)


def _mapping(annotation: Any) -> bool:
    """Whether it is a mapping, or may be one."""
    return _value_type(annotation) is not None


def _value_type(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        return next((found for part in get_args(annotation) if (found := _value_type(part)) is not None), None)
    return get_args(annotation)[1] if isinstance(origin, type) and issubclass(origin, Mapping) else None


def dotted(path: Keys) -> str:
    """`a.b."c.d"`: a path as it is written on the command line."""
    return ".".join(f'"{key}"' if "." in key else key for key in path)


def lines(error: ErrorDetails, tree: Tree, known: Mapping[Keys, FieldInfo]) -> tuple[Keys, list[str]]:
    """Path of one of pydantic's errors and the sentences to show for it: key, what was given, what is allowed."""
    path, got, tag = _locate(error, tree)
    name, field = dotted(path), _field(path, known)
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return path, [_unknown(path, tag, known)]
        case "missing":
            return path, [f"{name}: missing; allowed: {allowed(field) if field else 'anything'}"]
        case "union_tag_invalid":
            return (*path, "type"), [
                one_of(f"{name}.type", context["tag"], re.findall(r"'([^']*)'", context["expected_tags"]))
            ]
        case "literal_error" if not field or not {int, float} & _types(field.annotation):  # else it is one of several
            expected = context["expected"]  # 'a', 'b' or 'c'; numbers stand without quotes
            names = re.findall(r"'([^']*)'", expected) or re.findall(r"\d+", expected)
            return path, [one_of(name, error["input"], names)]
        case "value_error":
            texts = str(context["error"]).splitlines()
            return path, [text if text.startswith(name) else f"{name}: {text}" for text in texts]
        case "string_pattern_mismatch" if field and field.description:
            return path, [f"{name}: got {shown(got)}; allowed: {field.description.rstrip('.')}"]
    # Types of a union may bound the same key differently: there pydantic's own words are the exact ones.
    by_type = bool(tag) and error["type"].startswith(("greater_", "less_"))
    exact = allowed(field) if field and not by_type else error["msg"].removeprefix("Input should be ")
    return path, [f"{name}: got {shown(got)}; allowed: {exact}"]


def flags_for_numbers(tree: Tree, known: Mapping[Keys, FieldInfo]) -> dict[Keys, str]:
    """Problems that pydantic does not see: Python takes true for 1, but `steps: true` is a mistake."""
    problems = {}
    for path, field in known.items():
        value: Any = tree
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) and {int, float} & _types(field.annotation) and bool not in _types(field.annotation):
            problems[path] = f"{dotted(path)}: got {shown(value)}; allowed: {allowed(field)}"
    return problems


def shown(value: Any) -> str:
    """A value as the user would write it, cut to a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _types(annotation: Any) -> set[Any]:
    return {annotation}.union(*map(_types, get_args(annotation)))


def _locate(error: ErrorDetails, tree: Tree) -> tuple[Keys, Any, str]:
    """(path of keys, value there, chosen type) from pydantic's location, which also has types of unions and indices."""
    path: list[str] = []
    value: Any = tree
    tag = ""
    for part in error["loc"]:
        if isinstance(value, dict) and part in value:
            path, value = [*path, str(part)], value[part]
        elif isinstance(value, dict) and part == value.get("type"):
            tag = str(part)
        elif error["type"] == "missing" and part == error["loc"][-1]:
            path.append(str(part))
    return tuple(path), value, tag


def _field(path: Keys, known: Mapping[Keys, FieldInfo]) -> FieldInfo | None:
    """The field at a path, where any key of the user's choice stands for `ANY_NAME`."""
    found: Keys = ()
    for key in path:
        found = (*found, key if (*found, key) in known else ANY_NAME)
    return known.get(found)


def _unknown(path: Keys, tag: str, known: Mapping[Keys, FieldInfo]) -> str:
    section, key = path[:-1], path[-1].replace("-", "_")
    siblings = [p[-1] for p in known if p[:-1] == section]
    elsewhere = [p for p in known if p[-1] == key and len(p) > 1]
    hint = ""
    if path[-1] in siblings:
        return f"{dotted(path)}: not an option of {dotted((*section, 'type'))}={tag}"
    if key in siblings:
        hint = f" Did you mean {dotted((*section, key))}?"
    elif elsewhere:
        hint = f" It belongs at {' or '.join(map(dotted, elsewhere))}."
    elif near := _nearest(section, key, known):
        hint = f" Did you mean {dotted(near)}?"
    return f"{dotted(path)}: unknown key.{hint} Allowed in {dotted(section) or 'a run'}: {', '.join(siblings)}"


def _nearest(section: Keys, key: str, known: Mapping[Keys, FieldInfo]) -> Keys | None:
    """The known key that looks most like this one, in its section if there is one, else anywhere."""
    for candidates in ([p for p in known if p[:-1] == section], list(known)):
        if near := get_close_matches(key, [p[-1] for p in candidates], n=1, cutoff=0.7):
            return next(p for p in candidates if p[-1] == near[0])
    return None
