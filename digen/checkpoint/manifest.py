"""A checkpoint as a folder: whole or not there, checked before it is used, and not kept for ever.

Invariant: a folder named `step_<version>` with a manifest got that name when every file in it was on the disk (rule
R20); nothing else is taken for a checkpoint. The files of a folder are listed in docs/resume.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, Final

from digen.errors import CheckpointError
from digen.observe.files import synced, write_atomic
from digen.types import Version

MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
CONFIG: Final = "config.yaml"
PREVIOUS: Final = "previous"
"""Folder of the weights that stale samples of the coming steps were made under (TCSS)."""
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A file that is on the disk. `name` is relative to the checkpoint's folder."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote of a checkpoint, or why it could not."""

    files: tuple[Record, ...] = ()
    problem: str | None = None


def version_of(path: Path) -> Version | None:
    """The version that a folder's name says; None when it is no checkpoint's name."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """The folders in `folder` that are named as checkpoints are, the newest first, whole or not."""
    found = {path: version for path in folder.glob("step_*") if (version := version_of(path)) is not None}
    return sorted(found, key=found.__getitem__, reverse=True)


def seal(aside: Path, path: Path, files: Sequence[Record], texts: Mapping[str, str]) -> None:
    """Make what was written to the folder `aside` the checkpoint `path`. Raises OSError."""
    small = []
    for name, text in texts.items():
        write_atomic(aside / name, text)
        small.append(_recorded(aside / name, name))
    records = [asdict(record) for record in (*files, *small)]
    write_atomic(aside / MANIFEST, json.dumps({"format": FORMAT, "files": records}, indent=1) + "\n")
    for folder in {aside, *((aside / record.name).parent for record in files)}:
        synced(folder)
    if path.exists():  # one that turned out to be broken, or that an earlier run left
        path.rename(path.with_name(f".{aside.name.strip('.')}.replaced"))
    aside.rename(path)
    synced(path.parent)


def _recorded(path: Path, name: str) -> Record:
    with path.open("rb") as file:
        return Record(name, path.stat().st_size, file_digest(file, "sha256").hexdigest())


def records(path: Path) -> list[Record]:
    """The files of a checkpoint. Raises CheckpointError when the manifest is missing or is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path / MANIFEST}: format {manifest['format']!r}; allowed: {FORMAT}")
        return [_inside(path, Record(**record)) for record in manifest["files"]]
    except FileNotFoundError:
        what = f"it has no {MANIFEST}: weights alone are for --init-from, and for no exact resume"
        raise CheckpointError(f"{path}: {what}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error


def _inside(path: Path, record: Record) -> Record:
    """A checkpoint may be of others: what it lists must lie in its folder. Raises ValueError."""
    name = Path(record.name)
    if name.is_absolute() or ".." in name.parts or not isinstance(record.nbytes, int):
        raise ValueError(f"{record.name!r}, of {record.nbytes!r} bytes, is no file in {path}")
    return record


def check(path: Path, *, contents: bool = True) -> None:
    """Raises CheckpointError naming the first file that is missing, too short or changed (`contents`: reads all)."""
    listed = records(path)
    for record in listed:
        _check_size(path / record.name, record)
    if contents:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for _ in threads.map(lambda record: _check_content(path / record.name, record), listed):
                pass


def _check_size(path: Path, record: Record) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if size != record.nbytes:
        raise CheckpointError(f"{path} is damaged: {size} bytes of {record.nbytes}")


def _check_content(path: Path, record: Record) -> None:
    try:
        now = _recorded(path, record.name)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if now.sha256 != record.sha256:
        raise CheckpointError(f"{path} is damaged: its checksum is {now.sha256[:12]}, expected {record.sha256[:12]}")


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint have their size."""
    try:
        check(path, contents=False)
    except CheckpointError:
        return False
    return True


def saved(folder: Path) -> Version:
    """The version of the newest whole checkpoint; 0 when there is none."""
    return next((version_of(path) or 0 for path in checkpoints(folder) if is_whole(path)), 0)


def state(path: Path) -> dict[str, Any]:
    """What a checkpoint says of the run besides tensors. Raises CheckpointError."""
    try:
        found = json.loads((path / STATE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path / STATE}: expected an object")
    return found


def rotate(folder: Path, keep: int | None, best: str | None) -> None:
    """Delete all checkpoints but the newest `keep` whole ones and, of all, the one whose row has the largest `best`.

    None of them is deleted when `keep` is None. What was never finished or was replaced is deleted in any case.
    """
    for path in (*folder.glob(".step_*.partial"), *folder.glob(".step_*.replaced")):
        shutil.rmtree(path, ignore_errors=True)
    if keep is None:
        return
    whole = [path for path in checkpoints(folder) if is_whole(path)]
    kept = {*whole[:keep], *_best(whole, best)}
    for path in whole:
        if path not in kept:
            with suppress(OSError):  # without its name it is no checkpoint, whatever is left of it
                gone = path.rename(path.with_name(f".{path.name}.replaced"))
                shutil.rmtree(gone, ignore_errors=True)


def _best(whole: Sequence[Path], metric: str | None) -> Iterator[Path]:
    """The checkpoint with the largest value, the newest of equal ones."""
    values = {path: row[metric] for path in whole if metric and (row := state(path)["row"]).get(metric) is not None}
    if values:
        yield max(values, key=values.__getitem__)
