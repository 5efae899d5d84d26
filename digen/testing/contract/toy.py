"""A flow with one weight that any algorithm must be able to teach: the real parts of an algorithm, no model.

Invariant: sampling, replay and loss are those of a run (`digen/backends/`), row for row, on two by two latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from digen.algos.base import Algorithm, LossInputs, Transition
from digen.algos.sde import clean, euler

TARGET = 1.0
"""What samples are rewarded for: to be near to it."""


def sigmas(num_steps: int) -> Tensor:
    """Noise levels (T+1,) from 1 to 0, most of them high, as those of large pictures are."""
    even = torch.linspace(1.0, 0.0, num_steps + 1)
    return 3 * even / (1 + 2 * even)


@dataclass
class ToyFlow:
    """The exact flow from noise to a normal distribution around `centre` with std 0.5: a model with one weight."""

    centre: Tensor

    def velocity(self, x: Tensor, at: Transition) -> Tensor:
        s, variance = at.sigma, 0.25
        slope = (s - (1 - s) * variance) / ((1 - s) ** 2 * variance + s**2)
        return slope * (x - (1 - s) * self.centre) - self.centre


@dataclass(frozen=True)
class Rows:
    """Trained (sample, timestep) pairs of one group, N of them, and the rewards of all its samples."""

    x: Tensor
    y: Tensor
    steps: Tensor
    log_prob: Tensor
    mean: Tensor
    advantage: Tensor
    rewards: list[float]

    def __getitem__(self, part: slice) -> Rows:
        """Some of the rows."""
        x, y, steps = self.x[part], self.y[part], self.steps[part]
        return Rows(x, y, steps, self.log_prob[part], self.mean[part], self.advantage[part], self.rewards)


class Toy:
    """Generates for an algorithm, and replays what was generated."""

    def __init__(self, algorithm: Algorithm, num_steps: int) -> None:
        self.algorithm, self.num_steps, self.sigmas = algorithm, num_steps, sigmas(num_steps)

    def at(self, step: int | Tensor, x: Tensor) -> Transition:
        """Noise levels of these rows, all at one step or each at its own."""
        index = torch.full((len(x),), step) if isinstance(step, int) else step
        return Transition.at(self.sigmas, index, x.ndim)

    @torch.no_grad()
    def generate(self, flow: ToyFlow, step: int) -> Rows:
        """One group of global step `step`, credited."""
        algorithm, group = self.algorithm, self.algorithm.samples_per_prompt
        self.generator = torch.Generator().manual_seed(step)
        one = algorithm.same_initial_noise
        start = self._noise(1 if one else group).repeat(group if one else 1, 1, 1)
        trained = [algorithm.steps.trained(0, step, 0, sample, self.num_steps) for sample in range(group)]
        record = self._renoised if algorithm.noise.forward_process else self._denoised
        media, kept = record(flow, start, algorithm.steps.noisy(0, step, 0, self.num_steps), trained)
        rewards = [float(-((sample - TARGET) ** 2).mean()) for sample in media]
        advantages = algorithm.advantage(rewards)
        selected = algorithm.select(advantages)
        kept = [row for row in kept if selected[row[0]]]
        index = torch.tensor([row[1] for row in kept])
        x, y, log_prob, mean = (torch.stack(column) for column in zip(*(row[2:] for row in kept), strict=True))
        credit = torch.tensor([advantages[row[0]] for row in kept])
        return Rows(x, y, index, log_prob, mean, credit, rewards)

    def _noise(self, number: int) -> Tensor:
        return torch.randn((number, 2, 2), generator=self.generator)

    def _denoised(
        self, flow: ToyFlow, x: Tensor, noisy: tuple[int, ...], trained: list[tuple[int, ...]]
    ) -> tuple[Tensor, list[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]]:
        algorithm, kept, media = self.algorithm, [], x
        for i in range(self.num_steps):
            at = self.at(i, x)
            v = flow.velocity(x, at)
            y = euler(x, v, at)
            if i in noisy:
                mean, std = algorithm.noise.mean_std(x, v, at)
                y = mean + std * self._noise(len(x))
                log_prob = algorithm.noise.log_prob(y, mean, std)
                kept += [(k, i, x[k], y[k], log_prob[k], mean[k]) for k in range(len(x)) if i in trained[k]]
            media = clean(x, v, at) if algorithm.decode == "clean" else y
            x = y
        return media, kept

    def _renoised(
        self, flow: ToyFlow, x: Tensor, _: tuple[int, ...], trained: list[tuple[int, ...]]
    ) -> tuple[Tensor, list[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]]:
        """Samples made without noise, each then noised anew to the levels of its trained steps."""
        algorithm, kept = self.algorithm, []
        for i in range(self.num_steps):
            x = euler(x, flow.velocity(x, self.at(i, x)), self.at(i, x))
        for i in range(self.num_steps):
            e = self._noise(1).expand_as(x) if algorithm.noise.draws_per_group else self._noise(len(x))
            noised, y, at = (1 - self.sigmas[i]) * x + self.sigmas[i] * e, e - x, self.at(i, x)
            mean, std = algorithm.noise.mean_std(noised, flow.velocity(noised, at), at)
            log_prob = algorithm.noise.log_prob(y, mean, std)
            kept += [(k, i, noised[k], y[k], log_prob[k], mean[k]) for k in range(len(x)) if i in trained[k]]
        return x, kept

    def replay(self, flow: ToyFlow, base: ToyFlow, rows: Rows) -> LossInputs:
        """What the loss of these rows is given."""
        algorithm, where = self.algorithm, self.at(rows.steps, rows.x)
        mean, std = algorithm.noise.mean_std(rows.x, flow.velocity(rows.x, where), where)
        reference, _ = algorithm.noise.mean_std(rows.x, base.velocity(rows.x, where), where)
        paired = algorithm.loss.rows_together == 2
        return LossInputs(
            new_log_prob=algorithm.noise.log_prob(rows.y, mean, std),
            old_log_prob=rows.log_prob,
            advantage=rows.advantage,
            mean=mean,
            std=std,
            at=where,
            reference_mean=reference if algorithm.loss.needs_reference else None,
            old_mean=rows.mean if "mean" in algorithm.records else None,
            next_latents=rows.y,
            partner=torch.arange(len(rows.x)) ^ 1 if paired else None,  # the two of a pair lie side by side
        )
