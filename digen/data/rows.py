"""One row of a prompt file as a prompt: its text, its own negative prompt, and what else it has as metadata.

Invariant: a row is taken whole or refused with a reason; nothing of it is lost: what is neither text nor negative
prompt stays in the metadata, which rewards get.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from digen.errors import one_of
from digen.types import Prompt

Row = Mapping[str, object]

NEGATIVE: Final = "negative_prompt"
"""Column of a row's own negative prompt."""
TARGET: Final = "target"
"""Metadata key of the text that rewards look for in the sample (`ocr`)."""
MESSAGES: Final = "messages"
"""Metadata key of the chat that a prompt was taken from."""


def prompt_of(row: Row, column: str, number: int) -> Prompt | str:
    """The prompt with this id, or what is wrong with the row.

    Its text is under `column`, as a text or as a chat whose last message of the user is the text (as verl-omni writes
    it); `negative_prompt` is one or the other too. A `ground_truth` in `reward_model` is the `target`.
    """
    if column not in row:
        return one_of(f"no key {column!r}; data.column", column, row)
    text, negative = text_of(row[column]), row.get(NEGATIVE)
    if problem := _problem(column, row[column], text):
        return problem
    assert text is not None
    against = None if negative is None else text_of(negative)
    if negative is not None and (problem := _problem(NEGATIVE, negative, against, may_be_empty=True)):
        return problem
    metadata = {key: value for key, value in row.items() if key not in (column, NEGATIVE)}
    if not isinstance(row[column], str):
        metadata.setdefault(MESSAGES, row[column])
    rule = row.get("reward_model")
    if isinstance(rule, Mapping) and isinstance(rule.get("ground_truth"), str):
        metadata.setdefault(TARGET, rule["ground_truth"])
    return Prompt(number, text.strip(), metadata, against)


def text_of(value: object) -> str | None:
    """A text, or that of the last message of the user in a list of `{role, content}`; None for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        return None
    said = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
    return _content(said[-1]) if said else None


def _content(content: object) -> str | None:
    """Content of a message: a text, or parts of which those of type `text` count."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content if isinstance(content, str) else None
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    texts = [text for text in parts if isinstance(text, str)]
    return "".join(texts) if texts else None


def _problem(column: str, given: object, text: str | None, *, may_be_empty: bool = False) -> str | None:
    if text is None:
        chat = isinstance(given, list)
        kind = "a text, or a chat with a message of the user" if chat else "a text"
        return f"{column!r} must be {kind}; got {_short(given)}"
    if not text.strip() and not may_be_empty:
        return f"{column!r} is empty"
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return f"{column!r} has a NUL or half a surrogate pair; no text can"
    return None


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
