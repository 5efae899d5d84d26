"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) divided over the group's ranks.

Invariant: DeepSpeed moves and divides tensors, and decides nothing. Its engine neither accumulates by count, averages,
clips nor skips: each backward pass adds exactly its gradient, summed over ranks (each rank already divides by the
step's denominator), and the one optimizer step is digen's own, in float32. Paper section 3.4.1.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from digen.backends.training.base import TorchTrainer
from digen.backends.training.ranks import join
from digen.checkpoint.tensors import Pieces
from digen.schedule.tsp import Width
from digen.trained import WEIGHTS
from digen.types import Ref, ScoredRollout, Stats, StepReport
from digen.weights.state import load_trainable, trainable

BUCKET = 50_000_000
"""Most elements of a gradient bucket, a buffer that every rank keeps."""
WHOLE = 8192
"""ZeRO 3: smaller parameters (norms, biases) stay whole on every rank; gathering them costs more than it saves."""


class DeepSpeedTrainer(TorchTrainer):
    """ZeRO 1, 2 or 3 over 1..N ranks, with or without CPU offload (DeepSpeed)."""

    in_lockstep = True
    begun = False
    """Whether there are gradients since the last optimizer step."""
    complete = False
    """Whether DeepSpeed has them all, and was told so: the next thing is the optimizer step."""
    num_handed = 0
    """Gradients of generators, since the last optimizer step; those that this rank keeps are in `handed`."""
    factor: float | None = None
    """What the coming optimizer step multiplies gradients by; None: it leaves everything as it is."""

    @property
    def stage(self) -> int:
        """What is divided over ranks (`trainer.zero_stage`)."""
        return self.config.trainer.zero_stage or 2

    def distribute(self) -> None:
        join(self.context)
        device = torch.device(self.context.device)
        os.environ["DS_ACCELERATOR"] = device.type  # read when deepspeed is imported
        os.environ["LOCAL_RANK"] = str(device.index if device.type == "cuda" else self.context.rank)
        import deepspeed

        warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)  # old names, at every call
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # On a CPU it would compile an all-reduce for inference first: 90 s and a compiler, for nothing used here.
        deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of every trainer, in DeepSpeed's hands: it is given flat parts of the parameters to step."""
        optimizer = super()._make_optimizer()
        step = optimizer.step
        optimizer.step = lambda: self._step_part(optimizer, step)  # type: ignore[method-assign, assignment]
        self.handed: dict[str, Tensor] = {}
        self.module: nn.Module = self.model.transformer
        self.engine = self._engine(self.module, optimizer)
        self.model.transformer = self.engine
        if self.stage == 3 and self.base is not None:
            self.base = self._engine(self.base, None)
        return optimizer

    def _engine(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        import deepspeed

        settings = self._settings(sum(p.numel() for p in trainable(module).values()))
        return deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)[0]

    def _settings(self, num_trainable: int) -> dict[str, Any]:
        c = self.config.trainer
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": max(1, min(num_trainable, BUCKET)),
            "stage3_param_persistence_threshold": WHOLE,
        }
        if c.cpu_offload:
            host = {"device": "cpu", "pin_memory": torch.device(self.context.device).type == "cuda"}
            zero |= {"offload_optimizer": host} | ({"offload_param": host} if self.stage == 3 else {})
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # Its default clips at norm 1, before `optimizer_step` does.
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            # The engine switches autocast off around its forward unless told; gradients are still summed in float32.
            "torch_autocast": {
                "enabled": c.dtype == "bfloat16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }

    # Gradients ------------------------------------------------------------------------------------------------------

    def accumulate(self, scored: ScoredRollout, tsp: Width, denominator: float, last: bool) -> Stats:
        # DeepSpeed divides the ranks' sum by their number, whatever it is told (ZeRO 3): divide by that much less here.
        stats = super().accumulate(scored, tsp, denominator / self.context.world_size, last)
        self.begun, self.complete = True, last and not self.config.schedule.generators_help
        return stats

    def reduce_gradients(self, now: bool) -> None:
        # What DeepSpeed is told to complete it cannot add to: where generators help, that is done in `_finish` alone.
        self.engine.set_gradient_accumulation_boundary(now and not self.config.schedule.generators_help)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def add_gradients(self, handed: Ref) -> None:
        """Each is kept by one rank until the step ends: ranks are summed then."""
        self.begun = True
        if self.num_handed % self.context.world_size == self.context.rank:
            for name, gradient in self.context.store.get(handed).items():
                kept = self.handed.get(name)
                self.handed[name] = gradient.clone() if kept is None else kept + gradient
        self.num_handed += 1

    def _finish(self) -> None:
        """Complete the step's gradient: what others handed over goes the way of what was computed here.

        DeepSpeed takes gradients from a backward pass alone. That of sum(parameter * handed) is what was handed.
        """
        import deepspeed

        named, zero = trainable(self.module), self.engine.optimizer
        zero.clear_backward_seen_flag()  # as before every forward pass of the engine
        self.engine.set_gradient_accumulation_boundary(True)
        with deepspeed.zero.GatheredParameters(list(named.values())):
            terms = []
            for name, p in named.items():
                gradient = self.handed.pop(name, None)
                # The factor: see `accumulate`.
                factor = p.new_zeros(()) if gradient is None else gradient.to(p) * self.context.world_size
                terms.append((p * factor).sum())
            self.engine.backward(torch.stack(terms).sum())
        self.num_handed, self.complete = 0, True

    def gradients(self) -> dict[str, Tensor]:
        """The gradients, whole, on the CPU, from the step's last micro-batch to its optimizer step; on all ranks."""
        from deepspeed.utils import safe_get_full_grad

        if not self.begun:
            return {}
        if not self.complete:
            self._finish()
        return {name: safe_get_full_grad(p).detach().cpu().clone() for name, p in trainable(self.module).items()}

    # The step -------------------------------------------------------------------------------------------------------

    def optimizer_step(self, gradient_scale: float) -> StepReport:
        c, rate = self.config.trainer, self.begin_step()
        if not self.complete:
            self._finish()
        norm = gradient_scale * self._gradient_norm()
        finite = math.isfinite(norm)
        applied = finite and norm > 0
        clip = 1.0 if c.max_grad_norm is None else min(1.0, c.max_grad_norm / (norm + 1e-6))
        self.factor = gradient_scale * clip if applied else None
        self.squared_delta = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self.engine.step()  # clears the gradients too
        self.begun = self.complete = False
        self.end_step()
        dist.all_reduce(self.squared_delta)
        return StepReport(norm, rate, math.sqrt(self.squared_delta), applied, finite)

    def _gradient_norm(self) -> float:
        """Norm of the whole gradient, the same on all ranks; nan when it is not finite."""
        if self.stage < 3:
            norm = float(self.engine.optimizer.scaled_global_norm())
            return norm if norm >= 0 else math.nan  # -1 stands for what is not finite
        from deepspeed.utils import safe_get_local_grad

        parts = [safe_get_local_grad(p).double().square().sum() for p in trainable(self.module).values()]
        squares = torch.stack(parts).sum()
        dist.all_reduce(squares)
        return math.sqrt(squares)

    def _step_part(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Called by DeepSpeed in `engine.step`, once for every flat part of this rank."""
        if self.factor is None:
            return
        parts = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in parts:
            p.grad.mul_(self.factor)
        before = [p.detach().clone() for p in parts]
        step()
        for p, old in zip(parts, before, strict=True):
            self.squared_delta += (p.detach() - old).square().sum(dtype=torch.float64).to(self.squared_delta.device)

    # Weights --------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        """Flat and padded with ZeRO 3, whole with less."""
        named = trainable(self.module)
        if self.stage < 3:
            return {name: p.detach() for name, p in named.items()}
        from deepspeed.utils import safe_get_local_fp32_param

        return {name: safe_get_local_fp32_param(p).detach() for name, p in named.items()}

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathered one at a time and kept on rank 0 alone."""
        if self.stage < 3:
            return dict(parts)
        named = trainable(self.module)
        gathered = ((name, self._gathered(part, named[name])) for name, part in parts.items())
        return {name: tensor for name, tensor in gathered if self.context.rank == 0}

    def _gathered(self, part: Tensor, parameter: Any) -> Tensor:
        flat = part.new_empty(part.numel() * self.context.world_size)
        dist.all_gather_into_tensor(flat, part.contiguous())
        return flat[: parameter.ds_numel].view(parameter.ds_shape)

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Inverse of `whole`, for one tensor: `like` is one of `parts`."""
        if self.stage < 3:
            return super().part(whole, like)
        start = self.context.rank * like.numel()
        mine = whole.flatten()[start : start + like.numel()]  # less, or nothing, on the last ranks
        flat = torch.zeros_like(like)
        flat[: mine.numel()] = mine
        return flat

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> None:
        import deepspeed

        pieces, parameters = Pieces([path / WEIGHTS]), list(trainable(self.module).values())
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            load_trainable(self.module, {name: pieces.whole(name) for name in pieces.shapes})
        self.engine.optimizer.refresh_fp32_params()

    def read(self, pieces: Pieces) -> dict[str, Tensor]:
        return {name: self.part(pieces.whole(name), part) for name, part in self.parts().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        found: dict[str, Tensor] = {}
        for key, value in next(iter(self.optimizer.state.values()), {}).items():  # all flat parts have the same keys
            for name, p in trainable(self.module).items():
                whole = safe_get_full_optimizer_state(p, key) if value.ndim else value
                if self.context.rank == 0:
                    found[f"{name}/{key}"] = whole
        return found

    def load_optimizer_state(self, pieces: Pieces) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        zero, one_of_each = self.engine.optimizer, {name.rpartition("/")[2]: name for name in pieces.shapes}
        for flat in zero.single_partition_of_fp32_groups if self.stage < 3 else zero.fp32_partitioned_groups_flat:
            for key, name in one_of_each.items():
                moment = pieces.shapes[name] != ()
                self.optimizer.state[flat][key] = torch.zeros_like(flat) if moment else pieces.whole(name)
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001 - what it does after its first step
        own = self.parts()
        for name, p in trainable(self.module).items():
            for key in one_of_each:
                if pieces.shapes.get(f"{name}/{key}"):
                    whole = pieces.whole(f"{name}/{key}").to(own[name].device)
                    if self.stage < 3:
                        safe_set_full_optimizer_state(p, whole, key)
                    else:
                        safe_set_local_optimizer_state(p, self.part(whole, own[name]), key)
