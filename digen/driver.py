"""The driver: Algorithm 1 of the paper (section 3.4.1), one loop that decides what every worker group does next.

Invariant: here is all mutable state of a run, and it is references and rewards, never tensors (rules R2, R4). What may
start is decided by pure code in `schedule/`; what was started is awaited in one place, `inflight.py`. The modes, and
where we differ from the paper, are in docs/design/driver.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from digen import credit
from digen.calls import Calls
from digen.checkpoint.saves import Saves
from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import ConfigError, DivergedError, RewardError
from digen.inflight import NO_INDEX, Done, InFlight, Work
from digen.metrics import log_prob_complaint
from digen.observe.base import Observer
from digen.observe.files import RunFolder
from digen.reports import Reports
from digen.rewards.total import optional
from digen.schedule import tag
from digen.schedule.costs import Costs
from digen.schedule.share import share_of
from digen.schedule.staleness import StalenessPolicy
from digen.step import GlobalStep
from digen.supervision import Revive, Supervision
from digen.types import (
    Decision,
    Prompt,
    Published,
    Ref,
    Rollout,
    ScoredRollout,
    Scores,
    Span,
    SpanKind,
    Start,
    Stats,
    StepReport,
    Version,
    merge_stats,
)
from digen.versions import Versions

Duty = Callable[[WorkerGroup], Work[Any] | None]
"""Looks for one kind of work for an idle group, and takes it out of its queue."""


class Driver:
    """Runs the global steps `start.version` .. `num_steps` - 1 on worker groups that are loaded.

    Consumes: the prompts of each step, by one call of `prompts(step)`, in step order.
    Waits for: calls on worker groups, at most one under way on each.
    Produces: optimizer steps on the trainer; spans, rows and notes for the observer; sample grids and checkpoints.
    Unblocked by: any call that ends. When none is under way and none may start, it raises instead of waiting.

    No `generators`: colocated. `total`: each row's reward from its single ones, not finite where one failed. `drop`:
    frees what a reference stands for. `run_dir`: None writes no file. `costs`: measured before. `scorer`: scores in
    place of everybody else. `revive`: starts a lost group again. ConfigError when schedule and groups do not fit.
    """

    flight: InFlight

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
        start: Start = Start(),  # noqa: B008 - a frozen value
        costs: Costs = Costs(),  # noqa: B008 - a frozen value
        scorer: WorkerGroup | None = None,
        revive: Revive | None = None,
    ) -> None:
        self.config, self.schedule, self.algorithm = config, config.schedule, config.algorithm
        self.generators, self.trainer, self.scorer = tuple(generators), trainer, scorer
        self.groups = (*generators, *([scorer] if scorer else []), trainer)
        self.prompts, self.num_steps, self.total, self.drop = prompts, num_steps, total, drop
        self.observer, self.note, self.folder = observer, observer.on_note, RunFolder(run_dir) if run_dir else None
        self.share = share_of(self.schedule)
        self.tag = self.share if self.share and self.share.trainer else tag.parse(self.schedule.tag)
        self.max_in_flight = self.schedule.max_in_flight or len(self.generators) + 1
        updates = config.trainer.updates_per_rollout
        self.staleness = StalenessPolicy(self.schedule.staleness, self.schedule.window, updates)
        self.supervision = Supervision(config, self.generators, scorer, revive, self)
        self.duties = self.assign_duties()

        self.start, self.version = start, start.version
        self.steps: dict[int, GlobalStep] = {}  # the current step; under TCSS also the next
        self.calls = Calls(config, total, self.folder, self.note)
        pulled = lambda: {work.version for work, _ in self.flight.running() if work.kind == "pull"}  # noqa: E731
        self.versions = Versions((g.name for g in generators), None if start.loaded else 0, drop, pulled)
        self.saves = Saves(config, self.folder, num_steps, start.version, self.note)
        self.reports = Reports(config, observer, self.saves, start)
        self.costs, self.bubble_skipped = costs, False

    def assign_duties(self) -> dict[str, tuple[Duty, ...]]:
        """What each group looks for when it is idle, most urgent first: this is what the modes differ in."""
        mode, num_generators = self.schedule.mode, len(self.generators)
        if (mode == "colocated") != (num_generators == 0):
            allowed = "none with colocated, one or more with naive and pipelined"
            raise ConfigError(f"schedule.mode={mode}: got {num_generators} generators, allowed: {allowed}")
        scoring: tuple[Duty, ...] = () if self.scorer else (self.scoring,)
        rest: tuple[Duty, ...] = (*scoring, self.generating) if mode == "colocated" else (self.assisting,)
        generator: tuple[Duty, ...] = (*scoring, self.pulling, self.helping, self.handing, self.generating)
        trainer: tuple[Duty, ...] = (self.saving, self.publishing, self.updating, self.syncing, *rest)
        each: dict[str, tuple[Duty, ...]] = dict.fromkeys((g.name for g in self.generators), generator)
        each |= {self.trainer.name: trainer} | ({self.scorer.name: (self.scoring,)} if self.scorer else {})
        return {name: (self.supervision.reviving, *duties) for name, duties in each.items()}

    # Algorithm 1; the numbers are the paper's lines -----------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step. An error of any work cancels all other work and leaves as it is."""
        self.started_s = anyio.current_time() - self.start.elapsed_s
        async with InFlight(self.supervision.limit_s) as self.flight:
            self.open_steps()
            for group in self.groups:
                self.flight.watch(group)
            for rollout in self.start.rollouts:
                self.steps[rollout.microbatch.step].made_before(rollout)
            while not self.finished:  # 4
                for group in self.groups:
                    if self.flight.idle(group) and (work := self.next_work(group)):  # 5-8, 18-20
                        self.flight.start(work)  # 9, 21
                for done in await self.flight.finished():  # 11, 23
                    self.settle(done)  # 12-16, 24-31
        self.versions.drop_all()

    @property
    def finished(self) -> bool:
        running = any(work.kind != "load" for work, _ in self.flight.running())
        return self.version >= self.num_steps and not self.saves.due(self.version) and not running

    def next_work(self, group: WorkerGroup) -> Work[Any] | None:
        """The first work that one of the group's duties finds."""
        duties = () if self.supervision.gone(group) else self.duties[group.name]
        return next(filter(None, (duty(group) for duty in duties)), None)

    def settle(self, done: Done[Any]) -> None:
        """Record what ended, then let it move its micro-batch, or the version, on."""
        if done.lost:
            return self.supervision.lost(done.work, done.lost)
        work, start, end = done.work, done.start - self.started_s, done.end - self.started_s
        span = Span(work.kind, work.group.name, work.step, work.index, work.version, start, end, work.rows)
        self.observer.on_span(span)
        self.costs = self.costs.add(span)
        if work.group is self.trainer:
            self.bubble_skipped = False
        return work.then(done.value)

    # Steps ----------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> GlobalStep | None:
        """The step that the present weights belong to; None after the last."""
        return self.steps.get(self.version)

    @property
    def due(self) -> Version:
        """The version that the current step is generated under."""
        return self.staleness.on_policy(self.version)

    def open_steps(self) -> None:
        """Cut into micro-batches every step that may be worked on under the present weights."""
        for index in range(self.version, min(self.staleness.last_step(self.version) + 1, self.num_steps)):
            if index not in self.steps:
                self.steps[index] = GlobalStep.of(self.config, index, self.prompts(index))

    def bubble(self, step: GlobalStep) -> tag.Bubble:
        """The facts that policies decide from."""
        sound = filter(self.supervision.sound, self.generators)
        doing = tuple(self.flight.activity(g, old=self.versions.holds[g.name] != self.due) for g in sound)
        ahead = sum(s.num_allowed(self.staleness, self.version) for s in self.steps.values() if s is not step)
        naive, limit = self.schedule.mode == "naive", self.max_in_flight
        trainer, scorer = self.flight.activity(self.trainer), self.flight.activity(self.scorer) if self.scorer else None
        return step.bubble(trainer, doing, max_in_flight=limit, ahead=ahead, naive=naive, scorer=scorer)

    def forget(self, group: WorkerGroup) -> None:
        """A generator or scorer was lost, and with it gradients that it has not handed over, and its weights."""
        for step in self.steps.values():
            for scored, _ in step.helpers.pop(group.name, ()):
                step.not_trained(scored)
        self.versions.begun_anew(group.name)

    # Generation, by generators and (TAG) by the trainer: fills SQ ----------------------------------------------------

    def generating(self, group: WorkerGroup) -> Work[Rollout] | None:
        """Lines 5-8. Only under the newest weights: a trajectory never sees two versions (TCSS)."""
        step = self.step_to_generate()
        if step is None or self.versions.holds.get(group.name, self.version) != self.due:
            return None
        rows = step.num_samples
        if self.share and step is self.current:
            rows = self.share.generate(group.name, self.bubble(step), self.costs)
        return self.generation("generate", group, step, rows)

    def step_to_generate(self) -> GlobalStep | None:
        """The step whose next micro-batch may start: the current one, or the next as far as its stale share allows."""
        for step in self.steps.values():
            if step.pending:
                microbatch = step.pending[0].microbatch
                allowed = self.staleness.allows(microbatch, self.version, step.num_stale, step.num_samples)
                return step if allowed and self.flight.count("generate", "assist") < self.max_in_flight else None
        return None

    def assisting(self, trainer: WorkerGroup) -> Work[Rollout] | None:
        """TAG in a bubble: nothing may be trained, and no score is about to change that (rule R3); a scorer is slow."""
        step = self.step_to_generate()
        if step is None or step is not self.current or self.version != self.due or self.tag == tag.NONE:
            return None
        if self.bubble_skipped or (self.scorer is None and self.flight.count("score", step=step.index)):
            return None
        if not (bubble := self.bubble(step)).generators:  # all are being started again
            return None
        choice = self.tag.choose(bubble, self.costs)
        self.bubble_skipped = not choice.rows
        now = anyio.current_time() - self.started_s
        end = now + choice.latency_s if choice.latency_s is not None else None
        self.observer.on_decision(Decision(step.index, trainer.name, now, choice.rows, end))
        step.num_assisted += 1 if choice.rows else 0
        return self.generation("assist", trainer, step, choice.rows) if choice.rows else None

    def generation(self, kind: SpanKind, group: WorkerGroup, step: GlobalStep, rows: int) -> Work[Rollout]:
        piece, version = step.take_pending(rows), self.due
        microbatch, stale = piece.microbatch, version < self.staleness.on_policy(step.index)
        step.num_stale += len(piece.rows) if stale else 0
        do = partial(self.calls.generate, group, microbatch, version, piece.rows)
        undo = partial(step.not_generated, piece, stale=stale)
        return Work(kind, group, step.index, microbatch.index, version, do, step.generated, len(piece.rows), undo)

    # Scoring: SQ to UQ ----------------------------------------------------------------------------------------------

    def scoring(self, group: WorkerGroup) -> Work[Scores] | None:
        """The oldest rollout of SQ, the current step's first. Scoring goes before generation (section 3.3)."""
        for step in self.steps.values():
            if step.unscored:
                rollout = step.unscored.popleft()
                do, then = partial(self.calls.score, group, rollout), partial(self.scored, step, rollout)
                batch, undo = rollout.microbatch, partial(step.unscored.appendleft, rollout)
                return Work("score", group, step.index, batch.index, rollout.version, do, then, batch.num_samples, undo)
        return None

    def scored(self, step: GlobalStep, rollout: Rollout, scores: Scores) -> None:
        """Lines 12-16: advantages, selection, into UQ. Raises RewardError if set to stop on a failed reward (R17)."""
        for failure in credit.failures(rollout, scores, optional(self.config.reward)):
            if self.config.scoring.on_failure == "stop":
                raise RewardError(f"{failure}, after {self.schedule.retries} retries; scoring.on_failure=stop")
            self.note(f"step {step.index}: {failure}; its group is dropped")
        parts = credit.parts(self.config, scores)
        step.scored(credit.credit(rollout, self.total(scores), self.algorithm, parts), scores)
        for shard in rollout.shards:
            self.drop(shard.media)

    # Update: UQ to gradients, by the trainer and by generators that help ---------------------------------------------

    def updating(self, trainer: WorkerGroup) -> Work[tuple[Stats, ...]] | None:
        """Lines 18-20: the smallest index that is ready; only pipelined mode begins before all are scored."""
        step = self.current
        if step is None or not step.ready:
            return None
        if self.schedule.mode != "pipelined" and not all(s.all_scored for s in self.steps.values()):
            return None
        if self.schedule.ordered and min(step.ready) != step.num_trained:
            return None
        rows = self.share.update(trainer.name, self.bubble(step), self.costs) if self.share else step.num_samples
        # Sharded trainers reduce gradients with the last one, which nobody can name when others take part of it.
        last = self.schedule.generators_help or step.num_trained + 1 == len(step.microbatches)
        return self.update("update", trainer, step, rows, last)

    def helping(self, generator: WorkerGroup) -> Work[tuple[Stats, ...]] | None:
        """A generator that has nothing to generate for this step computes gradients, under the trainer's weights."""
        step = self.current
        if not self.share or step is None or not step.ready or step.pending:
            return None
        if not self.share.generators or self.versions.holds[generator.name] != self.version:
            return None
        rows = self.share.update(generator.name, self.bubble(step), self.costs)
        if not rows:
            return None
        step.helpers.setdefault(generator.name, [])
        return self.update("help", generator, step, rows, True)

    def update(
        self, kind: SpanKind, group: WorkerGroup, step: GlobalStep, rows: int, last: bool
    ) -> Work[tuple[Stats, ...]]:
        scored = step.take_ready(rows)
        do = partial(group.call, "accumulate", scored, self.config.trainer.tsp, step.denominator, last)
        helper = group.name if kind == "help" else None
        then, undo = partial(self.updated, step, scored, helper), partial(step.not_trained, scored) if helper else None
        rollout, count = scored.rollout, sum(scored.keep)
        return Work(kind, group, step.index, rollout.microbatch.index, rollout.version, do, then, count, undo)

    def updated(self, step: GlobalStep, scored: ScoredRollout, helper: str | None, parts: tuple[Stats, ...]) -> None:
        """Lines 24-26. A log-prob gap is noted once a step, or raises DivergedError if set to stop (rule R10)."""
        stats = merge_stats(*parts)
        if helper:
            step.helpers[helper].append((scored, stats))
        for trajectory in () if helper else step.trained(scored, stats):
            self.drop(trajectory)
        complaint = log_prob_complaint(step.index, stats, self.config.trainer.log_prob_gap)
        if complaint and self.config.trainer.on_log_prob_gap == "stop":
            self.saves.stop(self.version, DivergedError(complaint))
        if complaint and not step.gap_noted:
            step.gap_noted = True
            self.note(complaint)

    def handing(self, generator: WorkerGroup) -> Work[tuple[Ref, ...]] | None:
        """What a generator accumulated goes to the trainer: when none is left, or before it begins the next step."""
        step = self.current
        if step is None or generator.name not in step.helpers or (step.untaken and not self.step_to_generate()):
            return None

        def handed(refs: tuple[Ref, ...]) -> None:
            for trajectory in (ref for part in step.helpers.pop(generator.name) for ref in step.trained(*part)):
                self.drop(trajectory)
            step.handed += refs

        do = partial(generator.call, "hand_gradients")
        return Work("reduce", generator, step.index, NO_INDEX, self.version, do, handed, undo=lambda: None)

    # Sync: gradients to weights, weights to generators ---------------------------------------------------------------

    def syncing(self, trainer: WorkerGroup) -> Work[tuple[StepReport, Published | None]] | None:
        """Lines 27-30, the trainer's half, once every micro-batch of the step is trained."""
        step = self.current
        if step is None or not step.all_trained or step.helpers:
            return None
        do, then = partial(self.sync, step), partial(self.synced, step)
        return Work("sync", trainer, step.index, NO_INDEX, step.index + 1, do, then)

    async def sync(self, step: GlobalStep) -> tuple[StepReport, Published | None]:
        """One optimizer step. Its weights are published unless nobody will pull them."""
        for handed in sorted(step.handed, key=lambda ref: ref.key):
            await self.trainer.call("add_gradients", handed)
            self.drop(handed)
        scale = credit.gradient_scale(self.config, [scored for scored, _ in step.scored_in_order()])
        report: StepReport = (await self.trainer.call("optimizer_step", scale))[0]
        await self.saves.finish(self.trainer, wait=False)
        version = step.index + 1
        wanted = self.generators and version < self.num_steps and version == self.staleness.on_policy(version)
        return report, await self.publish(version) if wanted else None

    async def publish(self, version: Version) -> Published:
        published: Published = (await self.trainer.call("push", version))[0]
        return published

    def synced(self, step: GlobalStep, outcome: tuple[StepReport, Published | None]) -> None:
        report, published = outcome
        self.version = step.index + 1  # 28
        del self.steps[step.index]
        self.supervision.progress()
        if published:
            self.versions.offer(published)
        busy_s = {group.name: self.flight.take_busy_s(group) for group in self.groups}
        now_s, due = anyio.current_time() - self.started_s, self.staleness.on_policy(step.index)
        self.reports.ended(step, report, due, now_s, busy_s)
        self.open_steps()  # 30

    def publishing(self, trainer: WorkerGroup) -> Work[Published] | None:
        """A resumed run's weights must reach the generators before its first step."""
        if not self.versions.unpublished:
            return None
        do = partial(self.publish, self.version)
        return Work("sync", trainer, self.version, NO_INDEX, self.version, do, self.versions.offer)

    def pulling(self, group: WorkerGroup) -> Work[tuple[str, ...]] | None:
        """Line 29, a generator's half: when it is idle, before its next micro-batch, never within one (rule R6)."""
        newest = self.versions.due(group.name)
        if newest is None:
            return None
        do, then = partial(group.call, "pull", newest), partial(self.versions.pulled, group.name, newest)
        return Work("pull", group, self.version, NO_INDEX, newest.version, do, then, undo=lambda: None)

    def saving(self, trainer: WorkerGroup) -> Work[None] | None:
        if not self.saves.due(self.version):
            return None
        # Which samples of the coming steps are stale is settled: under the new weights no more of them may begin.
        stale = {index: step.num_stale for index, step in self.steps.items() if step.num_stale}
        old = self.version - self.staleness.updates_per_rollout if stale else None
        facts = {"num_steps": self.num_steps, **self.reports.facts, "stale": stale}
        do = partial(self.saves.save, trainer, self.version, old, facts)
        return Work("save", trainer, self.version - 1, NO_INDEX, self.version, do, lambda _: None)
