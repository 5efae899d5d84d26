"""What a worker's model weighs, and what its forward and backward passes need on top, counted on stand-ins.

Invariant: blocks that are alike need the same, so a pass is counted with one block of each kind and with one more of
each; what it needs is linear in their numbers and in rows, as activations are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from digen.algos.base import Transition
from digen.backends.worker import TorchWorker
from digen.memory.blank import blank, longest_text
from digen.memory.count import Ledger, autocast_of_cuda, give_stand_ins, linear_of_zero3, stand_in
from digen.memory.sizes import Weight, Weights
from digen.models.base import Conditioning, ModelFamily


def weights_of(family: ModelFamily) -> Weights:
    """Of a family as it is loaded, with adapters if it has some."""
    units = [list(block.parameters()) for block in family.blocks(family.transformer)]
    inside = {id(p) for unit in units for p in unit}
    units.append([p for p in family.transformer.parameters() if id(p) not in inside])
    return Weights(
        tuple(tuple(Weight(tuple(p.shape), p.element_size(), p.requires_grad) for p in unit) for unit in units),
        sum(b.nbytes for b in family.transformer.buffers()),
    )


class CountedModel:
    """A worker's model, counted (`digen.memory.sizes.Sizes`)."""

    def __init__(self, worker: TorchWorker, *, cuda: bool) -> None:
        """`cuda`: count as on a GPU, where autocast keeps more in float32."""
        self.config, self.cuda = worker.config, cuda
        self.autocast = worker.placement.dtype == "bfloat16"
        trainer = worker.config.trainer
        self.zero3 = worker.placement is trainer and trainer.backend == "deepspeed" and trainer.zero_stage == 3
        self.family, parts = blank(worker.config.model, worker.kept_dtype)
        with torch.device("meta"):
            worker.make_trainable(self.family)
        self.weights = weights_of(self.family)
        self.encoders = parts.encoder_size * worker.kept_dtype.itemsize
        vae = self.family.pipeline.vae
        self.decoder = sum(t.nbytes for t in chain(vae.parameters(), vae.buffers()))
        self.state_dtype = torch.float64 if worker.placement.dtype == "float64" else torch.float32
        self.latents = prod(self.family.latent_shape) * self.state_dtype.itemsize
        self.num_latents = 2 + ("mean" in worker.config.algorithm.records)
        size = self.config.model
        self.media = 3 * size.height * size.width * size.num_frames
        self.text = longest_text(self.family, worker.kept_dtype)
        guided = worker.config.sampling.guidance > 1 and not self.family.embeds_guidance
        self.negative = self.text if guided else None
        self.conditioning = sum(t.nbytes for t in self.text.values()) * (2 if guided else 1)
        self.lists = BlockLists(self.family)
        self.lines: dict[Hashable, tuple[int, int]] = {}

    def pass_bytes(self, rows: int, *, trained: bool, checkpointed: bool = False) -> int:
        def counted(rows: int) -> int:
            return self.lists.extrapolated(lambda: self._pass(rows, trained=trained, checkpointed=checkpointed))

        return self._on_line(("pass", trained, checkpointed), counted, rows)

    def decode_bytes(self, rows: int) -> int:
        return self._on_line("decode", self._decode, rows)

    def _on_line(self, key: Hashable, counted: Callable[[int], int], rows: int) -> int:
        if key not in self.lines:
            self.lines[key] = counted(1), counted(2)
        one, two = self.lines[key]
        return one + (rows - 1) * (two - one)

    def _pass(self, rows: int, *, trained: bool, checkpointed: bool) -> int:
        """One of `AccumulatingWorker._backward`, or of the sampler's steps, with the blocks that are there now."""
        transformer: Any = self.family.transformer
        give_stand_ins(transformer)
        if checkpointed:
            transformer.enable_gradient_checkpointing()
        for p in transformer.parameters():
            p.grad = stand_in(p.shape, p.dtype) if trained and p.requires_grad else None
        x, y = (stand_in((rows, *self.family.latent_shape), self.state_dtype) for _ in range(2))
        cond, negative = self._rows_of(self.text, rows), self._rows_of(self.negative, rows)
        there = [x, y, *cond.values(), *negative.values(), *transformer.parameters(), *transformer.buffers()]
        there += [p.grad for p in transformer.parameters() if p.grad is not None]
        at = Transition.at(torch.linspace(1, 0, self.config.sampling.num_steps + 1), torch.zeros(rows).long(), x.ndim)
        with Ledger(there) as ledger, self._as_on_device(), torch.set_grad_enabled(trained):
            v = self._velocity(x, at, cond, negative or None)
            mean, std = self.config.algorithm.noise.mean_std(x, v, at)
            log_prob = self.config.algorithm.noise.log_prob(y, mean, std)
            if trained:
                torch.autograd.backward([log_prob.sum()])
        if checkpointed:
            transformer.disable_gradient_checkpointing()
        return int(ledger.peak)

    def _velocity(self, x: Tensor, at: Transition, cond: Conditioning, negative: Conditioning | None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            guidance = self.config.sampling.guidance
            return self.family.guided_velocity(x, at.sigma.reshape(-1), cond, negative, guidance).to(x.dtype)

    def _decode(self, rows: int) -> int:
        vae = self.family.pipeline.vae
        give_stand_ins(vae)
        x = stand_in((rows, *self.family.latent_shape), self.state_dtype)
        with Ledger([x, *vae.parameters(), *vae.buffers()]) as ledger, self._as_on_device():
            self.family.decode(x)
        return int(ledger.peak)

    @contextmanager
    def _as_on_device(self) -> Iterator[None]:
        with autocast_of_cuda() if self.cuda else nullcontext(), linear_of_zero3() if self.zero3 else nullcontext():
            yield

    def _rows_of(self, text: Conditioning | None, rows: int) -> Conditioning:
        """That many rows: what is a shape becomes a stand-in, what has values keeps them."""
        found = {}
        for name, row in (text or {}).items():
            shape = (rows, *row.shape[1:])
            found[name] = stand_in(shape, row.dtype) if row.is_meta else row.expand(shape).contiguous()
        return found


@dataclass(frozen=True, slots=True)
class BlockList:
    """Where blocks are in a transformer: a list of modules, and of which kind each of them is."""

    owner: nn.Module
    name: str
    modules: nn.ModuleList
    kinds: Sequence[Hashable]
    """None: no block."""


class BlockLists:
    """All blocks of a family's transformer."""

    def __init__(self, family: ModelFamily) -> None:
        blocks = {id(block) for block in family.blocks(family.transformer)}
        self.lists = [
            BlockList(owner, name, part, [_kind(m, (id(owner), name)) if id(m) in blocks else None for m in part])
            for owner in family.transformer.modules()
            for name, part in owner.named_children()
            if isinstance(part, nn.ModuleList) and any(id(m) in blocks for m in part)
        ]
        self.counts = Counter(kind for found in self.lists for kind in found.kinds if kind is not None)

    def extrapolated(self, counted: Callable[[], int]) -> int:
        """What `counted` would give with all blocks, from what it gives with one or two of each kind."""
        with self._only({}):
            total = least = counted()
        for kind, count in self.counts.items():
            if count > 1:
                with self._only({kind: 2}):
                    total += (count - 1) * (counted() - least)
        return total

    @contextmanager
    def _only(self, numbers: Mapping[Hashable, int]) -> Iterator[None]:
        """With the first blocks of each kind alone: that many, or one."""
        for found in self.lists:
            seen: Counter[Hashable] = Counter()
            kept = []
            for module, kind in zip(found.modules, found.kinds, strict=True):
                seen[kind] += 1
                if kind is None or seen[kind] <= numbers.get(kind, 1):
                    kept.append(module)
            setattr(found.owner, found.name, nn.ModuleList(kept))
        yield
        for found in self.lists:
            setattr(found.owner, found.name, found.modules)


def _kind(block: nn.Module, where: Hashable) -> Hashable:
    """What is the same for blocks that need the same."""
    return where, type(block), tuple((name, p.shape, p.dtype) for name, p in block.named_parameters())
