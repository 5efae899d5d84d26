"""What every algorithm must do, whatever it is made of (docs/algorithm-plugin.md)."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError

from digen.algos.base import Algorithm, LossTerms
from digen.testing.contract.toy import Rows, Toy, ToyFlow


class AlgorithmContract:
    """Subclass it as `class TestMine(AlgorithmContract)` and set `algorithm`."""

    algorithm: ClassVar[Algorithm]
    num_steps: ClassVar[int] = 10
    """Denoising steps that it is tried with."""
    learning_rate: ClassVar[float] = 0.05
    """Of the toy's one weight, by Adam, so nearly the distance it goes in a step."""

    def test_it_is_a_strict_frozen_config_that_is_written_and_read_back(self) -> None:
        kind, written = type(self.algorithm), self.algorithm.model_dump()
        assert kind.model_validate(written) == self.algorithm
        with pytest.raises(ValidationError):
            kind.model_validate({**written, "not_a_key_of_it": 1})
        with pytest.raises(ValidationError):
            self.algorithm.__setattr__("samples_per_prompt", 3)

    def test_trained_steps_are_noisy_ones_the_same_number_for_all_and_decided_by_identity(self) -> None:
        chosen, num_steps = self.algorithm.steps, self.num_steps
        chosen.check(num_steps)
        for seed, step, prompt in ((0, 0, 0), (0, 1, 0), (0, 7, 3), (9, 40, 12)):
            noisy = chosen.noisy(seed, step, prompt, num_steps)
            assert noisy == chosen.noisy(seed, step, prompt, num_steps)
            for sample in range(self.algorithm.samples_per_prompt):
                trained = chosen.trained(seed, step, prompt, sample, num_steps)
                assert trained == chosen.trained(seed, step, prompt, sample, num_steps), "a draw, not an identity"
                assert len(trained) == chosen.num_trained(num_steps) > 0
                assert list(trained) == sorted(set(trained))
                assert set(trained) <= set(noisy), "a step without noise has no log-probability"
                assert num_steps - 1 not in trained, "the last step has next to no noise"

    def test_advantages_are_finite_belong_to_their_samples_and_are_zero_without_differences(self) -> None:
        number = self.algorithm.samples_per_prompt
        rewards = [math.sin(3.0 * k) for k in range(number)]
        advantages = self.algorithm.advantage(rewards)
        assert len(advantages) == number
        assert all(map(math.isfinite, advantages))
        assert any(advantages)
        assert self.algorithm.advantage(rewards[::-1]) == pytest.approx(advantages[::-1], abs=1e-9)
        assert self.algorithm.advantage([0.3] * number) == [0.0] * number
        assert sum(self.algorithm.select(advantages)) == self.algorithm.kept_per_prompt()
        assert math.isfinite(self.algorithm.advantage.gradient_scale([rewards, rewards[::-1]]))

    def test_the_ratio_is_1_before_the_first_update(self) -> None:
        terms = self._terms(self._rows())
        assert (terms.stats["ratio"] - 1).abs().max() <= 1e-6

    def test_a_row_has_a_loss_of_its_own_so_that_no_cut_or_order_of_rows_matters(self) -> None:
        """Rule R11. Rows that a loss compares (`rows_together`) stay together."""
        rows, together = self._rows(), self.algorithm.loss.rows_together
        number, whole = len(rows.x), self._terms(rows)
        assert whole.loss.shape == (number,)
        cuts = (rows[k : k + together] for k in range(0, number, together))
        torch.testing.assert_close(torch.cat([self._terms(cut).loss for cut in cuts]), whole.loss, rtol=1e-6, atol=1e-7)

    def test_the_loss_has_a_finite_gradient_and_reports_values_without_one(self) -> None:
        flow, rows = ToyFlow(torch.full((), 0.3, requires_grad=True)), self._rows()
        terms = self._terms(rows, flow)
        terms.loss.mean().backward()  # type: ignore[no-untyped-call]
        assert flow.centre.grad is not None
        assert torch.isfinite(flow.centre.grad)
        assert flow.centre.grad != 0
        for name, values in terms.stats.items():
            assert values.shape == (len(rows.x),), name
            assert not values.requires_grad, name

    def test_it_teaches_a_flow_with_one_weight(self) -> None:
        toy = Toy(self.algorithm, self.num_steps)
        flow, base = ToyFlow(torch.zeros((), requires_grad=True)), ToyFlow(torch.zeros(()))
        optimizer = torch.optim.Adam([flow.centre], lr=self.learning_rate, eps=1e-12)
        rewards = []
        for step in range(25):
            rows = toy.generate(flow, step)
            optimizer.zero_grad()
            self.algorithm.loss(toy.replay(flow, base, rows)).loss.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rewards.append(sum(rows.rewards) / len(rows.rewards))
        assert 0.5 < float(flow.centre.detach()) < 1.5, "it did not come near the rewarded 1"
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3

    def _rows(self) -> Rows:
        """What is trained of one group."""
        return Toy(self.algorithm, self.num_steps).generate(ToyFlow(torch.full((), 0.3)), 3)

    def _terms(self, rows: Rows, flow: ToyFlow | None = None) -> LossTerms:
        """The loss of these rows, before any update."""
        base = ToyFlow(torch.full((), 0.3))
        return self.algorithm.loss(Toy(self.algorithm, self.num_steps).replay(flow or base, base, rows))
