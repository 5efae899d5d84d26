"""The stochastic denoising steps: mean, standard deviation and log-probability of the next latents. Paper section 2.1.

Invariant: float32 whatever dtype the model ran in (float64 stays float64, rule R9); level 0 is the Euler step;
log-probs are means over latent dimensions, so log-ratios are tiny and clip ranges around 1e-4 make sense.

Symbols: x latents and v velocity (noise - data), both (N, ...); s and s' noise level before and after the step,
h = s - s', g noise per square root of h, all (N, 1, ..., 1). Hence x - s v are the predicted clean latents and
x + (1 - s) v the predicted noise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from digen.algos.base import NoiseStrategy, Transition, row_mean
from digen.config import NonNegative, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

NEAR_ONE: Final = 1e-3
"""Flow-SDE divides by 1 - s; below this it takes the table's second entry for s (rule R14: Wan starts at 0.999999)."""
_LN_SQRT_2PI: Final = math.log(2 * math.pi) / 2


def _full(tensor: Tensor) -> Tensor:
    """At least float32: bfloat16 overflows in the steps below."""
    return tensor if tensor.element_size() > 4 else tensor.float()


def euler(x: Tensor, v: Tensor, at: Transition) -> Tensor:
    """The step without noise, x + (s' - s) v: bit-equal to diffusers' flow-match Euler scheduler in float32."""
    return _full(x) + (at.sigma_next - at.sigma) * _full(v)


def clean(x: Tensor, v: Tensor, at: Transition) -> Tensor:
    """Predicted clean latents x - s v, which DanceGRPO decodes at the last step."""
    return _full(x) - at.sigma * _full(v)


def noise_to_data(at: Transition) -> Tensor:
    """sqrt(s / (1 - s)), (N, 1, ..., 1): the scale of Flow-SDE's noise, guarded where s is nearly 1."""
    rest = 1 - at.sigma
    rest = rest.where(rest >= NEAR_ONE, rest.maximum(1 - at.sigma_second))
    return (at.sigma / rest).sqrt()


class EulerMaruyama(NoiseStrategy):
    """One step of an SDE with the flow's marginals; subclasses differ in g only.

    mean = x - h (v + g^2 / (2 s) (x + (1 - s) v)), std = g sqrt(h), log-prob of a normal distribution (Flow-GRPO).
    """

    @abstractmethod
    def g(self, at: Transition) -> Tensor:
        """Noise per square root of step length, (N, 1, ..., 1)."""

    def mean_std(self, x: Tensor, v: Tensor, at: Transition) -> tuple[Tensor, Tensor]:
        x, v, g = _full(x), _full(v), self.g(at)
        drift = v + g**2 / (2 * at.sigma) * (x + (1 - at.sigma) * v)
        return x - at.h * drift, g * at.h.sqrt()

    def log_prob(self, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Raises ValueError where std is 0: there is no density; such a step is taken with `euler` and not trained."""
        if not bool((std > 0).all()):
            raise ValueError("log_prob of a step without noise: std must be above 0 in every row")
        z = (_full(y) - mean) / std
        return row_mean(-(z**2) / 2 - std.log() - _LN_SQRT_2PI)


class FlowSDE(EulerMaruyama):
    """Flow-GRPO: g = level sqrt(s / (1 - s)), large at the start; see `max_std` for schedules that start close to 1."""

    type: Literal["flow-sde"] = "flow-sde"
    level: NonNegative = 0.7
    """Noise level a; recipes use 0.7 to 1.5."""
    max_std: Positive | None = None
    """Cap on the step's standard deviation g sqrt(h); LongCat uses 0.45."""

    @property
    def is_silent(self) -> bool:
        return self.level == 0

    def g(self, at: Transition) -> Tensor:
        g = self.level * noise_to_data(at)
        return g if self.max_std is None else g.minimum(self.max_std / at.h.sqrt())


class DanceSDE(EulerMaruyama):
    """DanceGRPO: g = level at every step."""

    type: Literal["dance-sde"] = "dance-sde"
    level: NonNegative = 0.3
    """Noise level eta; recipes use 0.25 to 0.3."""

    @property
    def is_silent(self) -> bool:
        return self.level == 0

    def g(self, at: Transition) -> Tensor:
        return at.sigma.new_full(at.sigma.shape, self.level)


class WanSDE(EulerMaruyama):
    """Flow-GRPO's step for Wan: g = last + (second - last) s with entries of the sigma table; it has no knob."""

    type: Literal["wan-sde"] = "wan-sde"

    def g(self, at: Transition) -> Tensor:
        return at.sigma_last + (at.sigma_second - at.sigma_last) * at.sigma


class CPS(NoiseStrategy):
    """Coefficient-preserving sampling: noise is replaced, not added, so samples stay clean.

    mean = (1 - s') (x - s v) + s' cos(level pi/2) (x + (1 - s) v), std = s' sin(level pi/2).
    The log-prob is -(y - mean)^2 without variance: its clip ranges are not those of the SDE steps.
    """

    type: Literal["cps"] = "cps"
    level: Share = 0.8
    """Share of the noise that is replaced, as an angle in quarter turns; recipes use 0.7 to 0.8, 1 replaces all."""

    @property
    def is_silent(self) -> bool:
        return self.level == 0

    def mean_std(self, x: Tensor, v: Tensor, at: Transition) -> tuple[Tensor, Tensor]:
        x, v, angle = _full(x), _full(v), self.level * math.pi / 2
        noise = x + (1 - at.sigma) * v
        mean = (1 - at.sigma_next) * clean(x, v, at) + at.sigma_next * math.cos(angle) * noise
        return mean, at.sigma_next * math.sin(angle)

    def log_prob(self, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:  # noqa: ARG002
        """Finite for std 0 too (0 where y is the mean)."""
        return row_mean(-((_full(y) - mean) ** 2))


Noise = Annotated[FlowSDE | DanceSDE | WanSDE | CPS, Field(discriminator="type")]
"""Any of the built-in strategies, chosen by `type`."""
