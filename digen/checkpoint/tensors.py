"""Tensors in files of which every rank writes its part, and of which any number of ranks read what they need.

torch.distributed.checkpoint (DCP) saves and loads them: what a rank writes, and which slices of which files make up
what it reads. The files are ours.

Invariant: a file is plain safetensors, nothing in it is ever unpickled (rule R19); its header says where each part lies
in the whole, so that who wrote it, and how many they were, does not matter to who reads it. It says so as DCP's own
safetensors files do: either reads what the other wrote (why the files are ours: docs/design/checkpoints.md).
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

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

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
"""DCP says so at each `no_dist`: plans are not sent around (by pickle), because each rank knows its own."""


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
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(copied(local), tuple(tensor.shape), tuple(offsets))


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that training does not change."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class _Storage:
    """What DCP asks of every storage, and files do not need: they are laid out by whoever wrote them."""

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: object, **__: object) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def finish(self, metadata: Metadata, results: object) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003
        return True


@contextmanager
def _own_errors() -> Iterator[None]:
    """What was raised inside DCP, as it was raised: it wraps all of it in an exception that no `except` expects."""
    try:
        yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise cause from None


def _done(value: Any) -> Future[Any]:
    """What DCP waits for, there already."""
    done: Future[Any] = Future()
    done.set_result(value)
    return done


class _Plan(DefaultSavePlanner):
    """A rank writes its pieces, whatever the others do: `piece` left out what another rank has too."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(name, piece) for name, piece in self.state_dict.items()])

    def _item(self, name: str, piece: Piece) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.local.shape)
        about = TensorWriteData(chunk, TensorProperties(piece.local.dtype), torch.Size(piece.shape))
        return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=about)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # each file says itself what is in it

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        local: Tensor = self.state_dict[write_item.index.fqn].local
        return local


def write(folder: Path, name: str, pieces: Mapping[str, Piece]) -> Record:
    """The safetensors file `name` in `folder`, fsynced. Raises OSError."""
    file = _File(folder, name)
    with _own_errors():
        save(dict(pieces), storage_writer=file, planner=_Plan(flatten_state_dict=False), no_dist=True)
    return file.record


class _File(_Storage, StorageWriter):
    """One file, written beside what other threads do (DCP's own writer stops them while it copies all tensors)."""

    record: Record

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        header, buffers = _laid_out(plan, planner)
        digest, size, path = sha256(), 0, self.folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for part in (memoryview(header), *buffers):
                for start in range(0, len(part), CHUNK):
                    digest.update(part[start : start + CHUNK])
                    file.write(part[start : start + CHUNK])
                size += len(part)
            file.flush()
            os.fsync(file.fileno())
        self.record = Record(self.name, size, digest.hexdigest())
        return _done([])


def _laid_out(plan: SavePlan, planner: SavePlanner) -> tuple[bytes, list[memoryview]]:
    """Header and tensors of a safetensors file. The format: huggingface.co/docs/safetensors."""
    pieces: list[tuple[Any, Any, Any]]
    pieces = [(item.index, item.tensor_data, planner.resolve_data(item)) for item in plan.items]
    pieces.sort(key=lambda found: (-found[2].element_size(), found[0].fqn))  # keeps every tensor aligned
    places = {index.fqn: {"saved_offsets": index.offset, "shape": about.size} for index, about, _ in pieces}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", PLACES: json.dumps(places)}}
    end = 0
    for index, _, local in pieces:
        start, end = end, end + local.nbytes
        header[index.fqn] = {"dtype": CODES[local.dtype], "shape": list(local.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    buffers = [local.reshape(-1).view(torch.uint8).numpy().data for _, _, local in pieces]
    return struct.pack("<Q", len(text)) + text, buffers


class Pieces(_Storage, StorageReader):
    """The tensors of one or more files, read whole or in part. Raises CheckpointError for what is no such file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.shapes: dict[str, Shape] = {}
        """Of the whole tensors, by name."""
        self._about: dict[str, TensorStorageMetadata] = {}
        self._files: dict[MetadataIndex, Any] = {}
        for path in sorted(paths):
            try:
                file: Any = safe_open(path, framework="pt")
                places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._add(file, name, **places.get(name, {}))
            except (OSError, SafetensorError, AttributeError, OverflowError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _add(self, file: Any, name: str, saved_offsets: Sequence[int] = (), shape: Shape = ()) -> None:
        part = file.get_slice(name)
        sizes = torch.Size(part.get_shape())
        offsets = torch.Size(saved_offsets or [0] * len(sizes))
        if MetadataIndex(name, offsets) in self._files or min(offsets, default=0) < 0:
            raise ValueError(f"a part of {name} comes twice, or lies at {tuple(offsets)}")
        ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
        self.shapes[name] = tuple(map(max, shape or ends, ends, self.shapes.get(name, ends)))
        dtype = (part[:0] if sizes else part[...]).dtype
        about = self._about.setdefault(name, TensorStorageMetadata(TensorProperties(dtype), sizes, []))
        about.size = torch.Size(self.shapes[name])
        about.chunks.append(ChunkStorageMetadata(offsets, sizes))
        self._files[MetadataIndex(name, offsets)] = file

    def whole(self, name: str) -> Tensor:
        """The tensor of this name, on the CPU. CheckpointError when files do not cover it once."""
        return self._read(name, lambda about: torch.empty(about.size, dtype=about.properties.dtype))

    def like(self, name: str, like: Tensor) -> Tensor:
        """The tensor of this name, laid out over ranks as `like` of the same shape is; whole where that is not.

        Each rank reads what it has, without a message. CheckpointError as for `whole`.
        """
        if not isinstance(like, DTensor) or self.shapes[name] != tuple(like.shape):
            return self.whole(name)
        return self._read(name, lambda about: torch.empty_like(like.detach(), dtype=about.properties.dtype))

    def _read(self, name: str, empty: Callable[[TensorStorageMetadata], Tensor]) -> Tensor:
        self._check(name)
        into = empty(self._about[name])
        with _own_errors():
            load({name: into}, storage_reader=self, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
        return into

    def _check(self, name: str) -> None:
        """DCP would read the parts that are there, and leave the rest of a tensor as it was."""
        if sum(prod(chunk.sizes) for chunk in self._about[name].chunks) != prod(self.shapes[name]):
            raise CheckpointError(f"{name}: parts of it are missing or come twice; was a file added or removed?")

    def read_metadata(self) -> Metadata:
        return Metadata(dict(self._about))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for name in {item.storage_index.fqn for item in plan.items}:
            self._check(name)
        for item in plan.items:
            where = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
            part = self._files[item.storage_index].get_slice(item.storage_index.fqn)[where or ...]
            into = planner.resolve_tensor(item).detach()
            into.copy_(part)
            planner.commit_tensor(item, into)
        return _done(None)
