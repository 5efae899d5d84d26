"""Prompts in Apache Arrow's formats: Parquet, Arrow files, and datasets that Hugging Face's library saved to a folder.

Invariant: read as they are stored, in order, a record at a time; nothing is downloaded and no code of a data set runs.
Columns of bytes (images, audio) are left out: prompts and their metadata travel between processes. Needs pyarrow, which
is asked for by name where it is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from digen.errors import DataError, one_of

if TYPE_CHECKING:
    from digen.data.rows import Row

ENDINGS: Final = (".parquet", ".arrow")
SAVED, SPLITS = "state.json", "dataset_dict.json"
"""What a saved data set has, and what a folder of several of them (its splits) has."""


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that a source stands for: a file is itself; of a folder, those of the data set in it, in order.

    Raises DataError for a folder that is none, naming its splits where it has some.
    """
    if not path.is_dir():
        return (path,)
    if (path / SAVED).is_file():
        listed = json.loads((path / SAVED).read_text("utf-8"))
        if any(listed.get(key) for key in ("_indices_data_files", "_indices_files")):
            raise DataError("was saved with a selection beside it: call flatten_indices() before save_to_disk()")
        return tuple(path / file["filename"] for file in listed["_data_files"])
    if (path / SPLITS).is_file():
        splits = json.loads((path / SPLITS).read_text("utf-8"))["splits"]
        raise DataError(f"has several splits; allowed: {', '.join(str(path / split) for split in splits)}")
    found = sorted(file for ending in ENDINGS for file in path.glob(f"*{ending}"))
    if not found:
        raise DataError(f"is a folder without {SAVED} (a saved data set) and without {' or '.join(ENDINGS)} files")
    return tuple(found)


def rows(path: Path, column: str) -> Iterator[tuple[int, Row | str]]:
    """(row number from 1, its fields that are not null) of all the source's files. Raises DataError."""
    number = 0
    for file in files_of(path):
        for batch in _batches(file, column):
            for row in batch.to_pylist():
                number += 1
                yield number, {key: value for key, value in row.items() if value is not None}


def _batches(file: Path, column: str) -> Iterator[Any]:
    if find_spec("pyarrow") is None:
        raise DataError("needs pyarrow: pip install 'digen[data]'")
    import pyarrow as pa

    try:
        with file.open("rb") as source:
            yield from (_parquet if file.suffix == ".parquet" else _arrow)(source, column)
    except pa.ArrowException as error:
        raise DataError(f"{file.name} is not {file.suffix[1:]}, or damaged: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise DataError(f"{file.name} cannot be read: {error.strerror or error}") from error


def _parquet(source: Any, column: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(source) as file:
        yield from file.iter_batches(columns=_readable(file.schema_arrow, column), use_threads=False)


def _arrow(source: Any, column: str) -> Iterator[Any]:
    """Batches of a stream, which is how data sets are saved, or of a file with an index."""
    import pyarrow as pa

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        reader = pa.ipc.open_file(source)
        batches: Iterator[Any] = (reader.get_batch(k) for k in range(reader.num_record_batches))
    else:
        batches = iter(reader := pa.ipc.open_stream(source))
    names = _readable(reader.schema, column)
    yield from (batch.select(names) for batch in batches)


def _readable(schema: Any, column: str) -> Sequence[str]:
    names = [field.name for field in schema if not _has_bytes(field.type)]
    if column not in names:
        raise DataError(one_of("data.column", column, names))
    return names


def _has_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_has_bytes(kind.field(k).type) for k in range(kind.num_fields))
