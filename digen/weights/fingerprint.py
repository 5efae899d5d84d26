"""The proof that a replica has the trainer's weights: both sides hash what they hold (rule R15).

Invariant: equal bits give equal text on every device, whatever the tensors are stored in. A whole fingerprint has
looked at every byte: a single changed bit always changes it, any other change but for a chance of 2^-64. It takes
longer than a copy of the weights, so it is taken beside other work; what is taken at once, a glance, looks at a few
dozen places, others with every version, and takes a millisecond whatever there is.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from digen.types import Version

PLACES = 64
"""At which a glance looks: they lie evenly in all that there is."""
LINE = 512
"""Bytes that it looks at there; what takes time is the wait for the first of them."""
PIECE = 1 << 15
"""Words of 8 bytes that make one sum: 256 KiB, which stay in a core's cache."""
BATCH = 64
"""Pieces that a GPU sums at a time."""


def fingerprint(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Hash of names, shapes, dtypes and all bits, computed where the tensors are.

    `dtype`: what the tensors are cast to first, if they are not sent as they are.
    """
    digest = hashlib.blake2b(digest_size=16)
    same: dict[torch.dtype, list[Tensor]] = {}
    for name in sorted(tensors):
        kind = dtype or tensors[name].dtype
        digest.update(f"{name} {tuple(tensors[name].shape)} {kind};".encode())
        same.setdefault(kind, []).append(tensors[name].detach().contiguous())
    _digest(digest, ((part, kind) for kind, found in same.items() for part in _joined(found)))
    return digest.hexdigest()


def glance(tensors: Mapping[str, Tensor], version: Version, dtype: torch.dtype | None = None) -> str:
    """Hash of what is at `PLACES` places: enough to see that these are not the weights of this version at all.

    Names, shapes and dtypes are compared before (`Layout.check`), and are not in it.
    """
    digest, ordered = hashlib.blake2b(digest_size=16), [tensors[name] for name in sorted(tensors)]
    for kind in [dtype] if dtype else sorted({tensor.dtype for tensor in ordered}, key=str):
        found = [tensor for tensor in ordered if dtype or tensor.dtype == kind]
        if lines := _lines(found, kind.itemsize, version):
            _digest(digest, [(torch.cat(lines), kind)])
    return digest.hexdigest()


@torch.no_grad()
def _lines(tensors: Sequence[Tensor], size: int, version: Version) -> list[Tensor]:
    """Flat parts of what these tensors are one after the other; `size`: bytes of an element as it is sent."""
    ends = list(accumulate(tensor.numel() for tensor in tensors))
    width = LINE // size
    lines = max(-(-ends[-1] // (width * PLACES)), 1)  # of which one is looked at
    found = []
    for start in range(version % lines * width, ends[-1], lines * width):
        at = bisect_right(ends, start)
        first = start - (ends[at - 1] if at else 0)
        found.append(tensors[at].reshape(-1)[first : first + width])  # less at the end of a tensor
    return found


def _digest(digest: hashlib.blake2b, parts: Iterable[tuple[Tensor, torch.dtype]]) -> None:
    sums = [total for part, kind in parts for total in _sums(_words(part.to(kind)))]
    if sums:
        numbers = torch.cat(sums).tolist()
        digest.update(struct.pack(f"<{len(numbers)}q", *numbers))


def _joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same elements, flat; small tensors together, for a thousand small adapters are usual."""
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
    """Two numbers for each piece: the sums, with 64-bit wrap-around, of its words times their place, plain and folded.

    The plain one sees each single bit; but two words whose highest bits have flipped leave it as it is. Products whose
    upper half is folded onto the lower one do not add up to nothing.
    """
    weights, end = _weights(words.device), words.numel() // PIECE * PIECE
    batch = BATCH if words.is_cuda else 1
    pieces = [words[:end].view(-1, PIECE)[first : first + batch] for first in range(0, end // PIECE, batch)]
    if end < words.numel():
        pieces.append(words[end:].view(1, -1))
    products, upper = words.new_empty(2, min(batch, end // PIECE) or 1, min(PIECE, words.numel()))
    for piece in pieces:
        rows, length = piece.shape
        product, half = products[:rows, :length], upper[:rows, :length]
        yield torch.mul(piece, weights[:length], out=product).sum(1)
        yield product.bitwise_xor_(torch.bitwise_right_shift(product, 32, out=half)).sum(1)


@cache
def _weights(device: torch.device) -> Tensor:
    # Odd weights: multiplication by an odd number loses no bit modulo 2^64.
    return torch.arange(PIECE, dtype=torch.int64, device=device).mul_(2654435761).bitwise_or_(1)
