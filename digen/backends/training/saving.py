"""Checkpoints, the trainer's half: a copy of all that training changes, files of it, and back.

Invariant: what is written are copies, by a thread of its own, so that training goes on meanwhile; only what `seal`
renamed is a checkpoint (rule R20). Learning rate, noise, prompts and trained steps follow (seed, step) alone, so that
weights, their average and the optimizer's moments are all there is to save.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import digen
from digen import presets
from digen.backends.accumulation import AccumulatingWorker
from digen.backends.training.copies import OLD_POLICY, START, Copy
from digen.backends.training.options import Ema
from digen.checkpoint import manifest
from digen.checkpoint.manifest import PREVIOUS, Part, Record
from digen.checkpoint.tensors import Piece, Pieces, piece, write
from digen.errors import CheckpointError
from digen.observe.files import RunFolder, synced
from digen.trained import EMA, WEIGHTS
from digen.types import Version
from digen.weights.state import load_trainable, trainable

Files = dict[str, dict[str, Piece]]
"""Tensors by name, by the name of their file."""


class SavingTrainer(AccumulatingWorker, ABC):
    """A trainer that can be stopped at any step and go on later, with as many ranks as there then are."""

    optimizer: torch.optim.Optimizer
    ema: Ema | None
    old_policy: Copy | None
    """The policy that samples, where that is not the trained one."""
    start: Copy | None
    """What losses call the base, where that is not the model as it came."""
    writing: Writing | None = None
    """The checkpoint that is being written."""

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """This rank's parts of the trainable weights, as the optimizer steps them."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The trainable weights, whole, on rank 0 at least; called on all ranks."""

    def sampling_state(self) -> dict[str, Tensor]:
        """The weights that generators are given, as `state`."""
        return self.whole(self.old_policy.parts) if self.old_policy else self.state()

    @abstractmethod
    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors of such parts, on rank 0 at least; called on all ranks."""

    # What a subclass with an optimizer of its own layout changes -------------------------------------------------

    def optimizer_state(self) -> dict[str, Tensor]:
        """`<parameter>/<key>` -> moment: whole on rank 0, or a DTensor. CheckpointError: there is no exact way."""
        names = {id(p): name for name, p in trainable(self.model.transformer).items()}
        found: dict[str, Tensor] = {}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                if id(parameter) not in names or not _is_plain(value):
                    kind = type(self.optimizer).__name__
                    raise CheckpointError(f"{kind} keeps {key!r} in a form of its own, {type(value).__name__}")
                found[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
        return found

    def load_optimizer_state(self, pieces: Pieces) -> None:
        """Go on from moments that any number of ranks saved."""
        whole = self.optimizer.state_dict()
        names = {id(p): name for name, p in trainable(self.model.transformer).items()}
        flat = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        numbers = chain.from_iterable(group["params"] for group in whole["param_groups"])
        for number, parameter in zip(numbers, flat, strict=True):
            prefix = f"{names[id(parameter)]}/"
            keys = [name for name in pieces.shapes if name.startswith(prefix)]
            if keys:
                found = {name.removeprefix(prefix): pieces.like(name, parameter) for name in keys}
                whole["state"][number] = {key: int(v) if _was_int(v) else v for key, v in found.items()}
        self.optimizer.load_state_dict(whole)

    @property
    def copies(self) -> Mapping[str, Ema | Copy]:
        """What there is besides the weights, in parts as they are, by its file in a checkpoint."""
        every = {EMA: self.ema, OLD_POLICY: self.old_policy, START: self.start}
        return {name: kept for name, kept in every.items() if kept is not None}

    def load_copies(self, path: Path | None) -> None:
        """Go on from copies that a checkpoint has; those that it has not begin as the weights are."""
        for name, kept in self.copies.items():
            pieces = Pieces(path.glob(name) if path else ())
            kept.load(self.read(pieces) if pieces.shapes else self.parts())

    def read(self, pieces: Pieces) -> dict[str, Tensor]:
        """This rank's parts of trainable weights in files."""
        return {name: pieces.like(name, part) for name, part in self.parts().items()}

    # Saving ------------------------------------------------------------------------------------------------------

    def save(self, path: Path, aside: str | None = None, stale: Version | None = None) -> None:
        """Copy what belongs to the checkpoint `path`, and begin to write it.

        It is written to the folder `aside` beside `path`, in the background; None: to `path` itself, at once. `stale`:
        with the weights of this older version too. Called on all ranks, as `written` is.
        """
        folder = path if aside is None else path.with_name(aside)
        files: Files = {WEIGHTS: self._copied(self.state())}
        files |= {name: self._copied(self.whole(kept.parts)) for name, kept in self.copies.items()}
        if stale is not None and self.context.rank == 0:
            files[f"{PREVIOUS}/{WEIGHTS}"] = self.remembered[stale]
        try:
            files[f"optimizer-{self.context.rank:05d}.safetensors"] = self._copied(self.optimizer_state())
        except CheckpointError as reason:
            self.no_optimizer: str | None = str(reason)
        else:
            self.no_optimizer = None
        self.writing = Writing(folder, {name: pieces for name, pieces in files.items() if pieces})
        if aside is None:
            part = self.written(wait=True)
            if part and part.problem:
                raise CheckpointError(part.problem)

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """This rank's pieces."""
        pieces = {name: piece(tensor, self.context.rank) for name, tensor in tensors.items()}
        return {name: found for name, found in pieces.items() if found is not None}

    def written(self, wait: bool) -> Part | None:
        """What this rank wrote of the checkpoint that `save` began, or why it could not; None: not done yet."""
        return self.writing.result(wait) if self.writing else Part()

    def seal(self, path: Path, aside: str, files: Sequence[Record], facts: Mapping[str, Any]) -> str | None:
        """Make a checkpoint of what all ranks wrote, and delete those that are not kept; why it failed, if it did."""
        self.writing = None
        if self.context.rank != 0:
            return None
        c = self.config
        state = {"digen": digen.__version__, "torch": torch.__version__, "no_optimizer": self.no_optimizer, **facts}
        with suppress(OSError):  # rows are to outlast a power cut as their checkpoint does; a full disk let none begin
            synced(RunFolder(path.parents[1]).metrics)
        try:
            texts = {manifest.STATE: json.dumps(state, indent=1) + "\n", manifest.CONFIG: presets.dump(c)}
            manifest.seal(path.with_name(aside), path, files, texts)
            manifest.rotate(path.parent, c.checkpoint.keep, c.checkpoint.best)
        except OSError as error:
            return str(error)
        return None

    # And back ----------------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> None:
        """Load trainable weights that a trainer's `save` wrote; each rank reads its part."""
        own, pieces = trainable(self.model.transformer), Pieces([path / WEIGHTS])
        load_trainable(
            self.model.transformer,
            {name: pieces.like(name, own[name]) if name in own else pieces.whole(name) for name in pieces.shapes},
        )

    def resume(self, path: Path, version: Version) -> None:
        """Go on from a checkpoint: weights, copies of them, and moments."""
        self.restore(path)
        self.load_copies(path)
        self.load_optimizer_state(Pieces(path.glob("optimizer-*.safetensors")))
        self.begin_at(version)

    def begin_from(self, path: Path) -> None:
        """Begin a new run from the weights of a checkpoint."""
        self.restore(path)
        self.load_copies(None)
        self.begin_at(0)

    def begin_at(self, version: Version) -> None:
        """Take the present weights for those of `version`."""
        self.version = version
        self.remembered: dict[Version, dict[str, Piece]] = {}
        self.remember()

    def remember(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Keep the present weights if those of the next rollout are saved: samples of its steps may be made with them.

        Called on all ranks when generators are given these weights; `state` is what they are given.
        """
        c, rollout = self.config, self.config.trainer.updates_per_rollout
        self.remembered = {v: pieces for v, pieces in self.remembered.items() if v >= self.version - rollout}
        every = c.checkpoint.every
        if c.schedule.staleness > 0 and every > 0 and (self.version + rollout) % every == 0:
            self.remembered[self.version] = self._copied(self.sampling_state() if state is None else state)


def _is_plain(value: object) -> bool:
    """Whether a value is a whole number, or a tensor whose elements are all there is to it."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return type(local) in (int, Tensor)


def _was_int(value: Tensor) -> bool:
    """torch's own optimizers count steps in float32; whoever counts in Python's numbers wants these back."""
    return value.ndim == 0 and value.dtype == torch.int64


class Writing:
    """A thread that writes one rank's files of one checkpoint."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._part = Part()
        self._thread = Thread(target=self._write, args=(folder, files), name="digen-save", daemon=True)
        self._thread.start()

    def _write(self, folder: Path, files: Files) -> None:
        path, records = folder, []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, pieces in files.items():
                path = folder / name
                records.append(write(folder, name, pieces))
            self._part = Part(tuple(records))
        except OSError as error:
            self._part = Part(problem=f"{error.filename or path}: {error.strerror or error}")

    def result(self, wait: bool) -> Part | None:
        """None: still at it."""
        if wait:
            self._thread.join()
        return None if self._thread.is_alive() else self._part
