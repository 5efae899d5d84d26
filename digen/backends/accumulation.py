"""Gradients of recorded samples: replay of stored steps, loss, accumulation. For trainers and helping generators.

Invariant: `accumulate` never changes the weights; its gradient is a sum over (sample, timestep) pairs divided by a
number fixed before the step's first micro-batch (rule R11), so neither order, cut and stacking (GAP, TSP, TAG) nor who
computes it can change it. Paper sections 2.1 and 3.2. Shape letters: N rows of one forward (samples x timesteps), K
samples, S trained steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from digen.algos.base import LossInputs, LossTerms, Transition
from digen.backends.stacking import Stacking
from digen.backends.worker import TorchWorker
from digen.errors import ConfigError
from digen.models.base import Conditioning, rows_of
from digen.schedule.tsp import Chunk, Width, chunks
from digen.types import ScoredRollout, Stat, Stats
from digen.weights.state import trainable


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's trained samples of a micro-batch; every tensor has K rows but `sigmas` and the conditionings."""

    tensors: Mapping[str, Tensor]
    cond: Conditioning
    negative: Conditioning | None
    advantage: Tensor
    weight: Tensor
    """1, or 0 for a row that only keeps this rank in step with the others."""


class AccumulatingWorker(TorchWorker):
    """A worker that can compute gradients of what was sampled, here or elsewhere."""

    base: nn.Module | None = None
    """A frozen copy of the full weights that training begins with."""

    def _load_model(self) -> None:
        """Raises ConfigError, with nothing loaded, when the model cannot do without stored activations."""
        kind: Any = self.new_model().transformer_class
        if self.config.trainer.activation_checkpointing and not kind._supports_gradient_checkpointing:  # noqa: SLF001
            raise ConfigError(f"trainer.activation_checkpointing=true: {kind.__name__} has no such thing")
        super()._load_model()

    def load_base(self) -> None:
        """Keep a frozen copy of full weights where the loss compares with them; adapters are switched off instead.

        And say that backward passes run the live model's blocks twice, where that is set.
        """
        needs_base = self.algorithm.loss.needs_reference and self.config.trainer.lora is None
        if needs_base:
            self.base = copy.deepcopy(self.model.transformer).requires_grad_(False)
        if self.config.trainer.activation_checkpointing:
            self.checkpoint_activations()

    def checkpoint_activations(self) -> None:
        """Keep the inputs of the model's blocks alone: the same operations run again, so gradients are bit-equal."""
        transformer: Any = self.model.transformer
        transformer.enable_gradient_checkpointing()

    def reduce_gradients(self, now: bool) -> None:
        """Say before a backward pass whether it is the one after which gradients are summed over ranks."""

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradient to the accumulated ones."""
        loss.backward()  # type: ignore[no-untyped-call]

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter or gradient, wherever its parts are; called on all ranks."""
        return tensor.detach()

    def accumulate(self, scored: ScoredRollout, tsp: Width, denominator: float, last: bool) -> Stats:
        # An older policy is none whose ratio to the trained one is 1.
        on_policy = scored.rollout.version == self.version and not self.algorithm.old_policy_keeps(self.version)
        batch = self._batch(scored)
        if batch is None:
            return {}
        forwards = self._forwards(batch, tsp)
        parts = []
        for number, (samples, columns) in enumerate(forwards, 1):
            self.reduce_gradients(last and number == len(forwards))
            with self.stacking.measured((samples.stop - samples.start) * (columns.stop - columns.start)):
                parts.append(self._backward(batch, samples, columns, denominator, on_policy))
        return _stats({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _batch(self, scored: ScoredRollout) -> Batch | None:
        """Read this rank's share of the kept rows; ranks with fewer rows repeat one with weight 0 (collectives)."""
        kept = [row for row in range(len(scored.keep)) if scored.keep[row]]
        if not kept and not self.in_lockstep:
            return None
        together = self.algorithm.loss.rows_together
        pool = kept or [0] * together
        units = [pool[k : k + together] for k in range(0, len(pool), together)]
        share = -(-len(units) // self.context.world_size) * together
        mine = [row for unit in units[self.context.rank :: self.context.world_size] for row in unit]
        weight = [float(bool(kept))] * len(mine) + [0.0] * (share - len(mine))
        mine += units[0] * ((share - len(mine)) // together)
        device = self.model.device
        tensors, cond, negative = self._read(scored, mine)
        return Batch(
            tensors,
            cond,
            negative or None,
            torch.tensor(
                [scored.advantages[row] if w else 0.0 for row, w in zip(mine, weight, strict=True)], device=device
            ),
            torch.tensor(weight, device=device),
        )

    def _read(self, scored: ScoredRollout, rows: Sequence[int]) -> tuple[dict[str, Tensor], Conditioning, Conditioning]:
        stored = {}
        shared: dict[str, Tensor] = {}
        for shard in scored.rollout.shards:
            if set(shard.rows) & set(rows):
                shared = self.context.store.get(shard.trajectory)
                for k, row in enumerate(shard.rows):
                    stored[row] = {n: t[k] for n, t in shared.items() if n != "sigmas" and "." not in n}
        names = stored[rows[0]]
        tensors = {n: torch.stack([stored[row][n] for row in rows]).to(self.model.device) for n in names}
        tensors["sigmas"] = shared["sigmas"].to(self.model.device)

        def conditioning(prefix: str) -> Conditioning:
            return {n.split(".", 1)[1]: t.to(self.model.device) for n, t in shared.items() if n.startswith(prefix)}

        return tensors, conditioning("cond."), conditioning("negative.")

    @cached_property
    def stacking(self) -> Stacking:
        """What decides for `trainer.tsp=auto`."""
        return Stacking.on(self.model.device)

    def _forwards(self, batch: Batch, tsp: Width) -> Sequence[Chunk]:
        """Which samples and which columns of trained steps share a forward pass (TSP)."""
        together = self.algorithm.loss.rows_together
        size = self.placement.batch_size or -(-self.algorithm.kept_per_prompt() // self.context.world_size)
        size = -(-size // together) * together
        num_samples, num_timesteps = batch.tensors["steps"].shape
        width = self.least(self.stacking.choose(self.version, size)) if tsp == "auto" else tsp
        return chunks(num_samples, num_timesteps, size, width)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, where ranks must make the same passes."""
        if not self.in_lockstep:
            return number
        shared = torch.tensor(number, device=self.model.device)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return int(shared)

    def _backward(
        self, batch: Batch, samples: slice, columns: slice, denominator: float, on_policy: bool
    ) -> dict[str, Tensor]:
        """One forward and backward pass; what there is to report of its rows (those that count)."""
        stepwise = ("latents", "next_latents", "log_probs", "steps", *self.algorithm.records)
        t = {name: batch.tensors[name][samples, columns].flatten(0, 1) for name in stepwise}
        width = columns.stop - columns.start

        def per_row(tensor_K: Tensor) -> Tensor:
            return tensor_K[samples].repeat_interleave(width, 0)

        at = Transition.at(batch.tensors["sigmas"], t["steps"], t["latents"].ndim)
        prompt_N = per_row(batch.tensors["prompt"])
        cond, negative = rows_of(batch.cond, prompt_N), rows_of(batch.negative, prompt_N) if batch.negative else None

        def mean_std() -> tuple[Tensor, Tensor]:
            v = self.sampler.velocity(t["latents"], at.sigma.reshape(-1), cond, negative, self.config.sampling.guidance)
            mean_std_: tuple[Tensor, Tensor] = self.algorithm.noise.mean_std(t["latents"], v, at)
            return mean_std_

        reference = None
        if self.algorithm.loss.needs_reference:
            with torch.no_grad(), self._base_weights():
                reference = mean_std()[0]
        mean, std = mean_std()
        new = self.algorithm.noise.log_prob(t["next_latents"], mean, std)
        replay = self.algorithm.old_log_prob == "replay" and on_policy
        inputs = LossInputs(
            new_log_prob=new,
            old_log_prob=new.detach() if replay else t["log_probs"],
            advantage=per_row(batch.advantage).to(new.dtype),
            mean=mean,
            std=std,
            at=at,
            reference_mean=reference,
            old_mean=mean.detach() if replay else t.get("mean"),
            next_latents=t["next_latents"],
            partner=_partners(len(new), width, new.device) if self.algorithm.loss.rows_together == 2 else None,
        )
        terms: LossTerms = self.algorithm.loss(inputs)
        weight = per_row(batch.weight).to(new.dtype)
        self.backward((terms.loss * weight).sum() / denominator)
        rows = {**terms.stats, "loss": terms.loss.detach(), "step": t["steps"]}
        if on_policy:
            rows["ratio_error"] = (terms.stats["ratio"] - 1).abs()
            rows["log_prob_gap"] = (new.detach() - t["log_probs"]).abs()
        return {name: values[weight > 0] for name, values in rows.items()}

    @contextmanager
    def _base_weights(self) -> Iterator[None]:
        """Run with the frozen base: adapters off, or the copy that was taken at the start."""
        live = self.model.transformer
        if self.base is None:
            live.disable_adapters()  # type: ignore[operator]
            try:
                yield
            finally:
                live.enable_adapters()  # type: ignore[operator]
            return
        self.model.transformer = self.base
        try:
            yield
        finally:
            self.model.transformer = live

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, whole, on the CPU; called on all ranks."""
        named = trainable(self.model.transformer)
        return {name: self.full(p.grad).cpu().clone() for name, p in named.items() if p.grad is not None}


def _partners(num_rows: int, width: int, device: torch.device) -> Tensor:
    """For each row of pairs of samples, `width` steps each, the pair's other sample at the same step."""
    return torch.arange(num_rows, device=device).view(-1, 2, width).flip(1).flatten()


def _stats(rows: Mapping[str, Tensor]) -> dict[str, Stat]:
    """Statistics of each named column of rows; the log-prob gap also by denoising step."""
    columns = {name: values for name, values in rows.items() if name != "step"}
    if "log_prob_gap" in rows:
        for step in sorted(set(rows["step"].tolist())):
            columns[f"log_prob_gap/step{step}"] = rows["log_prob_gap"][rows["step"] == step]
    return {name: _stat(values) for name, values in columns.items() if len(values)}


def _stat(values: Tensor) -> Stat:
    values = values.double()
    return Stat(float(values.sum()), len(values), float(values.min()), float(values.max()))
