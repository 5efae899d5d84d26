"""Faults for simulated runs: whatever can happen to a worker, drawn from a seed, on a virtual clock.

Invariant: a run under faults either ends with exactly the weights of the same run without any, or with an error of
ours; every sample of a step is in its gradient exactly once; nothing waits for ever, since the virtual clock would jump
to the end of time. Loss of the trainer is answered as `digen run` does it: from the newest checkpoint.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import anyio
import trio.lowlevel
from trio.testing import MockClock

from digen.checkpoint.manifest import Part
from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import DigenError, WorkerDied, WorkerError
from digen.observe.base import StepRow
from digen.testing import Recorder, SimulatedGroup, simulated_config, simulated_driver, virtual_run
from digen.types import Ref, ScoredRollout, Span, Start, Stat, StepReport

STEPS: Final = 3
HANG_S: Final = 100.0
"""`engine.hang_s` of the runs; their calls take 2 s at most."""
RESTARTS: Final = 6
END_OF_TIME_S: Final = 1e7
LOAD_S: Final = 5.0

KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill": ("generate", "score", "pull", "accumulate", "optimizer_step", "push", "save", "hand_gradients"),
    "hang": ("generate", "score", "pull", "accumulate", "optimizer_step", "push"),
    "exception": ("generate", "score", "accumulate", "pull"),
    "slow": ("generate", "score", "pull", "accumulate", "optimizer_step"),
    "lost result": ("generate", "score", "pull", "accumulate", "optimizer_step", "push"),
    "duplicated result": ("generate", "score", "pull"),
    "corrupt weights": ("pull",),
    "full disk": ("written",),
    "clock jump": ("generate", "score", "accumulate"),
    "reward outage": ("score",),
    "killed while idle": ("generate", "score"),
}
"""Kind of fault -> calls that it can happen to."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What happens at a group's `number`-th call of a method; `size`: seconds, or how often."""

    kind: str
    group: str
    method: str
    number: int
    size: float

    @property
    def name(self) -> str:
        """One that a file can have."""
        return f"{self.kind}-{self.group}-{self.method}-{self.number}-{self.size:g}"


class Books(SimulatedGroup):
    """A simulated group that keeps books of what is trained: each of a step's `samples` once, before its weights."""

    def __init__(self, name: str, samples: int, **more: Any) -> None:
        self.ledger: list[tuple[int, int, int]] = []
        super().__init__(name, record=False, **more)
        self.samples = samples

    def renew(self) -> None:
        super().renew()
        self.ledger = []

    def _accumulate(
        self, rank: int, scored: ScoredRollout, tsp: int, denominator: float, last: bool
    ) -> dict[str, Stat]:
        microbatch = scored.rollout.microbatch
        rows = [row for row in microbatch.rows(rank, self.world_size) if scored.keep[row]]
        for prompt, sample in map(microbatch.identity, rows):
            self.ledger.append((microbatch.step, prompt.id, sample))
        return super()._accumulate(rank, scored, tsp, denominator, last)

    def _hand_gradients(self, rank: int) -> Ref:
        handed = ([], []) if rank else (self._gradient, self.ledger)
        self._gradient, self.ledger = (self._gradient, self.ledger) if rank else ([], [])
        return self.store.put("gradients", handed)

    def _add_gradients(self, rank: int, handed: Ref) -> None:
        if rank == 0:
            gradient, entries = self.store.get(handed)
            self._gradient += gradient
            self.ledger += map(tuple, entries)

    def _optimizer_step(self, rank: int, gradient_scale: float) -> StepReport:
        if rank == 0:
            twice = [entry for entry, count in Counter(self.ledger).items() if count > 1]
            steps = {step for step, _, _ in self.ledger}
            assert not twice, f"trained twice: {twice}"
            assert steps == {self.version}, f"trained in step {self.version}: samples of {steps}"
            assert len(self.ledger) == self.samples, f"{len(self.ledger)} of {self.samples} samples trained"
            self.ledger = []
        return super()._optimizer_step(rank, gradient_scale)


class FaultyGroup(Books):
    """A group to which what is `planned` happens, once each; `disk`: version -> weights of its checkpoints."""

    def __init__(
        self, name: str, planned: Sequence[Planned], disk: dict[int, float], samples: int, **more: Any
    ) -> None:
        super().__init__(name, samples, **more)
        self.planned = {(fault.method, fault.number): fault for fault in planned if fault.group == name}
        self.counts: Counter[str] = Counter()
        self.happened: list[Planned] = []
        self.disk, self.saved = disk, (0, 0.0)
        self.outage = 0

    async def call(self, method: str, /, *args: Any) -> tuple[Any, ...]:
        if self.lost:
            raise self.die(method)
        fault = self.planned.pop((method, self.counts[method]), None)
        self.counts[method] += 1
        if self.outage and method == "score":
            self.outage -= 1
            raise WorkerError(self.name, 0, method, "the reward does not answer")
        if fault is None:
            values = await super().call(method, *args)
        else:
            self.happened.append(fault)
            values = await self._with(fault, method, args)
        if self.lost:
            raise self.die(method)
        return values

    async def _with(self, fault: Planned, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        call = partial(super().call, method, *args)
        match fault.kind:
            case "kill":
                await anyio.sleep(fault.size / 10)
                raise self.die(method)
            case "hang":
                await anyio.sleep_forever()
            case "exception" | "reward outage":
                self.outage = round(fault.size) if fault.kind == "reward outage" else 0
                raise WorkerError(self.name, 0, method, "an injected exception")
            case "slow":
                await anyio.sleep(fault.size)
            case "lost result":
                await call()
                await anyio.sleep_forever()
            case "duplicated result":
                await call()
            case "clock jump":
                cast("MockClock", trio.lowlevel.current_clock()).jump(fault.size * 10)
        values = await call()
        if fault.kind == "corrupt weights":
            return ("corrupt",) * len(values)
        if fault.kind == "full disk":
            return (Part(problem="No space left on device"),) * len(values)
        if fault.kind == "killed while idle":
            trio.lowlevel.spawn_system_task(self._die_later, fault.size / 10)
        return values

    async def _die_later(self, seconds: float) -> None:
        """While it is idle, or else a moment before its next call."""
        await trio.sleep(seconds)
        self.die()

    def _save(self, _rank: int, _path: Path, _aside: str, _stale: int | None) -> None:
        self.saved = self.version, self.weights

    def _seal(self, _rank: int, _path: Path, _aside: str, _files: object, _facts: object) -> None:
        version, weights = self.saved
        self.disk[version] = weights


@dataclass(frozen=True)
class Setup:
    """A run, and what happens to it, all from `seed`."""

    seed: int
    faults: tuple[Planned, ...] = ()
    schedule: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    prompts: int = 4
    scorer: bool = False
    every: int = 1
    restarts: int = RESTARTS
    samples: int = 2
    """Of each prompt."""
    ranks: int = 1
    """Of each generator that is made of processes."""

    @classmethod
    def drawn(cls, seed: int) -> Setup:
        """A schedule, costs and up to four faults."""
        rng = random.Random(f"setup/{seed}")  # noqa: S311 - no secret
        mode = rng.choice(["pipelined"] * 6 + ["naive", "colocated"])
        schedule: dict[str, Any] = {"mode": mode, "prompts_per_microbatch": rng.randint(1, 2)}
        scorer = mode != "colocated" and rng.random() < 0.2
        if mode == "pipelined":
            schedule["staleness"] = rng.choice([0.0, 0.0, 0.0, 0.5])
            schedule["assist"] = rng.choice(["none", "none", "trainer", "generator", "both"])
        if mode != "colocated" and not scorer and schedule.get("assist", "none") == "none":
            schedule["tag"] = rng.choice(["none", "static(1)", "bts"])
        replicas = 0 if mode == "colocated" else rng.randint(1, 3)
        names = ["trainer", *(f"g{k}" for k in range(replicas)), *(["scorer"] if scorer else [])]
        faults = []
        for _ in range(rng.randint(1, 4)):
            kind = rng.choice(list(KINDS))
            method, group = rng.choice(KINDS[kind]), rng.choice(names)
            faults.append(Planned(kind, group, method, rng.randrange(8), rng.choice([1.0, 2.0, 9.0, 500.0])))
        return cls(seed, tuple(faults), schedule, replicas, rng.randint(2, 6), scorer, rng.choice([0, 1, 1, 1, 2]))

    @property
    def config(self) -> RunConfig[Any]:
        scoring = {"timeout_s": 20.0, **({"devices": "cpu"} if self.scorer else {})}
        engine = {"hang_s": HANG_S, "restarts": self.restarts}
        sections = {"engine": engine, "scoring": scoring, "checkpoint": {"every": self.every}}
        return simulated_config(steps=STEPS, samples_per_prompt=self.samples, schedule=dict(self.schedule), **sections)

    @property
    def names(self) -> list[str]:
        """Of its groups."""
        return ["trainer", *(f"g{k}" for k in range(self.replicas)), *(["scorer"] if self.scorer else [])]

    def group(self, name: str, disk: dict[int, float]) -> FaultyGroup:
        rng = random.Random(f"costs/{self.seed}/{name}")  # noqa: S311 - no secret
        kinds = ("generate", "score", "update", "sync", "pull", "save")
        seconds = {kind: rng.choice([0.0, 0.5, 1.0, rng.uniform(0.0, 2.0)]) for kind in kinds}
        ranks, samples = rng.randint(1, 2), self.samples * self.prompts
        return FaultyGroup(name, self.faults, disk, samples, world_size=ranks, **seconds)


@dataclass(slots=True)
class Ended:
    """How a run ended: its weights, or its error; what happened to it, and how often it was begun again."""

    weights: float | None = None
    error: DigenError | None = None
    happened: list[Planned] = field(default_factory=list)
    restarts: int = 0
    notes: list[str] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    """Of metrics, of all attempts."""
    spans: list[Span] = field(default_factory=list)
    """Of the last attempt."""
    left: int = 0
    """Entries of the store that nobody dropped."""


def run_to_the_end(setup: Setup) -> Ended:
    """One run; what is lost with the trainer is done again from the newest checkpoint, as `digen run` does."""
    ended, disk, failures, planned = Ended(), dict[int, float](), 0, list(setup.faults)
    while True:
        first = max(disk, default=0)
        left = replace(setup, faults=tuple(planned))
        groups = {name: left.group(name, disk) for name in setup.names}
        try:
            _run(setup, groups, disk, ended)
        except WorkerDied as died:
            failures = failures + 1 if max(disk, default=0) == first else 1
            if failures > setup.restarts or not setup.every:
                ended.error = died
        except DigenError as error:
            ended.error = error
        else:
            ended.weights = groups["trainer"].weights
            ended.left = len(groups["trainer"].store.items)
        for group in groups.values():
            ended.happened += group.happened
        planned = [fault for fault in planned if fault not in ended.happened]
        if ended.error or ended.weights is not None:
            return ended
        ended.restarts += 1


def _run(setup: Setup, groups: Mapping[str, FaultyGroup], disk: Mapping[int, float], ended: Ended) -> None:
    trainer, scorer = groups["trainer"], groups.get("scorer")
    generators = [group for name, group in groups.items() if name.startswith("g")]
    trainer.version = max(disk, default=0)
    trainer.weights = disk.get(trainer.version, 0.0)
    start, recorder = Start(trainer.version, loaded=trainer.version > 0), Recorder()

    async def revive(group: WorkerGroup) -> None:
        await anyio.sleep(LOAD_S)
        cast("FaultyGroup", group).renew()

    options: dict[str, Any] = {"run_dir": Path("nowhere"), "start": start, "revive": revive, "scorer": scorer}
    prompts = setup.prompts
    driver = simulated_driver(setup.config, generators, trainer, recorder, prompts_per_step=prompts, **options)
    if scorer:
        scorer.store = trainer.store

    async def main() -> None:
        with anyio.fail_after(END_OF_TIME_S):
            await driver.run()

    try:
        virtual_run(main)
    finally:
        ended.notes += recorder.notes
        ended.rows += recorder.rows
        ended.spans = recorder.spans
