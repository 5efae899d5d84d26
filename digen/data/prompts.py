"""Reading prompt files.

Invariant: what is read is what a person sees in the file. A byte-order mark or a carriage return never becomes part of
a prompt, a prompt is never split at a character that only looks like a line end, and no row disappears or merges with
another. What cannot be read so is refused with the file, the lines and the reason.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from digen.data import columns
from digen.data.rows import NEGATIVE, Row, prompt_of
from digen.errors import DataError, one_of
from digen.types import Prompt

LINE_END = re.compile(r"\r\n|\n|\r")
SHOWN_PROBLEMS = 10
BYTE_ORDER_MARKS = {  # the longer ones first: UTF-32 begins like UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

Rows = Iterator[tuple[int, Row | str]]
"""(line or row number from 1, fields of the row or what is wrong with it)."""


def load_prompts(path: str | Path, column: str = "prompt", first_id: int = 0) -> list[Prompt]:
    """The prompts of a source, in its order, each row its own prompt even where the text repeats.

    UTF-8 files. `.txt`: one a line. `.jsonl`: one object a line, prompt under `column`. `.tsv` (no quoting), `.csv`
    (quoted fields): a header line, prompt in `column`. With pyarrow `.parquet`, `.arrow` and folders of them or of a
    saved Hugging Face data set. Everything else of a row is its metadata (`rows.py`); a key that a row lacks stays
    missing. Outer white space goes, blank lines are skipped. Lines end at LF, CRLF or CR only. Raises DataError.
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Rows]] = {
        ".txt": lambda text: _txt(text, column),
        ".jsonl": _jsonl,
        ".tsv": lambda text: _table(_tsv(text), column),
        ".csv": lambda text: _table(_csv(text), column),
    }
    ending = path.suffix.lower()
    try:
        if ending in readers:
            return _collect("line", readers[ending](_decoded(path)), column, first_id)
        if ending in columns.ENDINGS or path.is_dir():
            return _collect("row", columns.rows(path, column), column, first_id)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error.__cause__
    raise DataError(one_of(f"{path}: file name's ending", path.suffix, [*readers, *columns.ENDINGS]))


def _collect(unit: str, rows: Rows, column: str, first_id: int) -> list[Prompt]:
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, row in rows:
        made = row if isinstance(row, str) else prompt_of(row, column, first_id + len(prompts))
        if isinstance(made, str):
            problems.append(f"{unit} {number}: {made}")
        else:
            prompts.append(made)
    if problems:
        more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        raise DataError("; ".join(problems[:SHOWN_PROBLEMS] + more))
    if not prompts:
        raise DataError("no prompts in this file")
    return prompts


# --- Bytes to text ---


def _decoded(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            raise DataError(f"is {encoding}; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = _line_of(error.object[: error.start].decode("utf-8", "replace"))
        byte = error.object[error.start]
        raise DataError(f"line {line}: byte 0x{byte:02X} is not UTF-8 (Latin-1?); save the file as UTF-8") from error
    before, nul, _ = text.partition("\0")
    if nul:
        raise DataError(f"line {_line_of(before)}: NUL byte; is it UTF-16 or not a text file?")
    return text


def _line_of(before: str) -> int:
    return len(LINE_END.split(before))


# --- Text to rows ---


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(LINE_END.split(text), 1) if line.strip())


def _txt(text: str, column: str) -> Rows:
    for number, line in _lines(text):
        yield number, {column: line}


def _jsonl(text: str) -> Rows:
    for number, line in _lines(text):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            yield number, f"not JSON: {error.msg} at column {error.colno}"
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            yield number, f"not JSON that can be read: {error}"
        else:
            yield number, row if isinstance(row, dict) else f"must be an object; got {type(row).__name__}"


def _tsv(text: str) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in _lines(text))


def _csv(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                yield reader.line_num, fields
    except csv.Error as error:
        raise DataError(f"line {reader.line_num}: not CSV: {error}") from error


def _table(rows: Iterable[tuple[int, list[str]]], column: str) -> Rows:
    """Rows of a table whose first row names the columns. Short rows lack their last columns."""
    header: list[str] = []
    for number, fields in rows:
        if not header:
            header = [name.strip() for name in fields]
            if column not in header:
                raise DataError(one_of(f"line {number}: data.column", column, header))
            if len(set(header)) < len(header):
                raise DataError(f"line {number}: a column name repeats in {header}")
        elif len(fields) > len(header):
            yield number, f"{len(fields)} fields, but the header names {len(header)} columns"
        else:
            row = dict(zip(header, fields, strict=False))
            yield number, row if row.get(NEGATIVE) else {key: row[key] for key in row if key != NEGATIVE}
