"""What an algorithm is: a frozen, strict config composed of four parts, and the few questions a run asks of it.

Pure: no I/O, no device, no clock, and no import of torch (the math uses tensor methods only), so that a config check
stays fast. An algorithm never mentions a model or a backend. Paper section 2.1, Algorithm 1 lines 13-14.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from digen.config import Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transition:
    """Noise levels of one denoising step per row, fp32, each of shape (N, 1, ..., 1) to broadcast over latents.

    `sigma` -> `sigma_next`; `sigma_second` is entry 1 and `sigma_last` the last entry of the table that the rollout used.
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


class NoiseStrategy(Section):
    """A stochastic denoising step: its mean, its standard deviation and its log-probability. All in fp32."""

    type: str

    @abstractmethod
    def mean_std(self, x: Tensor, v: Tensor, at: Transition) -> tuple[Tensor, Tensor]:
        """Mean (N, ...) and std (N, 1, ..., 1) of the next latents, given latents x and velocity v (noise - data)."""

    @abstractmethod
    def log_prob(self, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Log-probability (N,) of next latents y: a mean over every dimension but the first."""


class StepSelector(Section):
    """Which denoising steps get noise, and which of those are trained. Pure functions of identity (rule R13)."""

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


class Advantage(Section):
    """From the rewards of one group to its advantages; pure numpy (the driver computes it)."""

    type: str

    @abstractmethod
    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group (all its samples, before any selection)."""

    def gradient_scale(self, rewards: Sequence[Sequence[float]]) -> float:
        """What the step's summed gradient is multiplied by before the optimizer step: 1, but for exact batch std (R12)."""
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
    """Mean at rollout; given when the algorithm records `mean`."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Per-row loss (N,), with gradient, and what to report of it: name -> (N,) detached."""

    loss: Tensor
    stats: Mapping[str, Tensor]


class PolicyLoss(Section):
    """From log-probs and advantages to a loss per row. The trainer sums rows and divides by the step's fixed Z (R11)."""

    type: str

    @property
    def needs_reference(self) -> bool:
        """Whether a forward of the frozen base is wanted; without it none is made."""
        return False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossTerms: ...


class BestOfN(Section):
    """Train only the samples of a group with the highest and the lowest advantage (DanceGRPO); ties by sample index."""

    best: Annotated[int, Field(ge=1)] = 4
    worst: Annotated[int, Field(ge=1)] = 4


class Algorithm(Section):
    """Base of all algorithms: a subclass sets the parts' types and defaults; a file of its own is enough for a new one."""

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

    noise: Any
    steps: Any
    advantage: Any
    loss: Any

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
