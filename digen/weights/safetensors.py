"""Weights in a folder per version, on any file system that trainer and generators share.

Invariant: the marker `complete.json` is written last, after all else is on the disk (rule R20): a folder without it is
not there yet. What the files say of themselves is compared with a replica's tensors before the first one is written.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from digen.checkpoint.tensors import CODES
from digen.errors import ConfigError, SyncError
from digen.observe.files import synced, write_atomic
from digen.weights.base import Ticket, WeightTransport
from digen.weights.layout import Entry, Layout, copy

MARKER = "complete.json"
FILE_BYTES = 1 << 30
"""A file takes tensors until it has so many: the trainer holds the copies of one file at a time."""
POLL_S = 0.05
DTYPES = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}


class SafetensorsTransport(WeightTransport):
    """A folder of safetensors files for every version, on a file system that all workers share."""

    sends_beside = True

    def place(self, layout: Layout) -> Ticket:
        if self.config.weights.dir is None:
            raise ConfigError("weights.dir: got null; weights.transport=safetensors needs a folder all workers see")
        if not self.num_pushed:  # what is there is of a part of this run that was killed
            for old in self.config.weights.dir.glob("version-*"):
                shutil.rmtree(old)
        folder = self.config.weights.dir / f"version-{layout.version:06d}"
        folder.mkdir(parents=True)
        return Ticket(layout, str(folder))

    def send(self, ticket: Ticket, tensors: Mapping[str, Tensor]) -> None:
        folder, layout = Path(ticket.where), ticket.layout
        names = []
        for number, entries in enumerate(_files(layout)):
            names.append(f"weights-{number:05d}.safetensors")
            path = folder / names[-1]
            # A copy even on the CPU: tensors that share memory are refused.
            save_file(
                {e.name: tensors[e.name].detach().to("cpu", e.type, copy=True).contiguous() for e in entries}, path
            )
            synced(path)
        write_atomic(folder / MARKER, json.dumps({"version": layout.version, "files": names}) + "\n")

    def receive(self, ticket: Ticket, into: Mapping[str, Tensor]) -> None:
        folder, version = Path(ticket.where), ticket.layout.version
        marker = self._marker(folder, ticket)
        paths = [folder / name for name in marker["files"]]
        entries = [entry for path in paths for entry in _entries(path, marker["version"])]
        Layout(marker["version"], tuple(entries)).check(version, into, self.dtype)
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    copy(into[name], file.get_tensor(name))

    def free(self, ticket: Ticket) -> None:
        shutil.rmtree(ticket.where, ignore_errors=True)

    def close(self) -> None:
        super().close()
        if self.num_pushed and self.config.weights.dir:
            with suppress(OSError):  # there is more in it
                self.config.weights.dir.rmdir()

    def _marker(self, folder: Path, ticket: Ticket) -> Any:
        """What the marker says, once it is there. SyncError after `weights.timeout_s`, or when it will not be."""
        limit = time.monotonic() + self.config.weights.timeout_s
        while True:
            try:
                return json.loads((folder / MARKER).read_bytes())
            except FileNotFoundError:
                ticket.check_word()
                if time.monotonic() > limit:
                    waited = f"{self.config.weights.timeout_s:g} s"
                    raise SyncError(f"{folder} is not complete: no {MARKER} after {waited}") from None
                time.sleep(POLL_S)


def _files(layout: Layout) -> Iterator[list[Entry]]:
    """Tensors in order, file by file."""
    begun: list[Entry] = []
    for entry in layout.entries:
        if begun and entry.end - begun[0].start > FILE_BYTES:
            yield begun
            begun = []
        begun.append(entry)
    if begun:
        yield begun


BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file that is not what it should be may raise."""


def _entries(path: Path, version: int) -> tuple[Entry, ...]:
    """What a file says that it holds. Raises SyncError, naming the tensor, when it ends before it should."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        start = 8 + size
        found = tuple(
            Entry(name, DTYPES[e["dtype"]], tuple(e["shape"]), start + e["data_offsets"][0])
            for name, e in header.items()
        )
    except BROKEN as error:
        raise SyncError(f"{path} is no whole safetensors file: {type(error).__name__}: {error}") from error
    Layout(version, found).check_size(path.stat().st_size, str(path))
    return found
