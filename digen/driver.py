"""The driver: Algorithm 1 of the paper (section 3.4.1), one loop that decides what every worker group does next.

Invariant: here is all mutable state of a run, and it is references and rewards, never tensors (rules R2, R4). What may
start is decided by pure code in `schedule/`; what was started is awaited in one place, `inflight.py`. The modes, and
where we differ from the paper, are in docs/design/driver.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from digen import credit, gather
from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import ConfigError, DivergedError, RewardError, SyncError, WorkerDied, WorkerError
from digen.inflight import NO_INDEX, Done, InFlight, Work
from digen.metrics import StepFacts, log_prob_complaint, step_row
from digen.observe.base import Observer
from digen.observe.files import RunFolder
from digen.schedule import gap, tag
from digen.schedule.costs import Costs
from digen.schedule.staleness import StalenessPolicy
from digen.step import GlobalStep
from digen.types import (
    Prompt,
    Published,
    Ref,
    Rollout,
    ScoredRollout,
    Scores,
    Span,
    SpanKind,
    Stats,
    StepReport,
    Version,
    merge_stats,
)

Duty = Callable[[WorkerGroup], Work[Any] | None]
"""Looks for one kind of work for an idle group, and takes it out of its queue."""


class Driver:
    """Runs the global steps `version` .. `num_steps` - 1 on worker groups that are loaded.

    Consumes: the prompts of each step, by one call of `prompts(step)`, in step order.
    Waits for: calls on worker groups, at most one under way on each.
    Produces: optimizer steps on the trainer; spans, rows and notes for the observer; sample grids and checkpoints.
    Unblocked by: any call that ends. When none is under way and none may start, it raises instead of waiting.

    No `generators`: colocated. `total`: each row's reward from its single ones, not finite where one failed. `drop`:
    frees what a reference stands for. `run_dir`: None writes no file. `version` > 0: the trainer holds these weights,
    the generators do not yet. Raises ConfigError when schedule and groups do not fit.
    """

    def __init__(
        self,
        config: RunConfig[Any],
        generators: Sequence[WorkerGroup],
        trainer: WorkerGroup,
        *,
        prompts: Callable[[int], tuple[Prompt, ...]],
        num_steps: int,
        total: Callable[[Scores], tuple[float, ...]],
        drop: Callable[[Ref], None],
        observer: Observer,
        run_dir: Path | None = None,
        version: Version = 0,
    ) -> None:
        self.config, self.schedule, self.algorithm = config, config.schedule, config.algorithm
        self.generators, self.trainer, self.groups = tuple(generators), trainer, (*generators, trainer)
        self.prompts, self.num_steps, self.total, self.drop = prompts, num_steps, total, drop
        self.observer, self.note, self.folder = observer, observer.on_note, RunFolder(run_dir) if run_dir else None
        self.tag = tag.parse(self.schedule.tag)
        self.max_in_flight = self.schedule.max_in_flight or len(self.groups)
        self.staleness = StalenessPolicy(self.schedule.staleness, self.schedule.window)
        self.duties = self.assign_duties()

        self.version = version
        self.steps: dict[int, GlobalStep] = {}  # the current step; under TCSS also the next
        self.holds: dict[str, Version | None] = {g.name: None if version else 0 for g in generators}
        self.published: list[Published] = []  # the newest last; older ones while they are being read
        self.saved_version = version
        self.costs = Costs()
        self.bubble_skipped = False
        self.num_bad_steps = 0

    def assign_duties(self) -> dict[str, tuple[Duty, ...]]:
        """What each group looks for when it is idle, most urgent first: this is what the modes differ in."""
        mode, num_generators = self.schedule.mode, len(self.generators)
        if (mode == "colocated") != (num_generators == 0):
            allowed = "none with colocated, one or more with naive and pipelined"
            raise ConfigError(f"schedule.mode={mode}: got {num_generators} generators, allowed: {allowed}")
        rest: tuple[Duty, ...] = (self.scoring, self.generating) if mode == "colocated" else (self.assisting,)
        generator: tuple[Duty, ...] = (self.scoring, self.pulling, self.generating)
        trainer: tuple[Duty, ...] = (self.saving, self.publishing, self.updating, self.syncing, *rest)
        return dict.fromkeys((group.name for group in self.generators), generator) | {self.trainer.name: trainer}

    # Algorithm 1; the numbers are the paper's lines -----------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step. An error of any work cancels all other work and leaves as it is."""
        self.started_s = self.step_started_s = anyio.current_time()
        async with InFlight() as self.flight:
            self.open_steps()
            while not self.finished:  # 4
                for group in self.groups:
                    if self.flight.idle(group) and (work := self.next_work(group)):  # 5-8, 18-20
                        self.flight.start(work)  # 9, 21
                for done in await self.flight.finished():  # 11, 23
                    self.settle(done)  # 12-16, 24-31
        self.drop_weights(self.published)

    @property
    def finished(self) -> bool:
        return self.version >= self.num_steps and not self.unsaved and not self.flight.running()

    def next_work(self, group: WorkerGroup) -> Work[Any] | None:
        """The first work that one of the group's duties finds."""
        for duty in self.duties[group.name]:
            if work := duty(group):
                return work
        return None

    def settle(self, done: Done[Any]) -> None:
        """Record what ended, then let it move its micro-batch, or the version, on."""
        work, start, end = done.work, done.start - self.started_s, done.end - self.started_s
        span = Span(work.kind, work.group.name, work.step, work.index, work.version, start, end)
        self.observer.on_span(span)
        self.costs = self.costs.add(span)
        if work.group is self.trainer:
            self.bubble_skipped = False
        work.then(done.value)

    # Steps ----------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> GlobalStep | None:
        """The step that the present weights belong to; None after the last."""
        return self.steps.get(self.version)

    def open_steps(self) -> None:
        """Cut into micro-batches every step that may be worked on under the present weights."""
        size, per_microbatch = self.algorithm.samples_per_prompt, self.schedule.prompts_per_microbatch
        for index in range(self.version, min(self.version + self.staleness.lag + 1, self.num_steps)):
            if index not in self.steps:
                prompts = self.prompts(index)
                microbatches = gap.cut(index, prompts, size, per_microbatch, self.config.seed)
                self.steps[index] = GlobalStep(index, microbatches, credit.denominator(self.config, len(prompts)))

    # Generation, by generators and (TAG) by the trainer: fills SQ ----------------------------------------------------

    def generating(self, group: WorkerGroup) -> Work[Rollout] | None:
        """Lines 5-8. Only under the newest weights: a trajectory never sees two versions (TCSS)."""
        step = self.step_to_generate()
        if step is None or self.holds.get(group.name, self.version) != self.version:
            return None
        return self.generation("generate", group, step)

    def step_to_generate(self) -> GlobalStep | None:
        """The step whose next micro-batch may start: the current one, or the next as far as its stale share allows."""
        for step in self.steps.values():
            if step.pending:
                allowed = self.staleness.allows(step.pending[0], self.version, step.num_stale, step.num_samples)
                return step if allowed and self.flight.count("generate", "assist") < self.max_in_flight else None
        return None

    def assisting(self, trainer: WorkerGroup) -> Work[Rollout] | None:
        """TAG in a bubble: nothing may be trained, and no score is about to change that (rule R3)."""
        step = self.step_to_generate()
        if step is None or step is not self.current or self.bubble_skipped:
            return None
        if self.flight.count("score", step=step.index):
            return None
        doing = tuple(self.flight.activity(g, old=self.holds[g.name] != self.version) for g in self.generators)
        ahead = sum(s.num_allowed(self.staleness, self.version) for s in self.steps.values() if s is not step)
        naive, limit = self.schedule.mode == "naive", self.max_in_flight
        bubble = step.bubble(self.trainer.name, doing, max_in_flight=limit, ahead=ahead, naive=naive)
        self.bubble_skipped = not self.tag.assists(bubble, self.costs)
        if self.bubble_skipped:
            return None
        step.num_assisted += 1
        return self.generation("assist", trainer, step)

    def generation(self, kind: SpanKind, group: WorkerGroup, step: GlobalStep) -> Work[Rollout]:
        microbatch, version = step.pending.popleft(), self.version
        step.num_stale += microbatch.num_samples if version < step.index else 0

        async def generate() -> Rollout:
            shards = await self.attempt(group, "generate", microbatch, version)
            return gather.rollout(microbatch, version, shards, group.name)

        return Work(kind, group, step.index, microbatch.index, version, generate, step.unscored.append)

    # Scoring: SQ to UQ ----------------------------------------------------------------------------------------------

    def scoring(self, group: WorkerGroup) -> Work[Scores] | None:
        """The oldest rollout of SQ, the current step's first. Scoring goes before generation (section 3.3)."""
        for step in self.steps.values():
            if step.unscored:
                rollout = step.unscored.popleft()
                do, then = partial(self.score, group, rollout), partial(self.scored, step, rollout)
                return Work("score", group, step.index, rollout.microbatch.index, rollout.version, do, then)
        return None

    async def score(self, group: WorkerGroup, rollout: Rollout) -> Scores:
        """Single rewards of all rows. What failed is asked for again, `schedule.retries` times (rule R17)."""
        microbatch = rollout.microbatch
        scores = gather.scores(microbatch, await self.attempt(group, "score", rollout), group.name)
        for attempt in range(self.schedule.retries):
            if not (failed := gather.failed(scores)):
                break
            self.note(f"step {microbatch.step}: {len(failed)} rewards failed, trying again ({attempt + 1})")
            parts = await self.attempt(group, "score", rollout)
            scores = gather.mend(scores, gather.scores(microbatch, parts, group.name))
        await self.draw(group, rollout, scores)
        return scores

    async def draw(self, group: WorkerGroup, rollout: Rollout, scores: Scores) -> None:
        """The sample grid of every `observe.grid_every` steps. A picture that fails is no reason to stop a run."""
        step, every = rollout.microbatch.step, self.config.observe.grid_every
        if self.folder is None or rollout.microbatch.index > 0 or not every or step % every:
            return
        try:
            await group.call("draw", rollout, self.total(scores), self.folder.sample_grid(step))
        except WorkerDied:
            raise
        except WorkerError as error:
            self.note(f"step {step}: no sample grid: {error}")

    def scored(self, step: GlobalStep, rollout: Rollout, scores: Scores) -> None:
        """Lines 12-16: advantages, selection, into UQ. Raises RewardError if set to stop on a failed reward (R17)."""
        index = rollout.microbatch.index
        for failure in credit.failures(rollout, scores):
            if self.config.scoring.on_failure == "stop":
                raise RewardError(f"{failure}, after {self.schedule.retries} retries; scoring.on_failure=stop")
            self.note(f"step {step.index}: {failure}; its group is dropped")
        step.ready[index] = scored = credit.credit(rollout, self.total(scores), self.algorithm)
        step.results[index] = scored, scores
        for shard in rollout.shards:
            self.drop(shard.media)

    # Update: UQ to gradients ----------------------------------------------------------------------------------------

    def updating(self, trainer: WorkerGroup) -> Work[tuple[Stats, ...]] | None:
        """Lines 18-20: the smallest index that is ready; only pipelined mode begins before all are scored."""
        step = self.current
        if step is None or not step.ready or (self.schedule.mode != "pipelined" and not step.all_scored):
            return None
        index = min(step.ready)
        if self.schedule.ordered and index != step.num_trained:
            return None
        scored, last = step.ready.pop(index), step.num_trained + 1 == len(step.microbatches)
        do = partial(trainer.call, "accumulate", scored, self.config.trainer.tsp, step.denominator, last)
        then = partial(self.updated, step, scored)
        return Work("update", trainer, step.index, index, scored.rollout.version, do, then)

    def updated(self, step: GlobalStep, scored: ScoredRollout, parts: tuple[Stats, ...]) -> None:
        """Lines 24-26. A log-prob gap is noted once a step, or raises DivergedError if set to stop (rule R10)."""
        step.num_trained += 1
        step.stats[scored.rollout.microbatch.index] = stats = merge_stats(*parts)
        for shard in scored.rollout.shards:
            self.drop(shard.trajectory)
        complaint = log_prob_complaint(step.index, stats, self.config.trainer.log_prob_gap)
        if complaint and self.config.trainer.on_log_prob_gap == "stop":
            raise DivergedError(complaint)
        if complaint and not step.gap_noted:
            step.gap_noted = True
            self.note(complaint)

    # Sync: gradients to weights, weights to generators ---------------------------------------------------------------

    def syncing(self, trainer: WorkerGroup) -> Work[tuple[StepReport, Published | None]] | None:
        """Lines 27-30, the trainer's half, once every micro-batch of the step is trained."""
        step = self.current
        if step is None or not step.all_trained:
            return None
        do, then = partial(self.sync, step), partial(self.synced, step)
        return Work("sync", trainer, step.index, NO_INDEX, step.index + 1, do, then)

    async def sync(self, step: GlobalStep) -> tuple[StepReport, Published | None]:
        """One optimizer step. Its weights are published unless nobody will pull them."""
        rewards = credit.whole_groups(scored for scored, _ in step.scored_in_order())
        scale = self.algorithm.advantage.gradient_scale(rewards) if rewards else 1.0
        report: StepReport = (await self.trainer.call("optimizer_step", scale))[0]
        wanted = self.generators and step.index + 1 < self.num_steps
        return report, await self.publish(step.index + 1) if wanted else None

    async def publish(self, version: Version) -> Published:
        published: Published = (await self.trainer.call("push", version))[0]
        return published

    def synced(self, step: GlobalStep, outcome: tuple[StepReport, Published | None]) -> None:
        report, published = outcome
        self.version = step.index + 1  # 28
        del self.steps[step.index]
        if published:
            self.offer(published)
        self.report(step, report)
        self.open_steps()  # 30

    def publishing(self, trainer: WorkerGroup) -> Work[Published] | None:
        """A resumed run's weights must reach the generators before its first step."""
        if self.published or None not in self.holds.values():
            return None
        do = partial(self.publish, self.version)
        return Work("sync", trainer, self.version, NO_INDEX, self.version, do, self.offer)

    def offer(self, published: Published) -> None:
        self.published.append(published)
        self.drop_superseded()

    def pulling(self, group: WorkerGroup) -> Work[tuple[str, ...]] | None:
        """Line 29, a generator's half: when it is idle, before its next micro-batch, never within one (rule R6)."""
        if not self.published or self.holds[group.name] == self.published[-1].version:
            return None
        newest = self.published[-1]
        do, then = partial(group.call, "pull", newest), partial(self.pulled, group, newest)
        return Work("pull", group, self.version, NO_INDEX, newest.version, do, then)

    def pulled(self, group: WorkerGroup, published: Published, fingerprints: tuple[str, ...]) -> None:
        """Rule R15: what is loaded is what was published. Raises SyncError."""
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != published.fingerprint:
                raise SyncError(
                    f"{group.name} rank {rank} has other weights than the trainer after pulling version "
                    f"{published.version}: fingerprint {fingerprint}, expected {published.fingerprint}"
                )
        self.holds[group.name] = published.version
        self.drop_superseded()

    def drop_superseded(self) -> None:
        """Free all published weights but the newest, and those that a generator is still reading."""
        read = {work.version for work, _ in self.flight.running() if work.kind == "pull"}
        self.drop_weights([p for p in self.published[:-1] if p.version not in read])

    def drop_weights(self, old: Iterable[Published]) -> None:
        for published in list(old):
            self.drop(published.weights)
            self.published.remove(published)

    # The end of a step ----------------------------------------------------------------------------------------------

    def report(self, step: GlobalStep, report: StepReport) -> None:
        """The step's row; too many non-finite gradients in a row raise DivergedError."""
        now, results = anyio.current_time(), step.scored_in_order()
        stats = merge_stats(*(step.stats[index] for index in sorted(step.stats)))
        length_s, self.step_started_s = now - self.step_started_s, now
        busy = {g.name: self.flight.take_busy_s(g) / length_s if length_s else 0.0 for g in self.groups}
        facts = StepFacts(step.index, results, stats, report, now - self.started_s, length_s, busy)
        self.observer.on_step(step_row(facts))
        self.num_bad_steps = 0 if report.finite else self.num_bad_steps + 1
        if self.num_bad_steps:
            sentence = f"step {step.index}: the gradient is not finite, {self.num_bad_steps} steps in a row now"
            if self.num_bad_steps >= self.config.trainer.max_bad_steps:
                raise DivergedError(f"{sentence}; trainer.max_bad_steps={self.config.trainer.max_bad_steps}")
            self.note(f"{sentence}; nothing was applied")

    @property
    def unsaved(self) -> bool:
        """Whether the present weights are still to be written: every `checkpoint.every` steps, and the last."""
        every = self.config.checkpoint.every
        due = self.version == self.num_steps or (every > 0 and self.version % every == 0)
        return self.folder is not None and due and self.saved_version < self.version

    def saving(self, trainer: WorkerGroup) -> Work[object] | None:
        if self.folder is None or not self.unsaved:
            return None
        do = partial(trainer.call, "save", self.folder.checkpoint(self.version))
        return Work("save", trainer, self.version - 1, NO_INDEX, self.version, do, self.saved)

    def saved(self, _: object) -> None:
        self.saved_version = self.version

    # Calls ----------------------------------------------------------------------------------------------------------

    async def attempt(self, group: WorkerGroup, method: str, *args: Any) -> tuple[Any, ...]:
        """Repeat what fails, `schedule.retries` times, then raise the first cause. Never for an update (rule R18)."""
        causes: list[WorkerError] = []
        while True:
            try:
                return await group.call(method, *args)
            except WorkerDied:
                raise
            except WorkerError as error:
                causes.append(error)
            if len(causes) > self.schedule.retries:
                raise causes[0]
            self.note(f"{causes[-1]}; trying again ({len(causes)})")
