"""Simulated worker groups and a virtual clock: the real driver, its schedules in exact seconds, in no time.

Invariant: a simulated group keeps the contract of a real one (one call at a time, generation only under the weights
asked for, every reference stored once and read before it is dropped) and breaks loudly when the driver does not. Its
model is one number that really learns, so that two schedules can be compared by what they train.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from trio.testing import MockClock

from digen.algos.flowgrpo import FlowGRPO
from digen.checkpoint.manifest import Part
from digen.config import RunConfig
from digen.driver import Driver
from digen.engines.base import WorkerGroup
from digen.errors import WorkerDied, WorkerError
from digen.observe.base import StepRow
from digen.types import (
    Decision,
    MicroBatch,
    Prompt,
    Published,
    Ref,
    Rollout,
    ScoredRollout,
    Scores,
    Shard,
    Span,
    Stat,
    StepReport,
)

T = TypeVar("T")
Seconds = float | Callable[..., float]
"""What a call takes: always the same, or a function of the call's arguments. Groups that draw at random must each have
a source of their own: which of two calls of one instant begins first is the event loop's choice.
"""

LEARNING_RATE = 0.1


def virtual_run(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run an async function on a clock that jumps to the next event whenever all tasks wait."""
    options = {"clock": MockClock(autojump_threshold=0)}
    return anyio.run(main, *args, backend="trio", backend_options=options)


class SimulatedStore:
    """A store of numbers that is strict: a key is put once, and what was dropped cannot be read."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.num_put = 0
        self.peak = 0

    def put(self, name: str, item: Any) -> Ref:
        self.num_put += 1
        key = f"{name}#{self.num_put}"
        self.items[key] = item
        self.peak = max(self.peak, len(self.items))
        return Ref(key, 8)

    def get(self, ref: Ref) -> Any:
        return self.items[ref.key]

    def drop(self, ref: Ref) -> None:
        self.items.pop(ref.key, None)


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a group was asked for; times in seconds of the event loop's clock."""

    method: str
    args: tuple[Any, ...]
    start: float
    end: float


@dataclass(slots=True)
class Fault:
    """The next `times` calls of a method fail on `rank`, or only those whose arguments `when` picks."""

    method: str
    error: str = "RuntimeError: injected"
    times: float = math.inf
    rank: int = 0
    when: Callable[..., bool] = lambda *_: True
    kind: type[WorkerError] = WorkerError


class SimulatedGroup:
    """A worker group that takes as long as it is told and records what it was asked.

    Generators and trainer alike: a trainer's `generate` is an assist, its `sync` is optimizer step and push together.
    `reward(prompt, sample, value)` gives a row's reward, `value` being what was generated for it; `alter` changes what
    a method returns on a rank, by the method's name. `generate` and `update` are for a whole micro-batch of which all
    samples are trained; a part of it takes its part.
    """

    def __init__(
        self,
        name: str,
        *,
        generate: Seconds = 0.0,
        score: Seconds = 0.0,
        update: Seconds = 0.0,
        sync: Seconds = 0.0,
        pull: Seconds = 0.0,
        save: Seconds = 0.0,
        world_size: int = 1,
        reward: Callable[[Prompt, int, float], float] | None = None,
        alter: Mapping[str, Callable[[Any], Any]] | None = None,
        faults: Sequence[Fault] = (),
        record: bool = True,
    ) -> None:
        self.name, self.world_size, self.record = name, world_size, record
        self.seconds: dict[str, Seconds] = {
            "generate": generate,
            "score": score,
            "accumulate": update,
            "optimizer_step": sync,
            "pull": pull,
            "save": save,
        }
        self.reward = reward or (lambda _prompt, _sample, value: value)
        self.alter, self.faults = dict(alter or {}), list(faults)
        self.store = SimulatedStore()
        self.calls: list[Call] = []
        self.renew()

    def renew(self) -> None:
        """What an engine's `respawn` and then `load` make of a group: it has the weights that all begin with."""
        self.version, self.weights = 0, 0.0
        self._gradient: list[float] = []
        self._busy = False
        self._lost: WorkerDied | None = None
        self._end: anyio.Event | None = None

    @property
    def lost(self) -> WorkerDied | None:
        """How it died."""
        return self._lost

    def die(self, method: str = "wait") -> WorkerDied:
        """From now on it is dead."""
        self._lost = WorkerDied(self.name, 0, method, "killed")
        if self._end:
            self._end.set()
        return self._lost

    async def ended(self) -> None:
        """Return when it is dead."""
        self._end = anyio.Event()
        if not self._lost:
            await self._end.wait()

    async def call(self, method: str, /, *args: Any) -> tuple[Any, ...]:
        """Take the method's time, then do it on every rank."""
        assert not self._busy, f"{self.name} was asked to {method} while it was at work"
        self._busy, start = True, anyio.current_time()
        try:
            await _sleep(self.seconds.get(method, 0.0), args, _share(method, args))
            self._fail_if_told(method, args)
            values = tuple(self._on_rank(method, rank, args) for rank in range(self.world_size))
        finally:
            self._busy = False
        if self.record:
            self.calls.append(Call(method, args, start, anyio.current_time()))
        return values

    def asked(self, method: str) -> list[Call]:
        """The calls of a method that ended well, in order."""
        return [call for call in self.calls if call.method == method]

    def _fail_if_told(self, method: str, args: tuple[Any, ...]) -> None:
        for fault in self.faults:
            if fault.method == method and fault.times > 0 and fault.when(*args):
                fault.times -= 1
                raise fault.kind(self.name, fault.rank, method, fault.error)

    def _on_rank(self, method: str, rank: int, args: tuple[Any, ...]) -> Any:
        value = getattr(self, f"_{method}")(rank, *args)
        return self.alter[method](value) if method in self.alter else value

    def _generate(self, rank: int, microbatch: MicroBatch, version: int, asked: tuple[int, ...]) -> Shard:
        assert version == self.version, f"{self.name} has version {self.version}, was asked to generate under {version}"
        rows = asked[rank :: self.world_size]
        values = {row: identity_value(microbatch, row) + self.weights for row in rows}
        return Shard(rows, self.store.put("trajectory", values), self.store.put("media", values))

    def _score(self, rank: int, rollout: Rollout) -> Scores:
        media: dict[int, float] = {}
        for shard in rollout.shards:
            media.update(self.store.get(shard.media))
        rows = rollout.microbatch.rows(rank, self.world_size)
        identities = [(*rollout.microbatch.identity(row), media[row]) for row in rows]
        return Scores(("value",), rows, tuple((self.reward(*identity),) for identity in identities))

    def _accumulate(
        self, rank: int, scored: ScoredRollout, _tsp: int, denominator: float, _last: bool
    ) -> dict[str, Stat]:
        values: dict[int, float] = {}
        for shard in scored.rollout.shards:
            values.update(self.store.get(shard.trajectory))
        rows = [row for row in scored.rollout.microbatch.rows(rank, self.world_size) if scored.keep[row]]
        self._gradient += [scored.advantages[row] * values[row] / denominator for row in rows]
        return {"ratio": Stat(float(len(rows)), len(rows), 1.0, 1.0)} if rows else {}

    def _hand_gradients(self, rank: int) -> Ref:
        gradient, self._gradient = self._gradient if rank == 0 else [], []
        return self.store.put("gradients", gradient)

    def _add_gradients(self, rank: int, handed: Ref) -> None:
        if rank == 0:
            self._gradient += self.store.get(handed)

    def _optimizer_step(self, rank: int, gradient_scale: float) -> StepReport:
        if rank == 0:
            self.gradient = gradient_scale * math.fsum(self._gradient)
            self.weights += LEARNING_RATE * self.gradient
            self.version += 1
            self._gradient = []
        size = abs(self.gradient)
        return StepReport(size, LEARNING_RATE, LEARNING_RATE * size, applied=size > 0, finite=True)

    def _push(self, rank: int, version: int) -> Published | None:
        if rank > 0:
            return None
        assert version == self.version, f"{self.name} has version {self.version}, was asked to push {version}"
        return Published(version, self.store.put("weights", self.weights), self.weights.hex())

    def _pull(self, _rank: int, published: Published) -> str:
        self.weights, self.version = self.store.get(published.weights), published.version
        return self.weights.hex()

    def _draw(self, _rank: int, rollout: Rollout, rewards: tuple[float, ...], _path: Path) -> None:
        assert len(rewards) == rollout.microbatch.num_samples
        assert all(self.store.get(shard.media) is not None for shard in rollout.shards)

    def _save(self, _rank: int, _path: Path, _aside: str, _stale: int | None) -> None:
        """Nothing is written: simulated groups leave no trace."""

    def _written(self, _rank: int, _wait: bool) -> Part:
        return Part()

    def _seal(self, _rank: int, _path: Path, _aside: str, _files: object, _facts: object) -> None:
        """Nothing was written."""


def identity_value(microbatch: MicroBatch, row: int) -> float:
    """A number in [0, 1) that looks random and depends on the sample's identity alone (rule R8)."""
    prompt, sample = microbatch.identity(row)
    return random.Random(f"{microbatch.seed}/{microbatch.step}/{prompt.id}/{sample}").random()  # noqa: S311 - no secret


def _share(method: str, args: tuple[Any, ...]) -> float:
    """Which part of a micro-batch a call is about."""
    if method == "generate":
        microbatch, _, rows = args
        return len(rows) / int(microbatch.num_samples)
    if method == "accumulate":
        keep: tuple[bool, ...] = args[0].keep
        return sum(keep) / len(keep)
    return 1.0


async def _sleep(seconds: Seconds, args: tuple[Any, ...], share: float) -> None:
    """Wait until a whole nanosecond, so that sums of costs that are equal on paper are one instant here."""
    if (duration_s := share * (seconds(*args) if callable(seconds) else seconds)) > 0:
        await anyio.sleep_until(round(anyio.current_time() + duration_s, 9))


@dataclass(slots=True)
class Recorder:
    """An observer that keeps everything."""

    spans: list[Span] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def on_span(self, span: Span) -> None:
        self.spans.append(span)

    def on_decision(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def on_step(self, row: StepRow) -> None:
        self.rows.append(row)

    def on_note(self, message: str) -> None:
        self.notes.append(message)

    def close(self) -> None:
        """Nothing to close."""

    @property
    def end_s(self) -> float:
        """When the last work ended, in seconds since the start of the run."""
        return max((span.end for span in self.spans), default=0.0)


def simulated_config(*, steps: int = 1, samples_per_prompt: int = 2, **sections: Any) -> RunConfig[FlowGRPO]:
    """A config for simulated groups: `simulated_config(steps=3, schedule={"mode": "naive"})`."""
    algorithm = FlowGRPO(samples_per_prompt=samples_per_prompt)
    return RunConfig[FlowGRPO].model_validate({"algorithm": algorithm, "steps": steps, **sections})


def simulated_prompts(step: int, num_prompts: int) -> tuple[Prompt, ...]:
    """Prompts of a step, each with an id of its own."""
    return tuple(Prompt(step * num_prompts + k, f"prompt {step * num_prompts + k}") for k in range(num_prompts))


def simulated_driver(
    config: RunConfig[Any],
    generators: Sequence[WorkerGroup],
    trainer: WorkerGroup,
    observer: Recorder,
    *,
    prompts_per_step: int = 4,
    **options: Any,
) -> Driver:
    """The real driver on simulated groups, which are given one store; `options` are further ones of `Driver`."""
    store = SimulatedStore()
    for group in (*generators, trainer):
        if isinstance(group, SimulatedGroup):
            group.store = store
    defaults: dict[str, Any] = {
        "prompts": partial(simulated_prompts, num_prompts=prompts_per_step),
        "num_steps": config.steps,
        "total": lambda scores: tuple(math.fsum(values) for values in scores.values),
        "drop": store.drop,
        "observer": observer,
    }
    return Driver(config, generators, trainer, **{**defaults, **options})


def simulate(
    config: RunConfig[Any], generators: Sequence[SimulatedGroup], trainer: SimulatedGroup, **options: Any
) -> Recorder:
    """Run to the end in virtual time; spans, rows and notes. `options` as of `simulated_driver`."""
    recorder = Recorder()
    virtual_run(simulated_driver(config, generators, trainer, recorder, **options).run)
    return recorder
