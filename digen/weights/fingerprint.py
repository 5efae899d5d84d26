"""The proof that a replica has the trainer's weights: both sides hash what they hold (rule R15).

Invariant: equal bits give equal text on every device, whatever the tensors are stored in; of what is looked at, any
single changed bit changes the text. Looked at is everything in small sets and where no line is asked for; else one
line of 512 bytes in every 512 KiB, another one with every version: a pass over all bytes costs more than their copy,
and transports move pieces of 4 MiB, or whole tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from digen.types import Version

BLOCK, LINE = 1 << 19, 512
"""Bytes. What a line costs is the wait for its first byte, so a few long ones are cheaper than many short ones."""
NUM_LINES = BLOCK // LINE
SMALL = 1 << 24
"""Bytes up to which a set of tensors is always looked at as a whole."""
PIECE = 1 << 15
"""Words of 8 bytes that make one sum: 256 KiB, which stay in a core's cache."""
BATCH = 64
"""Pieces that a GPU sums at a time."""
ALL = "all"


def line_of(version: Version) -> int:
    """Which line of every block is looked at in weights of this version: after 1024 versions each had its turn."""
    return version % NUM_LINES


def fingerprint(tensors: Mapping[str, Tensor], line: int | None = None, dtype: torch.dtype | None = None) -> str:
    """`<line>-<hash>` of names, shapes, dtypes and bits, computed where the tensors are; None: `all-<hash>`.

    `dtype`: what the tensors are cast to first, if they are not sent as they are.
    """
    if sum(t.numel() * (dtype or t.dtype).itemsize for t in tensors.values()) <= SMALL:
        line = None
    digest = hashlib.blake2b(digest_size=16)
    same: dict[torch.dtype, list[Tensor]] = {}
    for name in sorted(tensors):
        kind = dtype or tensors[name].dtype
        digest.update(f"{name} {tuple(tensors[name].shape)} {kind};".encode())
        same.setdefault(kind, []).append(tensors[name].detach().contiguous())
    parts = ((part, kind) for kind, found in same.items() for part in _looked_at(found, kind.itemsize, line))
    sums = [total for part, kind in parts for total in _sums(_words(part.to(kind)))]
    if sums:
        numbers = torch.cat(sums).tolist()
        digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return f"{ALL if line is None else line}-{digest.hexdigest()}"


def fingerprint_like(other: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """The fingerprint of these tensors that looks at what `other` has looked at."""
    line = other.partition("-")[0]
    return fingerprint(tensors, None if line == ALL else int(line), dtype)


def _looked_at(tensors: Iterable[Tensor], size: int, line: int | None) -> Iterator[Tensor]:
    """Flat tensors of what is looked at: everything, or that line of every block, or the end where there is none.

    `size`: bytes of an element as it is sent.
    """
    if line is None:
        yield from _joined(tensors)
        return
    width, block, first = LINE // size, BLOCK // size, line * (LINE // size)
    lines: list[Tensor] = []
    short: list[Tensor] = []
    for tensor in tensors:
        count, begin = tensor.numel(), tensor.storage_offset()
        if count < width:
            short.append(tensor.view(-1))
            continue
        num = (count - first - width) // block + 1
        if num:
            lines.append(tensor.as_strided((num, width), (block, 1), begin + first))
        if line == 0 or not num:
            lines.append(tensor.as_strided((1, width), (width, 1), begin + count - width))
    for views in filter(None, (lines, short)):
        yield torch.cat(views).view(-1)


def _joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same elements, small tensors together, for a thousand small adapters are usual."""
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.numel() >= PIECE:
            yield tensor.view(-1)
            continue
        waiting.append(tensor.view(-1))
        size += tensor.numel()
        if size >= PIECE:
            yield torch.cat(waiting)
            waiting, size = [], 0
    if waiting:
        yield torch.cat(waiting)


def _words(part: Tensor) -> Tensor:
    """The bits of a flat tensor as words of 8 bytes, the last one filled up with zeros."""
    data = part.view(torch.uint8)
    if data.numel() % 8:
        data = torch.cat([data, data.new_zeros(-data.numel() % 8)])
    return (data.clone() if data.storage_offset() % 8 else data).view(torch.int64)


def _sums(words: Tensor) -> Iterator[Tensor]:
    """One number for each piece: its words, weighted by their place, summed with 64-bit wrap-around."""
    weights, end = _weights(words.device), words.numel() // PIECE * PIECE
    batch = BATCH if words.is_cuda else 1
    pieces = words[:end].view(-1, PIECE)
    products = torch.empty_like(pieces[:batch])
    for first in range(0, len(pieces), batch):
        some = pieces[first : first + batch]
        yield torch.mul(some, weights, out=products[: len(some)]).sum(1)
    if end < words.numel():
        yield (words[end:] * weights[: words.numel() - end]).sum().view(1)


@cache
def _weights(device: torch.device) -> Tensor:
    # Odd weights: multiplication by an odd number loses no bit modulo 2^64.
    return torch.arange(PIECE, dtype=torch.int64, device=device).mul_(2654435761).bitwise_or_(1)
