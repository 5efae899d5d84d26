"""What text encoders made, on disk: shared by all workers and runs, so that an encoder runs once per prompt.

Invariant: what is found is bit for bit what the encoder would give here: the key covers everything that decides it
(`identity`). Files are safetensors, written whole or not at all; any number of processes may read, write and drop them
at once; a file that cannot be read counts as one that is not there (rules R19, R20).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from digen.models.base import Conditioning, ModelFamily
from digen.observe.files import write_atomic

log = logging.getLogger(__name__)

PATIENCE_S: Final = 300.0
"""How long to wait for another process that is at the same prompt; after that both encode it, which does no harm."""
_READ_WHOLE: Final = 1 << 20
"""Files up to this many bytes are known by their content, larger ones by place, size and time."""
_LEFT_OVER_S: Final = 3600.0
"""Age at which a half-written file is one that nobody is writing any more."""


def cache_dir() -> Path:
    """Where digen keeps what can be made again: `digen` in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "digen"


def identity(model: ModelFamily, device: str, dtype: torch.dtype) -> bytes:
    """A digest of all that decides what `model.encode` gives for a prompt.

    That is the adapter's source, the libraries, the encoders' and tokenizers' files, the model's settings, the dtype
    and what computes: the device's kind or, on CPUs, the number of threads.
    """
    sources = {sys.modules[kind.__module__].__file__ for kind in type(model).__mro__ if issubclass(kind, ModelFamily)}
    place = torch.device(device)
    facts = [
        *(Path(source).read_bytes() for source in sorted(filter(None, sources))),
        *(f"{name} {version(name)}".encode() for name in ("torch", "diffusers", "transformers", "tokenizers")),
        *_files(model),
        model.config.model_dump_json(exclude={"embedding_cache_gb"}).encode(),
        f"{type(model).__qualname__} {dtype}".encode(),
        (torch.cuda.get_device_name(place) if place.type == "cuda" else f"cpu {torch.get_num_threads()}").encode(),
    ]
    digest = blake2b(digest_size=16)
    for fact in facts:
        digest.update(len(fact).to_bytes(8, "little") + fact)
    return digest.digest()


def _files(model: ModelFamily) -> Iterator[bytes]:
    """Of every file of the encoders and tokenizers: its content, or of a large one its place, size and time.

    In the hub's cache a large file's place is named by its content.
    """
    root = Path(model.folder)
    for part in sorted(name for name in model.folders if name.startswith(model.encoding_parts)):
        for path in sorted(p for p in (root / part).rglob("*") if p.is_file()):
            about = path.stat()
            large = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()
            content = path.read_bytes() if about.st_size <= _READ_WHOLE else large
            yield f"{path.relative_to(root)} ".encode() + content


class Embeddings:
    """Conditioning by prompt, for one identity, in a folder that other identities share.

    limit: bytes of all files together; beyond it those that were used longest ago are dropped. Processes look at the
    sum now and then, so it may be exceeded by a sixteenth for each of them.
    """

    def __init__(self, folder: Path, made_by: bytes, limit: float) -> None:
        self.folder = folder
        self.limit = limit
        self._made_by = made_by
        self._unseen = float("inf")
        """Bytes written since the sum was looked at."""
        self._warned = False

    def path(self, prompt: str) -> Path:
        """Where the conditioning of a prompt is, if it is anywhere."""
        key = blake2b(prompt.encode("utf-8", "surrogatepass"), key=self._made_by, digest_size=20).hexdigest()
        return self.folder / key[:2] / f"{key}.safetensors"

    def get(self, prompt: str) -> Conditioning | None:
        """What was kept for a prompt; None: nothing that can be read. It counts as used now."""
        path = self.path(prompt)
        try:
            found = load_file(path)
            os.utime(path)
        except (OSError, SafetensorError) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("%s cannot be read (%s); the prompt is encoded again", path, error)
            return None
        return found

    def put(self, prompt: str, conditioning: Conditioning) -> None:
        """Keep it. A disk that is full or may not be written costs the entry, not the run; one warning says so."""
        path, content = self.path(prompt), save(conditioning)
        try:
            write_atomic(path, content)
            self._unseen += len(content)
            if self._unseen > self.limit / 16:
                self._unseen = 0.0
                self._trim()
        except OSError as error:
            if not self._warned:
                log.warning("embeddings cannot be kept in %s (%s); prompts are encoded anew", self.folder, error)
            self._warned = True

    def of(
        self, prompt: str, encode: Callable[[str], Conditioning], patience_s: float = PATIENCE_S
    ) -> Conditioning | None:
        """What was kept or, by one process at a time, is encoded and kept now.

        None: another process is at it and was still after `patience_s`, less than the usual.
        """
        if (found := self.get(prompt)) is not None:
            return found
        try:
            alone = self._alone(prompt, patience_s)
        except Timeout:
            if patience_s < PATIENCE_S:
                return None
            alone = nullcontext()
        with alone:
            if (found := self.get(prompt)) is None:
                self.put(prompt, found := encode(prompt))
        return found

    def _alone(self, prompt: str, patience_s: float) -> AbstractContextManager[object]:
        """Nobody else is in this block for the same prompt. Raises Timeout; a file system without locks has none."""
        lock = FileLock(self.folder / "locks" / f"{self.path(prompt).parent.name}.lock", thread_local=False)
        try:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            return lock.acquire(timeout=patience_s, poll_interval=0.01)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, Timeout):
                raise
            return nullcontext()

    def _trim(self) -> None:
        """Drop what was used longest ago, down to the limit, and what killed processes left half-written."""
        found = []
        for path in self.folder.glob("*/*"):
            with suppress(FileNotFoundError):  # another process drops files too
                about = path.stat()
                if path.suffix == ".safetensors":
                    found.append((about.st_mtime_ns, about.st_size, path))
                elif path.suffix == ".tmp" and about.st_mtime < time.time() - _LEFT_OVER_S:
                    path.unlink()
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size
