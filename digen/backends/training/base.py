"""Everything the torch trainers share: replay of stored steps, loss, accumulation, one optimizer step, publication.

Invariant: `accumulate` never changes the weights; its gradient is a sum over (sample, timestep) pairs divided by a
number fixed before the step's first micro-batch (rule R11), so order, cut and stacking (GAP, TSP, TAG) cannot change
it. Paper sections 2.1 and 3.2. Shape letters: N rows of one forward (samples x timesteps), K samples, S trained steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from digen.algos.base import LossInputs, LossTerms, Transition
from digen.backends.generation.diffusers import LOADING, DiffusersGenerator
from digen.config import TrainerConfig
from digen.models.base import Conditioning, rows_of
from digen.observe.files import replacing
from digen.schedule.tsp import Chunk, chunks
from digen.types import Published, ScoredRollout, Stat, Stats, StepReport, Version
from digen.weights.state import fingerprint, trainable


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's trained samples of a micro-batch; every tensor has K rows but `sigmas` and the conditionings."""

    tensors: Mapping[str, Tensor]
    cond: Conditioning
    negative: Conditioning | None
    advantage: Tensor
    weight: Tensor
    """1, or 0 for a row that only keeps this rank in step with the others."""


class TorchTrainer(DiffusersGenerator):
    """One optimizer over the model's trainable parameters; subclasses say how it is spread over ranks."""

    @property
    def placement(self) -> TrainerConfig:
        return self.config.trainer

    @property
    def scores_here(self) -> bool:
        return self.config.schedule.mode == "colocated"

    @property
    def generates_here(self) -> bool:
        return self.scores_here or self.config.schedule.tag != "none"

    def load(self) -> None:
        with LOADING:
            self._load_model()
        needs_base = self.algorithm.loss.needs_reference and self.config.trainer.lora is None
        self.base = copy.deepcopy(self.model.transformer).requires_grad_(False) if needs_base else None
        self.distribute()
        self.optimizer = self._make_optimizer()
        self._load_rewards()

    # What a subclass changes -------------------------------------------------------------------------------------

    def distribute(self) -> None:
        """Spread the transformer (and the base copy) over the group's ranks, in place."""

    def reduce_gradients(self, now: bool) -> None:
        """Say before a backward pass whether it is the one after which gradients are summed over ranks."""

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter or gradient, wherever its parts are; called on all ranks."""
        return tensor.detach()

    # -------------------------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> torch.optim.Optimizer:
        c, parameters = self.config.trainer, list(trainable(self.model.transformer).values())
        if c.optimizer == "sgd":
            return torch.optim.SGD(parameters, c.learning_rate, weight_decay=c.weight_decay)
        return torch.optim.AdamW(
            parameters, c.learning_rate, betas=c.adam_betas, eps=c.adam_eps, weight_decay=c.weight_decay
        )

    def accumulate(self, scored: ScoredRollout, tsp: int, denominator: float, last: bool) -> Stats:
        on_policy = scored.rollout.version == self.version
        batch = self._batch(scored)
        if batch is None:
            return {}
        forwards = self._forwards(batch, tsp)
        parts = []
        for number, (samples, columns) in enumerate(forwards, 1):
            self.reduce_gradients(last and number == len(forwards))
            parts.append(self._backward(batch, samples, columns, denominator, on_policy))
        return _stats({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _batch(self, scored: ScoredRollout) -> Batch | None:
        """Read this rank's share of the kept rows; ranks with fewer rows repeat one with weight 0 (collectives)."""
        kept = [row for row in range(len(scored.keep)) if scored.keep[row]]
        if not kept and not self.in_lockstep:
            return None
        pool = kept or [0]
        share = -(-len(pool) // self.context.world_size)
        mine = pool[self.context.rank :: self.context.world_size]
        weight = [float(bool(kept))] * len(mine) + [0.0] * (share - len(mine))
        mine += [pool[0]] * (share - len(mine))
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

    def _forwards(self, batch: Batch, tsp: int) -> Sequence[Chunk]:
        """Which samples and which columns of trained steps share a forward pass (TSP)."""
        size = self.placement.batch_size or -(-self.algorithm.kept_per_prompt() // self.context.world_size)
        num_samples, num_timesteps = batch.tensors["steps"].shape
        return chunks(num_samples, num_timesteps, size, tsp)

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
            old_mean=t.get("mean"),
        )
        terms: LossTerms = self.algorithm.loss(inputs)
        weight = per_row(batch.weight).to(new.dtype)
        ((terms.loss * weight).sum() / denominator).backward()  # type: ignore[no-untyped-call]
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

    def optimizer_step(self, gradient_scale: float) -> StepReport:
        c, parameters = self.config.trainer, list(trainable(self.model.transformer).values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        norm = self._norm(gradients)
        finite = bool(torch.isfinite(norm))
        applied = finite and float(norm) > 0
        delta = 0.0
        if applied:
            if c.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, c.max_grad_norm, norm)
            before = [p.detach().clone() for p in parameters]
            self.optimizer.step()
            delta = float(self._norm([p.detach() - b for p, b in zip(parameters, before, strict=True)]))
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return StepReport(float(norm), c.learning_rate, delta, applied, finite)

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(tensors) if tensors else torch.zeros(())

    def state(self) -> dict[str, Tensor]:
        """The trainable weights, whole; called on all ranks."""
        return {name: self.full(p) for name, p in trainable(self.model.transformer).items()}

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, whole, on the CPU; called on all ranks."""
        named = trainable(self.model.transformer)
        return {name: self.full(p.grad).cpu().clone() for name, p in named.items() if p.grad is not None}

    def push(self, version: Version) -> Published | None:
        if version != self.version:
            raise RuntimeError(f"asked to publish version {version} but the weights here are {self.version}")
        state = self.state()
        if self.context.rank != 0:
            return None
        return Published(version, self._store(f"weights/{version}", state), fingerprint(state))

    def save(self, path: Path) -> None:
        state = self.state()
        if self.context.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            with replacing(path / "weights.safetensors") as partial:
                save_file({n: t.cpu().contiguous() for n, t in state.items()}, partial)


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
