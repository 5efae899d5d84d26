"""What an algorithm is: a frozen, strict config composed of four parts, and the few questions a run asks of it.

Pure: no I/O, no device, no clock, and no import of torch (the math uses tensor methods only), so that a config check
stays fast. An algorithm never mentions a model or a backend. Paper section 2.1, Algorithm 1 lines 13-14.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from digen.config import Section
from digen.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transition:
    """Noise levels of one denoising step per row, fp32, each of shape (N, 1, ..., 1) to broadcast over latents.

    `sigma` -> `sigma_next`; `sigma_second` is entry 1 and `sigma_last` the last entry of the rollout's table.
    """

    sigma: Tensor
    sigma_next: Tensor
    sigma_second: Tensor
    sigma_last: Tensor

    @property
    def h(self) -> Tensor:
        """Step length sigma - sigma_next > 0."""
        return self.sigma - self.sigma_next

    @classmethod
    def at(cls, sigmas_T1: Tensor, index_N: Tensor, ndim: int) -> Transition:
        """Rows `index_N` (N,) of a sigma table (T+1,), shaped for latents with `ndim` dimensions."""
        sigmas_T1 = sigmas_T1.float()
        shape = (-1,) + (1,) * (ndim - 1)
        first = index_N * 0
        return cls(
            sigmas_T1[index_N].view(shape),
            sigmas_T1[index_N + 1].view(shape),
            sigmas_T1[first + 1].view(shape),
            sigmas_T1[first - 1].view(shape),
        )


def row_mean(values: Tensor) -> Tensor:
    """Mean (N,) over every dimension but the first: what log-probs and distances are, whatever the latents' shape."""
    return values.flatten(1).mean(1)


class NoiseStrategy(Section):
    """A stochastic denoising step: its mean, its standard deviation and its log-probability. All in fp32."""

    type: str

    @property
    def is_silent(self) -> bool:
        """Whether the strategy injects no noise at all (level 0), so that nothing could be learned from it."""
        return False

    @property
    def forward_process(self) -> bool:
        """Whether sampling has no noise, and what is trained is clean samples noised anew (`matching`)."""
        return False

    @property
    def draws_per_group(self) -> bool:
        """Whether all samples of a group are noised anew with the same draws."""
        return False

    @abstractmethod
    def mean_std(self, x: Tensor, v: Tensor, at: Transition) -> tuple[Tensor, Tensor]:
        """Mean (N, ...) and std (N, 1, ..., 1) of the next latents, given latents x and velocity v (noise - data)."""

    @abstractmethod
    def log_prob(self, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Log-probability (N,) of next latents y: a mean over every dimension but the first."""


class StepSelector(Section):
    """Which denoising steps get noise, and which of those are trained. Pure functions of identity (rule R13).

    Global steps and denoising steps count from 0. The last denoising step is never trained: it has next to no noise, so
    its log-prob is next to infinite.
    """

    type: str

    @abstractmethod
    def noisy(self, seed: int, step: int, prompt_id: int, num_steps: int) -> tuple[int, ...]:
        """Sorted indices of the steps that inject noise: one answer for all samples of a group."""

    @abstractmethod
    def trained(self, seed: int, step: int, prompt_id: int, sample: int, num_steps: int) -> tuple[int, ...]:
        """Sorted indices of the trained steps, a subset of `noisy`; always `num_trained` of them."""

    @abstractmethod
    def num_trained(self, num_steps: int) -> int:
        """How many steps of each sample are trained (S), the same for all."""

    def check(self, num_steps: int) -> None:
        """Refuse a number of denoising steps that this choice does not fit. Raises ConfigError."""
        if num_steps < 2:
            raise ConfigError(f"sampling.num_steps={num_steps}: the last step is never trained; allowed: 2 or more")


class Advantage(Section):
    """From the rewards of one group to its advantages; pure numpy (the driver computes it)."""

    type: str

    @property
    def needs_gradient_scale(self) -> bool:
        """Whether `gradient_scale` is ever other than 1; then the loss must be proportional to the advantage (R12)."""
        return False

    @abstractmethod
    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group (all its samples, before any selection)."""

    def gradient_scale(self, rewards: Sequence[Sequence[float]]) -> float:  # noqa: ARG002
        """Factor on the step's summed gradient before the optimizer step, given the rewards of all its groups.

        1, but for exact batch std (rule R12).
        """
        return 1.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One row per (sample, timestep) pair; log-probs and advantages (N,), means (N, ...), the rest (N, 1, ..., 1)."""

    new_log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    mean: Tensor
    std: Tensor
    at: Transition
    reference_mean: Tensor | None = None
    """Mean under the frozen base weights; given when `needs_reference`."""
    old_mean: Tensor | None = None
    """Mean at rollout, or replayed as the old log-prob is; given when the algorithm records `mean`."""
    next_latents: Tensor | None = None
    """Of the step, (N, ...); for `matching` the velocity that would lead back to the clean sample."""
    partner: Tensor | None = None
    """For each row (N,) which one it is compared with: the pair's other sample at the same step (`rows_together`)."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Per-row loss (N,), with gradient, and what to report of it: name -> (N,) detached."""

    loss: Tensor
    stats: Mapping[str, Tensor]


class PolicyLoss(Section):
    """From log-probs and advantages to a loss per row. The trainer sums rows and divides by a fixed Z (R11)."""

    type: str

    @property
    def needs_reference(self) -> bool:
        """Whether a forward of the frozen base is wanted; without it none is made."""
        return False

    @property
    def needs_old_mean(self) -> bool:
        """Whether the mean at rollout is wanted, which the rollout then must record."""
        return False

    @property
    def rows_together(self) -> int:
        """How many neighbours of the kept samples belong together: 1, or 2 for a loss that compares the two of a pair.

        They are never parted: not between ranks, nor workers, nor forward passes.
        """
        return 1

    @property
    def is_proportional(self) -> bool:
        """Whether c times the advantage gives c times the loss, for every c > 0: what batch std needs (R12)."""
        return False

    def problems(self, noise: NoiseStrategy) -> list[str]:  # noqa: ARG002
        """Why the loss cannot be had with this noise, as sentences that name keys and values."""
        return []

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossTerms: ...


class BestOfN(Section):
    """Train only the samples of a group with the highest and the lowest advantage (DanceGRPO); ties by sample index."""

    best: Annotated[int, Field(ge=1)] = 4
    worst: Annotated[int, Field(ge=1)] = 4


class Algorithm(Section):
    """Base of all algorithms: a subclass sets the parts' types and defaults; a file of its own is enough for a new one.

    A part that is given in pieces keeps the subclass's values for the rest, as long as its `type` stays the same.
    """

    without_guidance: ClassVar[bool] = False
    """Whether the name stands for guidance scales of 1 too, whatever a model's preset says."""

    name: str
    samples_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Group size."""
    same_initial_noise: bool = False
    """All samples of a group start from the same latents; step noise always differs."""
    decode: Literal["sample", "clean"] = "sample"
    """What is decoded: the last latents, or the clean latents predicted at the last step (DanceGRPO)."""
    old_log_prob: Literal["rollout", "replay"] = "rollout"
    """Where the ratio's denominator comes from: as recorded, or recomputed by the trainer in its own batch geometry."""
    records: tuple[Literal["mean"], ...] = ()
    """Further fields that the rollout must keep for the loss."""
    best_of_n: BestOfN | None = None
    """None: all samples of a group are trained."""

    noise: NoiseStrategy
    steps: StepSelector
    advantage: Advantage
    loss: PolicyLoss

    @model_validator(mode="before")
    @classmethod
    def _complete_parts(cls, data: Any) -> Any:
        """Fill a part that sets some keys from the recipe's part of the same type."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        for name, field in cls.model_fields.items():
            part, recipe = data.get(name), field.default
            if isinstance(part, Mapping) and isinstance(recipe, Section):
                whole = recipe.model_dump()
                if part.get("type", whole.get("type")) == whole.get("type"):
                    filled[name] = {**whole, **part}
        return filled

    @model_validator(mode="after")
    def _possible(self) -> Algorithm:
        problems = self.problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems(self) -> list[str]:
        """What cannot be had together, as sentences that name keys and values."""
        wrong = []
        if self.kept_per_prompt() > self.samples_per_prompt:
            wrong.append(
                f"algorithm.best_of_n keeps {self.kept_per_prompt()} samples (best + worst), "
                f"allowed: at most algorithm.samples_per_prompt={self.samples_per_prompt}"
            )
        if self.noise.is_silent:
            wrong.append("algorithm.noise.level=0 explores nothing and has no log-probability; allowed: above 0")
        if self.advantage.needs_gradient_scale and not self.loss.is_proportional:
            scale = getattr(self.advantage, "scale", "batch")
            wrong.append(
                f"algorithm.advantage.scale={scale} is known when the step's gradient is whole, and scales that: exact "
                "only for a loss proportional to the advantage; "
                "set algorithm.loss.advantage_clip=null and algorithm.loss.kl=0, or algorithm.advantage.scale=group"
            )
        if self.loss.needs_old_mean and "mean" not in self.records:
            wrong.append(
                f"algorithm.records={list(self.records)}: algorithm.loss.type={self.loss.type} compares with the mean "
                "at rollout, which must be recorded; set algorithm.records=[mean]"
            )
        return wrong + self._unpaired() + self.loss.problems(self.noise)

    def _unpaired(self) -> list[str]:
        """What a loss of pairs cannot do with."""
        wrong, kind = [], self.loss.type
        if self.loss.rows_together == 1:
            return []
        if self.best_of_n != BestOfN(best=1, worst=1):
            kept = f"{self.best_of_n.best} + {self.best_of_n.worst}" if self.best_of_n else "all"
            wrong.append(
                f"algorithm.loss.type={kind} compares two samples of a group, got {kept} that are kept; "
                "set algorithm.best_of_n={best: 1, worst: 1}"
            )
        if getattr(self.steps, "per_sample", False):
            wrong.append(
                f"algorithm.loss.type={kind} compares two samples at the same steps; "
                "set algorithm.steps.per_sample=false"
            )
        return wrong

    @property
    def has_old_policy(self) -> bool:
        """Whether another policy than the trained one samples: an average of it, which the trainer keeps."""
        return False

    def old_policy_keeps(self, num_updates: int) -> float:  # noqa: ARG002
        """Share of itself that it keeps when it follows the trained one after so many optimizer steps; 0: a copy."""
        return 0.0

    def kept_per_prompt(self) -> int:
        """Samples of a group that are trained."""
        return self.best_of_n.best + self.best_of_n.worst if self.best_of_n else self.samples_per_prompt

    def select(self, advantages: Sequence[float]) -> list[bool]:
        """Which samples of a group are trained (Algorithm 1 line 14)."""
        if self.best_of_n is None:
            return [True] * len(advantages)
        order = sorted(range(len(advantages)), key=lambda k: (-advantages[k], k))
        kept = {*order[: self.best_of_n.best], *order[-self.best_of_n.worst :]}
        return [k in kept for k in range(len(advantages))]
