"""Where tensors wait between two workers: `MemoryStore` in one process, `SharedStore` between processes of one host.

Invariant: a key is written once, whole or not at all, and what is read back is bit-equal to what was put. Keys of a
worker that was started again never equal those of the one before (`Prefixed`). The driver can drop without torch (it is
imported where tensors are). A run's folder goes when the run ends; that of a killed run goes when the next one starts:
a run locks the `pid` file in its folder, and the kernel gives up a dead process's lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from digen.errors import DigenError
from digen.types import Ref

if TYPE_CHECKING:
    import torch

    from digen.engines.base import TensorStore


class MemoryStore:
    """A dictionary, for workers that are threads of one process. Nothing is copied: what you get is to be read only."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, torch.Tensor]] = {}

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Ref:
        """Store under a new key. ValueError when the key is taken."""
        held = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        if self._held.setdefault(key, held) is not held:
            raise _taken(key)
        return Ref(key, _nbytes(held))

    def get(self, ref: Ref) -> dict[str, torch.Tensor]:
        """The tensors of `ref`. KeyError when dropped or never stored."""
        try:
            return dict(self._held[ref.key])
        except KeyError:
            raise _absent(ref.key) from None

    def has(self, ref: Ref) -> bool:
        """Whether it is stored and was not dropped."""
        return ref.key in self._held

    def drop(self, ref: Ref) -> None:
        """Free the memory, once nobody reads it any more."""
        self._held.pop(ref.key, None)

    def clear(self) -> None:
        """Free everything."""
        self._held.clear()


@dataclass(frozen=True, slots=True)
class SharedStore:
    """One safetensors file per key in `folder` (made by `shared_folder`); pickles, and means the same in every process.

    Reading maps the file: no copy, and writing to what was read reaches nobody else. Mapped tensors outlive a `drop`.
    """

    folder: Path

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Ref:
        """Store under a new key. ValueError when the key is taken, DigenError when there is no space left."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        nbytes = _nbytes(tensors)
        if shutil.disk_usage(self.folder).free < nbytes:
            raise self._full(key, nbytes)
        temp = self.folder / f"{secrets.token_hex(8)}.tmp"
        try:
            save_file(_apart(tensors), temp)
            os.link(temp, self._path(key))  # unlike a rename, this refuses a name that is taken
        except FileExistsError:
            raise _taken(key) from None
        except (OSError, SafetensorError) as error:
            if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
                raise self._full(key, nbytes) from error
            raise
        finally:
            temp.unlink(missing_ok=True)
        return Ref(key, nbytes)

    def get(self, ref: Ref) -> dict[str, torch.Tensor]:
        """The tensors of `ref`, mapped. KeyError when dropped or never stored."""
        from safetensors import safe_open

        try:
            with safe_open(self._path(ref.key), framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except FileNotFoundError:
            raise _absent(ref.key) from None

    def has(self, ref: Ref) -> bool:
        """Whether it is stored and was not dropped."""
        return self._path(ref.key).is_file()

    def drop(self, ref: Ref) -> None:
        """Free the memory, once nobody reads it any more."""
        self._path(ref.key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{quote(key, safe='')}.safetensors"

    def _full(self, key: str, nbytes: int) -> DigenError:
        free = shutil.disk_usage(self.folder).free
        return DigenError(
            f"the tensor store {self.folder} is full: {key!r} needs {nbytes} bytes, {free} are free. Use smaller "
            f"micro-batches or enlarge {self.folder.parent} (in a container: its shared memory size)"
        )


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A store as a worker sees it that takes the place of a lost one: its own keys all begin with `prefix`."""

    store: TensorStore
    prefix: str

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Ref:
        return self.store.put(key if key.startswith(self.prefix) else self.prefix + key, tensors)

    def get(self, ref: Ref) -> dict[str, torch.Tensor]:
        return self.store.get(ref)

    def has(self, ref: Ref) -> bool:
        return self.store.has(ref)

    def drop(self, ref: Ref) -> None:
        self.store.drop(ref)


def new_folder(parent: Path | None = None) -> Path:
    """A name `digen-<pid>-<random>` for the folder of a run, in `parent`, else shared memory, else the temp folder."""
    memory = Path("/dev/shm")  # noqa: S108 (the folder gets a random name and mode 0700)
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    parent = parent or (memory if usable else Path(tempfile.gettempdir()))
    return parent / f"digen-{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def shared_folder(folder: Path) -> Iterator[None]:
    """Make `folder` and remove it at the end, whatever happens; first remove the folders of runs that were killed."""
    remove_stale(folder.parent)
    unlocked = folder.with_name(f".{folder.name}")  # not yet to be found by another run that removes stale folders
    unlocked.mkdir(mode=0o700)
    try:
        with (unlocked / "pid").open("w") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marker.write(f"{os.getpid()}\n")
            marker.flush()
            unlocked.rename(folder)
            yield
    finally:
        shutil.rmtree(unlocked, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove the run folders in `parent` that no living process has locked, as far as they are ours to remove."""
    for folder in parent.glob("digen-*-*"):
        with suppress(OSError), (folder / "pid").open() as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Dense CPU tensors of which no two share memory, as the file format wants them; copies only where needed."""
    apart: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        address = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if address in seen else dense
        seen.add(address)
    return apart


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _taken(key: str) -> ValueError:
    return ValueError(f"the tensor store has {key!r} already; every put needs a new key")


def _absent(key: str) -> KeyError:
    return KeyError(f"the tensor store has no {key!r}: it was dropped, or never stored")
