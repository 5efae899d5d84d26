"""What generator and trainer backends must do, one rank of each, on the bundled model (rules R8, R10, R11, R15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from PIL import Image

from digen import credit, plugins
from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.presets import payload, resolve
from digen.types import MicroBatch, Prompt, Rollout, ScoredRollout, Scores, Shard, StepReport

PROMPTS = (Prompt(3, 'a sign that says "OPEN"'), Prompt(8, 'small red letters "CAT" on a white background'))
REWARD = "jpeg-incompressibility"
SMALL = (
    "algorithm.samples_per_prompt=2", "algorithm.steps={type: window, size: 2, low: 0, high: 2}", "steps=2",
    "sampling.num_steps=4", "data.prompts_per_step=2", f"reward={{{REWARD}: {{}}}}", "engine.name=inline",
    "trainer.threads=1", "generator.threads=1", "schedule.assist=none", "schedule.tag=static(1)",
)  # fmt: skip


class _Bench:
    """Workers of one run in this process, which share a store; made anew for each test."""

    side: ClassVar[str]
    """The section of the run's config that names what is tried."""
    backend: ClassVar[str]
    settings: ClassVar[Sequence[str]] = ()
    """Further `section.key=value` of the run that it is tried in."""

    @cached_property
    def config(self) -> RunConfig[Any]:
        named = f"{self.side}.backend={self.backend}"
        return resolve("flowgrpo", "glyph", None, [*SMALL, named, *self.settings], {})

    @cached_property
    def store(self) -> MemoryStore:
        return MemoryStore()

    @cached_property
    def microbatch(self) -> MicroBatch:
        return MicroBatch(0, 0, PROMPTS, self.config.algorithm.samples_per_prompt, self.config.seed)

    def worker(self, kind: plugins.Kind, name: str, group: str) -> Any:
        """A worker of one rank, loaded."""
        made = cast("Any", plugins.find(kind, name))(
            payload(self.config), WorkerContext(group, 0, 1, "cpu", self.store)
        )
        made.load()
        return made

    def rollout(self, worker: Any, version: int = 0) -> Rollout:
        rows = tuple(range(self.microbatch.num_samples))
        return Rollout(self.microbatch, version, (worker.generate(self.microbatch, version, rows),), "worker")

    def scored(self, worker: Any, version: int = 0) -> ScoredRollout:
        """A rollout of the worker with made-up rewards, credited."""
        rewards = [float((7 * row) % 5) for row in range(self.microbatch.num_samples)]
        return credit.credit(self.rollout(worker, version), rewards, self.config.algorithm)

    def media(self, *shards: Shard) -> torch.Tensor:
        """Pixels of the rows of these shards, in order of rows."""
        found = {row: self.store.get(s.media)["media"][k] for s in shards for k, row in enumerate(s.rows)}
        return torch.stack([found[row] for row in sorted(found)]).int()


class GeneratorContract(_Bench):
    """Subclass it as `class TestMine(GeneratorContract)` and set `backend`: a name, or `path.py:Name`."""

    side = "generator"

    @cached_property
    def generator(self) -> Any:
        return self.worker("generators", self.backend, "generator")

    @cached_property
    def partner(self) -> Any:
        """A trainer to take weights from."""
        return self.worker("trainers", "local", "trainer")

    def test_a_sample_is_the_same_whatever_else_is_generated_with_it(self) -> None:
        """Rule R8: GAP, TAG and the number of workers must not change the samples."""
        whole = self.generator.generate(self.microbatch, 0, (0, 1, 2, 3))
        parts = [self.generator.generate(self.microbatch, 0, rows) for rows in ((2,), (0, 3), (1,))]
        assert whole.rows == (0, 1, 2, 3)
        assert [part.rows for part in parts] == [(2,), (0, 3), (1,)]
        assert (self.media(whole) - self.media(*parts)).abs().max() <= 1
        assert len({pixels.numpy().tobytes() for pixels in self.media(whole)}) == self.microbatch.num_samples

    def test_weights_of_another_version_are_not_sampled_from(self) -> None:
        with pytest.raises(RuntimeError, match="version"):
            self.generator.generate(self.microbatch, 1, (0,))

    def test_every_row_is_scored_by_every_reward_in_order(self) -> None:
        scores: Scores = self.generator.score(self.rollout(self.generator))
        assert scores.names == (REWARD,)
        assert scores.rows == (0, 1, 2, 3)
        assert all(value > 0 for (value,) in scores.values)

    def test_new_weights_are_taken_proven_and_used(self) -> None:
        """Rule R15."""
        self.partner.accumulate(self.scored(self.generator), 1, 8.0, True)
        self.partner.optimizer_step(1e6)
        before, published = self.media(*self.rollout(self.generator).shards), self.partner.push(1)
        assert self.generator.pull(published) == published.fingerprint
        assert (self.media(*self.rollout(self.generator, version=1).shards) - before).abs().max() > 0

    def test_a_picture_of_the_samples_is_drawn(self, tmp_path: Path) -> None:
        self.generator.draw(self.rollout(self.generator), (0.0, 0.5, 1.0, 1.5), tmp_path / "grid.png")
        with Image.open(tmp_path / "grid.png") as picture:
            assert picture.width > 0


class TrainerContract(_Bench):
    """Subclass it as `class TestMine(TrainerContract)` and set `backend`: a name, or `path.py:Name`."""

    side = "trainer"

    @cached_property
    def trainer(self) -> Any:
        return self.worker("trainers", self.backend, "trainer")

    def test_it_generates_what_a_generator_would(self) -> None:
        """TAG."""
        partner = self.worker("generators", "diffusers", "generator")
        ours, theirs = (self.media(*self.rollout(worker).shards) for worker in (self.trainer, partner))
        assert (ours - theirs).abs().max() <= 1

    def test_the_ratio_is_1_and_accumulating_changes_no_weight(self) -> None:
        """Rule R10."""
        scored = self.scored(self.trainer)
        stats, before = self.trainer.accumulate(scored, 0, 8.0, False), self.rollout(self.trainer)
        assert stats["ratio"].count == sum(scored.keep) * self.config.algorithm.steps.num_trained(4)
        assert stats["ratio_error"].high <= 1e-5
        assert self.trainer.accumulate(scored, 0, 8.0, True)["ratio_error"].high <= 1e-5
        assert torch.equal(self.media(*self.rollout(self.trainer).shards), self.media(*before.shards))

    def test_neither_stacking_nor_the_cut_into_pieces_changes_the_gradient(self) -> None:
        """Rule R11."""
        scored, whole, halves = (
            self.scored(self.trainer),
            (True,) * 4,
            ((True, True, False, False), (False, False, True, True)),
        )
        reports = []
        for k, (width, parts) in enumerate(((1, (whole,)), (0, (whole,)), (0, halves), (1, halves[::-1]))):
            trainer = self.worker("trainers", self.backend, f"trainer-{k}")
            for keep in parts:
                trainer.accumulate(replace(scored, keep=keep), width, 8.0, keep is parts[-1])
            reports.append(trainer.optimizer_step(1.0))
        for report in reports:
            assert report.applied
            assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)
            assert report.weight_delta == pytest.approx(reports[0].weight_delta, rel=1e-2)

    def test_an_optimizer_step_changes_the_weights_and_without_gradient_it_does_not(self) -> None:
        before, idle = self.rollout(self.trainer), self._step(1.0)
        assert (idle.applied, idle.weight_delta) == (False, 0.0)
        assert torch.equal(self.media(*self.rollout(self.trainer, version=1).shards), self.media(*before.shards))
        self.trainer.accumulate(self.scored(self.trainer, version=1), 1, 8.0, True)
        step = self._step(1.0)
        assert step.applied
        assert step.finite
        assert step.weight_delta > 0

    def _step(self, scale: float) -> StepReport:
        report: StepReport = self.trainer.optimizer_step(scale)
        return report
