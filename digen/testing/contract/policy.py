"""What every TAG policy must do: decide about a bubble from its facts alone (docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest

from digen.schedule.costs import Costs
from digen.schedule.tag import Activity, Bubble, TagPolicy, parse
from digen.testing import SimulatedGroup, simulate, simulated_config
from digen.types import Span, SpanKind

BUBBLE = Bubble(
    step=1, num_microbatches=6, pending=3, unscored=0, ready=0, trained=2, assisted=0,
    trainer=Activity("trainer"), generators=(Activity("generator", "generate", 1, 0.5, rows=4),),
    max_in_flight=2, ahead=0, naive=False, rows=4, kept=4, pending_rows=12, next_rows=4, unscored_rows=16, untaken=16,
)  # fmt: skip
SECONDS: Mapping[tuple[SpanKind, str], tuple[float, int]] = {
    ("generate", "generator"): (1.0, 4), ("score", "generator"): (0.1, 4), ("pull", "generator"): (0.1, 0),
    ("assist", "trainer"): (2.0, 4), ("update", "trainer"): (0.5, 4), ("sync", "trainer"): (0.1, 0),
}  # fmt: skip
"""Seconds, and samples, of a call."""
COSTS = Costs.of(
    Span(kind, worker, step, 0, step, 10.0 * step, 10.0 * step + seconds, rows)
    for step in range(3)
    for (kind, worker), (seconds, rows) in SECONDS.items()
)


class TagPolicyContract:
    """Subclass it as `class TestMine(TagPolicyContract)` and set `policy`, as `schedule.tag` would name it."""

    policy: ClassVar[str]

    def test_it_chooses_between_nothing_and_the_next_micro_batch(self) -> None:
        for bubble, costs in product(self._bubbles(), (COSTS, Costs())):
            choice = self._made().choose(bubble, costs)
            assert 0 <= choice.rows <= bubble.next_rows
            assert choice.latency_s is None or choice.latency_s >= 0

    def test_it_needs_no_costs_to_answer_and_answers_the_same_twice(self) -> None:
        policy = self._made()
        for bubble in self._bubbles():
            assert policy.choose(bubble, Costs()) == policy.choose(bubble, Costs())
            assert policy.choose(bubble, COSTS) == self._made().choose(bubble, COSTS)

    @pytest.mark.parametrize(("generate", "update"), [(1.0, 0.2), (0.2, 1.0), (1.0, 1.0)])
    def test_runs_with_it_end_and_learn_what_they_learn_without(self, generate: float, update: float) -> None:
        """A policy decides who generates, never what."""
        learned = {self._weights(tag, generate, update) for tag in (self.policy, "none")}
        assert len(learned) == 1

    def _made(self) -> TagPolicy:
        return parse(self.policy)

    def _bubbles(self) -> list[Bubble]:
        """One micro-batch is being generated, `pending` have not begun, the others are trained."""
        return [
            replace(
                BUBBLE, pending=pending, trained=5 - pending, assisted=assisted, pending_rows=4 * pending,
                unscored_rows=4 * (pending + 1), untaken=4 * (pending + 1),
            )
            for pending, assisted in ((5, 0), (3, 2), (1, 0), (1, 4))
        ]  # fmt: skip

    def _weights(self, tag: str, generate: float, update: float) -> str:
        generator = SimulatedGroup("generator", generate=generate, score=0.05, pull=0.05)
        trainer = SimulatedGroup("trainer", generate=2 * generate, update=update, sync=0.1)
        schedule = {"tag": tag, "ordered": True}
        simulate(simulated_config(steps=4, schedule=schedule), [generator], trainer, prompts_per_step=6)
        return trainer.weights.hex()
