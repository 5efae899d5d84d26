"""Weights in files of the run's folder in shared memory, mapped by both sides: all processes of one host.

Invariant: a file is written only while no ticket stands for it, or by the thread of the `push` that made the ticket;
behind the weights it says how many bytes are there, and nobody reads further. Files are used again for later versions:
new memory must be zeroed and mapped page by page, which takes longer than the copy. They go with the run's folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.errors import DigenError, SyncError
from digen.weights.base import Ticket, WeightTransport
from digen.weights.layout import Layout

PIECE = 1 << 22
"""Bytes that are copied between two looks at how far the other side is."""
POLL_S = 0.0002
PROGRESS = 16
"""Bytes at the end of a file: how many others are there, and how many of them some replica has."""
MOST_SPARE = 1
"""Files that wait for the next version while no ticket stands for them."""


def _file_size(layout: Layout) -> int:
    return -(-layout.nbytes // 8) * 8 + PROGRESS


def _progress(file: Tensor) -> Tensor:
    return file[-PROGRESS:].view(torch.int64)


class SharedMemoryTransport(WeightTransport):
    """Memory that all processes of one host map."""

    sends_beside = True

    def __init__(self, config: RunConfig[Any], context: WorkerContext) -> None:
        super().__init__(config, context)
        self.mapped: dict[str, Tensor] = {}
        """By the name of the file; both sides keep their mappings."""
        self.spare: list[str] = []

    @property
    def folder(self) -> Path:
        if self.context.shared_dir is None:
            raise SyncError("weights.transport=shared_memory needs workers that are processes of one host")
        return self.context.shared_dir

    def place(self, layout: Layout) -> Ticket:
        name = self._free_file(_file_size(layout))
        _progress(self._map(name)).zero_()
        return Ticket(layout, name)

    def send(self, ticket: Ticket, tensors: Mapping[str, Tensor]) -> None:
        file = self._map(ticket.where)
        progress = _progress(file)
        for start, end in ticket.layout.cuts(PIECE):
            ticket.layout.pack(tensors, file[start:end], start)
            progress[0] = end

    def receive(self, ticket: Ticket, into: Mapping[str, Tensor]) -> None:
        path = self.folder / ticket.where
        if not path.is_file():
            raise SyncError(f"the weights of version {ticket.layout.version} are gone: {path} does not exist")
        layout = ticket.layout
        layout.check_size(path.stat().st_size - PROGRESS, str(path))
        file = self._map(ticket.where)
        progress = _progress(file)
        for start, end in layout.cuts(PIECE):
            self._wait(progress, end, ticket)
            layout.unpack(file[start:end], into, start)
        progress[1] = layout.nbytes

    def arrived(self, ticket: Ticket) -> bool:
        return int(_progress(self.mapped[ticket.where])[1]) == ticket.layout.nbytes

    def _wait(self, progress: Tensor, end: int, ticket: Ticket) -> None:
        limit = time.monotonic() + self.config.weights.timeout_s
        while int(progress[0]) < end:
            ticket.check_word()
            if time.monotonic() > limit:
                waited = f"{self.config.weights.timeout_s:g} s"
                raise SyncError(
                    f"of version {ticket.layout.version} the trainer has copied {int(progress[0])} bytes in {waited}"
                )
            time.sleep(POLL_S)

    def free(self, ticket: Ticket) -> None:
        self.spare.append(ticket.where)
        while len(self.spare) > MOST_SPARE:
            self._remove(self.spare.pop(0))

    def close(self) -> None:
        super().close()
        while self.spare:
            self._remove(self.spare.pop())
        self.mapped.clear()

    def _free_file(self, nbytes: int) -> str:
        """The name of a file of this size that nobody reads. Raises DigenError when there is no memory for one."""
        for name in self.spare:
            if self.mapped[name].numel() == nbytes:
                self.spare.remove(name)
                return name
        name = f"weights-{self.context.group}-{secrets.token_hex(4)}"
        try:
            with (self.folder / name).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full memory would kill whoever writes to it
        except OSError as error:
            self._remove(name)
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(self.folder).free
            raise DigenError(
                f"{self.folder} is full: weights need {nbytes} bytes, {free} are free. Enlarge {self.folder.parent} "
                "(in a container: its shared memory size), or set weights.transport"
            ) from error
        return name

    def _map(self, name: str) -> Tensor:
        """The file as a uint8 tensor; mappings of files that are gone are given up."""
        for other in [known for known in self.mapped if not (self.folder / known).exists()]:
            del self.mapped[other]
        if name not in self.mapped:
            path = self.folder / name
            self.mapped[name] = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        return self.mapped[name]

    def _remove(self, name: str) -> None:
        self.mapped.pop(name, None)
        (self.folder / name).unlink(missing_ok=True)
