"""Everything the torch trainers share: one optimizer, one step, publication of the new weights.

Invariant: weights change in `optimizer_step` alone, never for a zero or non-finite gradient; their average (`ema`) is
only ever written to and saved. Paper section 3.4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digen.backends.training.copies import Copy
from digen.backends.training.options import Ema, learning_rate, make_optimizer, set_learning_rate
from digen.backends.training.saving import SavingTrainer
from digen.config import TrainerConfig
from digen.models.base import LOADING
from digen.types import Published, Ref, StepReport, Version
from digen.weights.base import publish
from digen.weights.state import trainable


class TorchTrainer(SavingTrainer):
    """One optimizer over the model's trainable parameters; subclasses say how it is spread over ranks."""

    @property
    def placement(self) -> TrainerConfig:
        return self.config.trainer

    @property
    def scores_here(self) -> bool:
        return super().scores_here and self.config.schedule.mode == "colocated"

    @property
    def generates_here(self) -> bool:
        return self.config.schedule.mode == "colocated" or self.config.schedule.trainer_generates

    def load(self) -> None:
        with LOADING:
            self._load_model()
        self.load_base()
        self.distribute()
        self.optimizer = self._make_optimizer()
        average = self.config.trainer.ema
        self.ema = Ema(average, self.parts()) if average else None
        self.old_policy = Copy.of(self.parts()) if self.algorithm.has_old_policy else None
        self.start = self._start() if self.config.checkpoint.init_from and self.algorithm.loss.needs_reference else None
        self.begin_at(0)
        self._load_rewards()
        self.offload()

    def resting(self) -> Iterable[nn.Module | None]:
        """Updates do not decode; the transformer they need."""
        return (self.decoder,)

    def _start(self) -> Copy:
        """Where the weights of `--init-from` go, for losses to compare with: the frozen copy, or that of adapters."""
        if self.base is None:
            return Copy.of(self.parts())
        whole = dict(self.base.named_parameters())
        return Copy({name: whole[name].detach() for name in self.parts()})

    @contextmanager
    def _base_weights(self) -> Iterator[None]:
        """Adapters that a run began with stand in for its present ones: the base of such a run is not without any."""
        if self.start is None or self.base is not None:
            with super()._base_weights():
                yield
            return
        self.transport.settle()
        with self.start.instead_of(self.parts()):
            yield

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """What samples here is the policy that samples everywhere; what was published must have been copied by then."""
        if self.old_policy is None:
            with super().on_device():
                yield
            return
        self.transport.settle()
        with super().on_device(), self.old_policy.instead_of(self.parts()):
            yield

    # What a subclass changes -------------------------------------------------------------------------------------

    def distribute(self) -> None:
        """Spread the transformer (and the base copy) over the group's ranks, in place."""

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor, divided as the parameter `like` is."""
        return whole.to(like)

    def parts(self) -> dict[str, Tensor]:
        """This rank's parts of the trainable weights, as the optimizer steps them."""
        return {name: p.detach() for name, p in trainable(self.model.transformer).items()}

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors of such parts, on rank 0 at least; called on all ranks."""
        return {name: self.full(part) for name, part in parts.items()}

    # -------------------------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.config.trainer, list(trainable(self.model.transformer).values()))

    def begin_step(self) -> float:
        """Set the learning rate of the step that is due, and return it. `config.steps` is the run's resolved number.

        Weights change from here on: those that were published must have been copied.
        """
        self.transport.settle()
        rate = learning_rate(self.config.trainer, self.version, self.config.steps)
        set_learning_rate(self.optimizer, rate)
        return rate

    def end_step(self) -> None:
        """The step counts, whether or not its gradient was applied, and the average follows."""
        self.make_room()
        if self.ema is not None:
            self.ema.update(self.parts(), self.version)
        self.version += 1
        if self.old_policy is not None and self.version % self.config.trainer.updates_per_rollout == 0:
            self.old_policy.follow(self.parts(), self.algorithm.old_policy_keeps(self.version))

    def add_gradients(self, handed: Ref) -> None:
        """Add what a generator accumulated of this step (its `hand_gradients`) to the gradients here."""
        for name, gradient in self.context.store.get(handed).items():
            parameter = self.model.transformer.get_parameter(name)
            mine = self.part(gradient, parameter)
            parameter.grad = mine.clone() if parameter.grad is None else parameter.grad + mine

    def optimizer_step(self, gradient_scale: float) -> StepReport:
        c, parameters = self.config.trainer, list(trainable(self.model.transformer).values())
        rate = self.begin_step()
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
        self.end_step()
        return StepReport(float(norm), rate, delta, applied, finite)

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(tensors) if tensors else torch.zeros(())

    def state(self) -> dict[str, Tensor]:
        """The trainable weights, whole; called on all ranks."""
        return self.whole(self.parts())

    def push(self, version: Version) -> Published | None:
        if version != self.version:
            raise RuntimeError(f"asked to publish version {version} but the weights here are {self.version}")
        state = self.sampling_state()
        self.remember(state)
        if self.context.rank != 0:
            return None
        return publish(self.transport, version, state)
