"""How the weights of one version lie one after another in a run of bytes, and what is checked before any is taken.

Invariant: names, shapes, dtypes, version and number of bytes are compared with what a replica has before its first
parameter is written, so that weights which do not fit are an error that names them, with nothing half-loaded.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from digen.errors import SyncError
from digen.types import Version
from digen.weights.state import check_fit

ALIGNMENT = 64
"""Every tensor starts at a multiple of so many bytes, a cache line: any dtype can be viewed there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its bytes are `start` .. `end` - 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def end(self) -> int:
        return self.start + prod(self.shape) * self.type.itemsize


@dataclass(frozen=True)
class Layout:
    """The tensors of one version, in the order of their bytes."""

    version: Version
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, version: Version, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
        """Of these tensors, as they are or, if a dtype is given, cast to it."""
        entries, start = [], 0
        for name, tensor in tensors.items():
            shown = str(dtype or tensor.dtype).removeprefix("torch.")
            entries.append(Entry(name, shown, tuple(tensor.shape), start))
            start = _aligned(entries[-1].end)
        return cls(version, tuple(entries))

    @property
    def nbytes(self) -> int:
        """Of the whole run of bytes, gaps included."""
        return self.entries[-1].end if self.entries else 0

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Inverse of `as_json`. Raises SyncError for anything else."""
        try:
            read = json.loads(text)
            entries = [Entry(e["name"], e["dtype"], tuple(e["shape"]), e["start"]) for e in read["entries"]]
            return cls(read["version"], tuple(entries))
        except (ValueError, KeyError, TypeError) as error:
            raise SyncError(f"the list of published weights cannot be read: {type(error).__name__}: {error}") from error

    def check(self, version: Version, own: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        """Whether these are the weights of `version` and fit into `own`; `dtype` is what they may be cast to.

        Raises SyncError naming the tensors that are missing, extra, or of another shape or dtype.
        """
        if self.version != version:
            raise SyncError(f"asked for the weights of version {version}, found those of version {self.version}")
        check_fit(own, {entry.name: entry.shape for entry in self.entries})
        wrong = [
            f"{e.name} is {e.dtype}, expected {str(dtype or own[e.name].dtype).removeprefix('torch.')}"
            for e in self.entries
            if e.type != (dtype or own[e.name].dtype)
        ]
        if wrong:
            raise SyncError(f"cannot load weights of version {version}: {len(wrong)} wrong dtypes {wrong[:3]}")

    def check_size(self, nbytes: int, where: str) -> None:
        """Raises SyncError naming the first tensor that so many bytes do not hold."""
        cut = [entry for entry in self.entries if entry.end > nbytes]
        if cut:
            raise SyncError(
                f"{where} is truncated: {cut[0].name} of version {self.version} ends at byte {cut[0].end}, there are "
                f"{nbytes} ({len(cut)} of {len(self.entries)} tensors are not whole)"
            )

    def cuts(self, size: int) -> Iterator[tuple[int, int]]:
        """(first byte, end) of pieces of at most so many bytes: several tensors, or parts of one of over a quarter."""
        begin = 0
        for entry in self.entries:
            large = entry.end - entry.start > size // 4
            if begin < entry.start and (large or entry.end - begin > size):
                yield begin, entry.start
                begin = entry.start
            if large:
                yield from ((at, min(at + size, entry.end)) for at in range(entry.start, entry.end, size))
                begin = _aligned(entry.end)
        if begin < self.nbytes:
            yield begin, self.nbytes

    def pack(self, tensors: Mapping[str, Tensor], piece: Tensor, start: int = 0) -> None:
        """Copy from the tensors into `piece`, a uint8 tensor whose first element is the run's byte `start`."""
        for entry, low, high in self._within(start, start + piece.numel()):
            source = tensors[entry.name].detach().reshape(-1)
            copy(piece[low - start : high - start].view(entry.type), source[_elements(entry, low, high)])

    def unpack(self, piece: Tensor, into: Mapping[str, Tensor], start: int = 0) -> None:
        """Copy from such a piece into the tensors, which are contiguous."""
        for entry, low, high in self._within(start, start + piece.numel()):
            target = into[entry.name].detach().view(-1)
            copy(target[_elements(entry, low, high)], piece[low - start : high - start].view(entry.type))

    def slot(self, into: Mapping[str, Tensor], start: int, end: int) -> Tensor | None:
        """The very bytes of the tensor that this piece is a part of; None if it is no part of one, or must be cast."""
        (entry, low, high), *more = self._within(start, end)
        target = into[entry.name].detach()
        if more or (low, high) != (start, end) or target.dtype != entry.type or not target.is_contiguous():
            return None
        return target.view(-1)[_elements(entry, low, high)].view(torch.uint8)

    def _within(self, start: int, stop: int) -> Iterator[tuple[Entry, int, int]]:
        """Entries with their first byte, and the one after their last, in `start` .. `stop`."""
        for number in range(max(0, bisect_right(self._starts, start) - 1), len(self.entries)):
            entry = self.entries[number]
            if entry.start >= stop:
                return
            low, high = max(entry.start, start), min(entry.end, stop)
            if low < high:
                yield entry, low, high

    @cached_property
    def _starts(self) -> list[int]:
        return [entry.start for entry in self.entries]


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _elements(entry: Entry, low: int, high: int) -> slice:
    """Which elements of the flat tensor the run's bytes `low` .. `high` are."""
    size = entry.type.itemsize
    return slice((low - entry.start) // size, (high - entry.start) // size)


def copy(into: Tensor, source: Tensor) -> None:
    """Copy to a tensor of the same shape, on any device and of any dtype; within host memory as fast as it can be."""
    into, source = into.detach(), source.detach()
    plain = into.device.type == source.device.type == "cpu" and into.dtype == source.dtype
    if plain and into.is_contiguous() and source.is_contiguous():
        np.copyto(_bytes(into), _bytes(source))  # the C library's memcpy; torch's own is a third slower
    else:
        into.copy_(source)


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tensor.reshape(-1).view(torch.uint8).numpy()
