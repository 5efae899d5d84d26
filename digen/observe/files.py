"""The run folder: what a run writes, where, and how it is read back.

Invariant: a file that is written whole is there whole or not at all (rule R20); a log file is a sequence of whole
lines; a full disk costs lines of a log, never the run (one warning says so).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final, get_args

from digen.errors import ConfigError, DataError
from digen.observe.base import StepRow
from digen.types import Decision, Span, SpanKind

ABOUT: Final = "digen.json"
"""In an exported folder: what it holds, and the config of its run."""
Warn = Callable[[str], None]
"""Where a sink says that it could not write; usually the terminal's `on_note`."""

log = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; takes `path`'s place, fsynced, when the block ends well (rule R20).

    When the block raises, the old file is untouched and the temporary one is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        synced(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    synced(path.parent)


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder. Nobody else may write there."""
    for left in folder.rglob(".*.tmp"):
        left.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: temporary file, fsync, rename (rule R20). Text is UTF-8. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def synced(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendFile:
    """A log file: what is appended is with the operating system when `append` returns, whole or not at all.

    It never raises for a full or unwritable disk: the data is lost, one warning says so, the next append tries again.
    """

    def __init__(self, path: Path, warn: Warn = log.warning) -> None:
        self.path = path
        self._warn = warn
        self._warned = False
        self._file: FileIO | None = None

    def append(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = FileIO(self.path, "a")
            end = os.fstat(self._file.fileno()).st_size
            self._write(self._file, data, end)
        except OSError as error:
            if not self._warned:
                self._warn(f"{self.path} cannot be written ({error.strerror or error}); training goes on without it")
            self._warned = True

    @staticmethod
    def _write(file: FileIO, data: bytes, end: int) -> None:
        """Write all of `data`, or cut the file back to `end` bytes: half a line would spoil the next one as well."""
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise

    def close(self) -> None:
        """Close the file; it may be called twice."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`runs/<time>-<algorithm>-<model>/` and the names inside it (docs/metrics.md lists them)."""

    path: Path

    @classmethod
    def create(cls, path: Path | None, algorithm: str, model: str, *, root: Path = Path("runs")) -> RunFolder:
        """Make a new run folder: `path` as given, or one under `root` named by time, algorithm and model.

        Raises ConfigError when `path` already holds a run or cannot be made.
        """
        folder = cls(path) if path is not None else cls(_unused(root, f"{algorithm}-{model}"))
        if folder.is_run:
            raise ConfigError(f"run_dir: {folder.path} already holds a run; choose another folder or remove it")
        try:
            for part in (folder.logs, folder.samples, folder.checkpoints):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir: {folder.path} cannot be made: {error.strerror or error}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run. Raises ConfigError when `path` is none."""
        folder = cls(path)
        if not folder.is_run and (path / ABOUT).is_file():
            what = "an export has weights alone; --init-from RUN begins a new run from those of the run that it is of"
            raise ConfigError(f"{path} is not a run folder: {what}")
        if not folder.is_run:
            raise ConfigError(f"{path} is not a run folder: it has no {folder.config.name}")
        return folder

    @property
    def is_run(self) -> bool:
        return any(part.exists() for part in (self.config, self.metrics, self.events))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def decisions(self) -> Path:
        return self.path / "decisions.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def sample_grid(self, step: int) -> Path:
        """Where the PNG with samples of a step goes; names sort in step order."""
        return self.samples / f"step_{step:06d}.png"

    def checkpoint(self, version: int) -> Path:
        """The folder of the weights of a version; names sort in step order."""
        return self.checkpoints / f"step_{version:06d}"

    def newest_checkpoint(self) -> Path:
        """The folder of the latest version with weights. Raises ConfigError when there is none."""
        found = {
            int(match[1]): path.parent
            for path in self.checkpoints.glob("*/weights.safetensors")
            if (match := re.fullmatch(r"step_(\d+)", path.parent.name))
        }
        if not found:
            raise ConfigError(f"{self.path} has no checkpoint; a run writes one when it ends")
        return found[max(found)]


def _unused(root: Path, name: str) -> Path:
    """Claim a folder under `root` by making it: two runs of the same second get two folders."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._]+', '-', name)}"
    for attempt in range(1, 1000):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror or error}") from error
        return path
    raise ConfigError(f"run_dir: {root / stem} and its successors are all taken")


class JsonlObserver:
    """Writes lines: `metrics.jsonl` (steps), `events.jsonl` (spans), `decisions.jsonl`, `logs/driver.log` (notes)."""

    def __init__(self, folder: RunFolder, warn: Warn = log.warning) -> None:
        self._metrics = AppendFile(folder.metrics, warn)
        self._events = AppendFile(folder.events, warn)
        self._decisions = AppendFile(folder.decisions, warn)
        self._notes = AppendFile(folder.logs / "driver.log", warn)

    def on_span(self, span: Span) -> None:
        self._events.append(_line(asdict(span)))

    def on_decision(self, decision: Decision) -> None:
        self._decisions.append(_line(asdict(decision)))

    def on_step(self, row: StepRow) -> None:
        self._metrics.append(_line({name: _json_number(value) for name, value in row.items()}))

    def on_note(self, message: str) -> None:
        self._notes.append(f"{datetime.now():%Y-%m-%d %H:%M:%S} {message}\n".encode())

    def close(self) -> None:
        for file in (self._metrics, self._events, self._decisions, self._notes):
            file.close()


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _json_number(value: float) -> float | int | None:
    """JSON has no NaN: null. numpy scalars become Python's own."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def read_rows(path: Path) -> list[dict[str, float | int]]:
    """The rows of a `metrics.jsonl` in step order; null is read as NaN; of two rows of one step the later counts.

    Raises DataError, naming the line, when a line is not a row; OSError when the file cannot be read.
    """
    rows: dict[int, dict[str, float | int]] = {}
    for number, record in _records(path):
        row = {name: math.nan if value is None else value for name, value in record.items()}
        if wrong := [name for name, value in row.items() if not (isinstance(value, float) or _is_whole(value))]:
            raise DataError(f"{path}:{number}: {wrong[0]!r} is no number")
        if not _is_whole(row.get("step")):
            raise DataError(f"{path}:{number}: a row of metrics needs the key 'step', a whole number")
        rows[int(row["step"])] = row
    return [rows[step] for step in sorted(rows)]


def read_spans(path: Path) -> list[Span]:
    """The spans of an `events.jsonl`, as written. Raises DataError (with the line) and OSError."""
    spans = []
    for number, record in _records(path):
        try:
            span = Span(**record)
        except TypeError as error:
            raise DataError(f"{path}:{number}: not a span: {error}") from error
        whole = (record["step"], record["index"], record["version"], record.get("rows", 0))
        names, times = (record["kind"], record["worker"]), (record["start"], record["end"])
        if not all([*map(_is_whole, whole), *map(_is_time, times), *(isinstance(name, str) for name in names)]):
            raise DataError(f"{path}:{number}: not a span: a value is of another type")
        if span.kind not in get_args(SpanKind):
            raise DataError(f"{path}:{number}: not a span: kind {span.kind!r}")
        spans.append(span)
    return spans


def read_decisions(path: Path) -> list[Decision]:
    """The decisions of a `decisions.jsonl`, as written. Raises DataError (with the line) and OSError."""
    decisions = []
    for number, record in _records(path):
        try:
            decision = Decision(**record)
        except TypeError as error:
            raise DataError(f"{path}:{number}: not a decision: {error}") from error
        times = (decision.at, 0.0 if decision.predicted_end is None else decision.predicted_end)
        if not (_is_whole(decision.step) and _is_whole(decision.rows) and all(map(_is_time, times))):
            raise DataError(f"{path}:{number}: not a decision: a value is of another type")
        decisions.append(decision)
    return decisions


LARGEST: Final = 1e18
"""Of any number that a run writes; beyond, arithmetic with floats fails."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and abs(value) < LARGEST


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file. A last line without its end is one that a killed run was writing."""
    with path.open(encoding="utf-8", errors="replace") as lines:  # what is no UTF-8 is then no JSON, or a wrong name
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                log.warning("%s:%d: the last line is cut short and is left out", path, number)
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected an object, got {type(record).__name__}")
            yield number, record
