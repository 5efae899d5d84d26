"""The engine's side of a weight update: what came, where it went, and whether it is there, bit for bit (rule R15).

Invariant: an update is whole or it is an error: every parameter of the transformer has been given, every tensor found
its place, and what lies there afterwards equals what was given. Three phases, as vLLM's native weight transfer has
them: start, update (any number of times), finish. Engines pack projections (q, k, v) into one parameter, and under
tensor parallelism a rank has its part of most of them: each rank proves its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from digen.errors import SyncError
from digen.types import Version

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""The engine's own loader: takes (name, tensor) pairs, splits and packs them as it needs."""
SHOWN = 3
"""Names in a message."""


def places(
    parameters: Iterable[str], packed: Mapping[str, Sequence[str]], renamed: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(diffusers' name, engine's name) of everything that the engine's parameters are made of, parts in their order.

    `packed`: engine's module name -> diffusers' names of its parts, in order; `renamed`: engine's suffix -> diffusers'.
    """
    for name in parameters:
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        for part in packed.get(module, (module,)):
            theirs = f"{parent}.{part}" if parent else part
            for ours, suffix in renamed.items():
                if theirs.endswith(ours):
                    theirs = theirs.removesuffix(ours) + suffix
            yield (f"{theirs}.{leaf}" if theirs else leaf), name


@dataclass
class Update:
    """Tensors of one version on their way into the engine."""

    version: Version
    transformer: nn.Module
    load: Load
    packed: Mapping[str, Sequence[str]]
    renamed: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1
    """Of the engine: those that the transformer is divided over."""
    given: dict[str, Tensor] = field(default_factory=dict)

    def take(self, tensors: Mapping[str, Tensor]) -> int:
        """Load these; how many. Raises SyncError, with nothing loaded, for names that the transformer has no place for.

        After any error the engine is half updated, and must not be used any more.
        """
        known = {theirs for theirs, _ in self._places()}
        if unknown := sorted(tensors.keys() - known):
            raise SyncError(f"the engine has no place for {len(unknown)} tensors: {', '.join(unknown[:SHOWN])}")
        with torch.no_grad():
            self.load(tensors.items())
        self.given.update(tensors)
        return len(tensors)

    def finish(self) -> dict[str, Any]:
        """Whether all is there. Raises SyncError naming what was not given, or is not what was given."""
        parameters = dict(self.transformer.named_parameters())
        found = list(self._places())
        if missing := [theirs for theirs, _ in found if theirs not in self.given]:
            raise SyncError(
                f"version {self.version}: {len(missing)} of {len(found)} parameters were not given: "
                f"{', '.join(missing[:SHOWN])}"
            )
        parts: dict[str, list[str]] = {}
        for theirs, ours in found:
            parts.setdefault(ours, []).append(theirs)
        wrong = [
            ours
            for ours, made_of in parts.items()
            if not _is(parameters[ours], [self.given[name] for name in made_of], self.rank, self.num_ranks)
        ]
        if wrong:
            raise SyncError(
                f"version {self.version}: {len(wrong)} parameters are not what was given: {', '.join(wrong[:SHOWN])}"
            )
        return {"version": self.version, "tensors": len(self.given), "parameters": len(parts)}

    def _places(self) -> Iterator[tuple[str, str]]:
        return places((name for name, _ in self.transformer.named_parameters()), self.packed, self.renamed)


def shard(whole: Tensor, shape: Sequence[int], rank: int, num_ranks: int) -> Tensor | None:
    """What a rank has of a tensor when that has this shape: all of it, or one of equal parts along one dimension.

    None when neither has this shape.
    """
    if whole.shape == tuple(shape):
        return whole
    for dim, size in enumerate(shape):
        divided = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
        if size * num_ranks == whole.shape[dim] and divided == tuple(shape):
            return whole.narrow(dim, rank * size, size)
    return None


def _is(parameter: Tensor, parts: Sequence[Tensor], rank: int, num_ranks: int) -> bool:
    """Whether a parameter is a rank's shares of these tensors, one below the other, bit for bit in its own dtype."""
    total = sum(len(part) for part in parts)
    sizes = [len(part) * len(parameter) // total for part in parts]
    if sum(sizes) != len(parameter):
        return False
    for piece, part in zip(torch.split(parameter.detach(), sizes), parts, strict=True):
        mine = shard(part, piece.shape, rank, num_ranks)
        if mine is None or not torch.equal(piece, mine.to(piece)):
            return False
    return True
