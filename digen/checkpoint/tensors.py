"""Tensors in files of which every rank writes its part, and of which any number of ranks read what they need.

Invariant: a file is plain safetensors, nothing in it is ever unpickled (rule R19); its header says where each part lies
in the whole, so that who wrote it, and how many they were, does not matter to who reads it. It says so as the headers
of torch.distributed.checkpoint do: either reads what the other wrote (why both: docs/design/checkpoints.md).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from digen.checkpoint.manifest import Record
from digen.errors import CheckpointError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes in a safetensors header."""
PLACES = "DCP_SHARDING_INFO"
"""Entry of a header: name -> where the part lies ("saved_offsets") and, which is ours, the "shape" of the whole."""
CHUNK = 1 << 24
"""Bytes that are hashed and written at a time."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of a tensor: `local` lies at `offsets` in a whole of this shape."""

    local: Tensor
    shape: Shape
    offsets: Shape


def piece(tensor: Tensor, rank: int) -> Piece | None:
    """A copy, on the CPU, of what this rank is to write; None when another rank has the same, or there is nothing.

    Of a plain tensor that is all of it, and rank 0 writes it. Raises ValueError for a tensor without elements.
    """
    if not tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no elements")
    if not isinstance(tensor, DTensor):
        return Piece(copied(tensor), tuple(tensor.shape), (0,) * tensor.ndim) if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate() or ()
    again = any(at > 0 for at, how in zip(coordinate, tensor.placements, strict=True) if isinstance(how, Replicate))
    local = tensor.to_local()
    if again or not local.numel():
        return None
    return Piece(copied(local), tuple(tensor.shape), _region(tensor)[0])


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that training does not change."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _region(like: DTensor) -> tuple[Shape, Shape]:
    """(offsets, sizes) of this rank's part."""
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(offsets), tuple(sizes)


def write(folder: Path, name: str, pieces: Mapping[str, Piece]) -> Record:
    """The safetensors file `name` in `folder`, fsynced. Raises OSError."""
    header, buffers = _laid_out(pieces)
    digest, size = sha256(), 0
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for part in (memoryview(header), *buffers):
            for start in range(0, len(part), CHUNK):
                digest.update(part[start : start + CHUNK])
                file.write(part[start : start + CHUNK])
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return Record(name, size, digest.hexdigest())


def _laid_out(pieces: Mapping[str, Piece]) -> tuple[bytes, list[memoryview]]:
    """Header and tensors of a safetensors file. The format: huggingface.co/docs/safetensors."""
    names = sorted(pieces, key=lambda name: (-pieces[name].local.element_size(), name))  # keeps every tensor aligned
    places = {name: {"saved_offsets": pieces[name].offsets, "shape": pieces[name].shape} for name in names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", PLACES: json.dumps(places)}}
    end = 0
    for name in names:
        local = pieces[name].local
        start, end = end, end + local.nbytes
        header[name] = {"dtype": CODES[local.dtype], "shape": list(local.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    buffers = [pieces[name].local.reshape(-1).view(torch.uint8).numpy().data for name in names]
    return struct.pack("<Q", len(text)) + text, buffers


class Pieces:
    """The tensors of one or more files, read whole or in part. Raises CheckpointError for what is no such file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.shapes: dict[str, Shape] = {}
        """Of the whole tensors, by name."""
        self._where: dict[str, list[tuple[Any, Shape]]] = {}
        for path in sorted(paths):
            try:
                file: Any = safe_open(path, framework="pt")
                places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    own, place = file.get_slice(name).get_shape(), places.get(name, {})
                    offsets = tuple(place.get("saved_offsets", [0] * len(own)))
                    ends = place.get("shape", [at + size for at, size in zip(offsets, own, strict=True)])
                    self.shapes[name] = tuple(map(max, self.shapes.get(name, ends), ends))
                    self._where.setdefault(name, []).append((file, offsets))
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    def whole(self, name: str) -> Tensor:
        """The tensor of this name, on the CPU."""
        return self.part(name, (0,) * len(self.shapes[name]), self.shapes[name])

    def like(self, name: str, like: Tensor) -> Tensor:
        """The tensor of this name, laid out over ranks as `like` of the same shape is; whole where that is not."""
        if not isinstance(like, DTensor) or self.shapes[name] != tuple(like.shape):
            return self.whole(name)
        local = self.part(name, *_region(like)).to(like.device)
        return DTensor.from_local(  # no message: each rank reads what it has
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def part(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        """The region of these sizes at these offsets, on the CPU. CheckpointError when files do not cover it once."""
        found = list(self._overlapping(name, offsets, sizes))
        if len(found) == 1 and found[0][1].shape == sizes:
            return found[0][1]
        if sum(part.numel() for _, part in found) != prod(sizes):
            raise CheckpointError(f"{name}: parts of it are missing or come twice; was a file added or removed?")
        dtype = found[0][1].dtype if found else torch.float32
        out = torch.empty(sizes, dtype=dtype)
        for where, part in found:
            out[where] = part
        return out

    def _overlapping(self, name: str, offsets: Shape, sizes: Shape) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """(where in the region, tensor) of every piece that has a part of it."""
        for file, at in self._where[name]:
            part = file.get_slice(name)
            own = part.get_shape()
            if not own:
                yield (), file.get_tensor(name)
                continue
            lows = [max(a, b) for a, b in zip(at, offsets, strict=True)]
            highs = [min(a + n, b + m) for a, n, b, m in zip(at, own, offsets, sizes, strict=True)]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                yield _slices(lows, highs, offsets), part[_slices(lows, highs, at)]


def _slices(lows: Sequence[int], highs: Sequence[int], origin: Shape) -> tuple[slice, ...]:
    return tuple(slice(low - o, high - o) for low, high, o in zip(lows, highs, origin, strict=True))
