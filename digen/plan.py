"""Predictions: how long a step takes in every mode, who is busy, and what the trainer takes over. Paper section 5.6.

Invariant: every number but the lower bound comes from the driver itself (`digen/driver.py`) on simulated groups in
virtual time, so prediction and reality cannot drift apart; costs are constants, so equal input gives equal output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from digen.bound import assisted_share, lower_bound
from digen.config import ScheduleConfig
from digen.errors import ConfigError, one_of
from digen.schedule.staleness import ROUNDING
from digen.testing import Recorder, SimulatedGroup, simulate, simulated_config
from digen.types import MicroBatch, Rollout, ScoredRollout, Span, SpanKind
from digen.workload import TRAINER, Workload, placed, two_kinds

MOST_STEPS = 20
"""Steps that are simulated; those beyond go on as these did."""
MOST_CHECKED = 50
"""Steps of a run that are predicted, spread over all of it."""
ALIKE = 3
"""Steps that are simulated where every step but the first is like the one before."""
PATIENCE = 2
"""How many numbers of assists in a row that are no better end the search for the best one."""
MODES = ("colocated", "naive", "gap", "tsp", "tag-static", "bts", "tcss", "shared")
"""From naive on each adds one idea to the one before; but bts and shared replace the assists of tag-static and bts,
and only tcss lets anything be stale."""
SWEPT = ("naive", "bts", "tcss", "shared")
"""Modes whose step times are compared over splits."""
UNSTACKED = frozenset({"colocated", "naive", "gap"})
"""Modes before TSP."""

Interval = tuple[float, float]
Devices = int | tuple[int, int]
"""So many that are all alike, or so many of the generators' kind and of the trainer's."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One mode. Seconds and shares of the steady state: all steps but the first and the last, if there are others."""

    mode: str
    schedule: ScheduleConfig
    step_time_s: float
    busy_share: float
    """Of all devices that the mode uses."""
    total_s: float
    """Of all steps, from the first work to the last."""
    assists: tuple[float, ...]
    """Micro-batches that the trainer generated in each step, of the first MOST_STEPS."""
    helps: tuple[float, ...]
    """Micro-batches that generators updated on in each step, of the first MOST_STEPS."""
    spans: tuple[Span, ...]
    typical: int
    """A step of the steady state, to be shown."""
    window: Interval
    """From the end of the sync before that step to the end of its own."""

    def as_json(self, naive: Prediction) -> dict[str, Any]:
        """As plain JSON values, with the speed-up to another mode."""
        return {
            "mode": self.mode,
            "step_time_s": self.step_time_s,
            "speedup": naive.step_time_s / self.step_time_s,
            "busy_share": self.busy_share,
            "bubble_share": 1.0 - self.busy_share,
            "total_s": self.total_s,
            "assists": list(self.assists),
            "helps": list(self.helps),
            "schedule": setting(self.schedule),
        }


@dataclass(frozen=True, slots=True)
class Check:
    """A run's own schedule: the median of its steps but the first, predicted and measured."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class Split:
    """So many generator and trainer devices, and the step times of modes by name."""

    generators: int
    trainers: int
    step_times_s: Mapping[str, float]
    borrowed: int = 0
    """Devices of the trainer's kind that generate too, where there are two kinds."""

    @property
    def best_s(self) -> float:
        return min(self.step_times_s.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `digen plan` shows."""

    workload: Workload
    modes: tuple[Prediction, ...]
    lower_bound_s: float
    check: Check | None = None
    splits: tuple[Split, ...] = ()
    notes: tuple[str, ...] = ()

    def mode(self, name: str) -> Prediction:
        """Raises ConfigError when there is none of this name."""
        found = {mode.mode: mode for mode in self.modes}
        if name not in found:
            raise ConfigError(one_of("mode", name, found))
        return found[name]

    @property
    def fastest(self) -> Prediction:
        return min(self.modes, key=lambda mode: mode.step_time_s)

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        document: dict[str, Any] = {
            "modes": [mode.as_json(self.mode("naive")) for mode in self.modes],
            "lower_bound_s": self.lower_bound_s,
            "notes": list(self.notes),
        }
        if self.check:
            check = self.check
            document["run"] = {
                "predicted_s": check.predicted_s,
                "measured_s": check.measured_s,
                "error": check.error,
            }
        if self.splits:
            document["splits"] = [
                {
                    "generators": s.generators,
                    "borrowed": s.borrowed,
                    "trainers": s.trainers,
                    "step_times_s": dict(s.step_times_s),
                }
                for s in self.splits
            ]
        return document


def plan(work: Workload, *, split: bool = False, devices: Devices | None = None) -> Plan:
    """All modes; with `split` also every split of so many devices. Raises ConfigError."""
    if devices is not None and not split:
        raise ConfigError(f"--devices: got {devices} without --split; allowed: both, or neither")
    there = work.devices if work.mixed else sum(work.devices)
    sweep = splits(work, there if devices is None else devices) if split else ()
    modes = tuple(predict(work, mode) for mode in MODES)
    return Plan(work, modes, lower_bound(work), check(work), sweep, notes(work))


def check(work: Workload) -> Check | None:
    """The run's steps under its own schedule, each from what its own work took, beside what they took.

    So it judges the schedule that is simulated; a machine that is slower on some days is no error of a plan.
    """
    if not work.run:
        return None
    own = work.run.work
    steps = work.run.steps[:: ceil(len(work.run.steps) / MOST_CHECKED)]
    count = ALIKE if _alike(own, own.schedule) else 2 * ALIKE
    count *= own.updates_per_rollout
    predicted = [_steady(own, simulated(replace(own, costs=costs), own.schedule, count))[0] for costs, _ in steps]
    return Check(median(predicted), median(measured for _, measured in steps))


def schedule_of(work: Workload, mode: str) -> ScheduleConfig:
    """The settings of a mode; what no mode is about stays as the workload has it."""
    changes: dict[str, Any] = {"mode": "pipelined", "tag": "none", "assist": "none", "staleness": 0.0}
    match mode:
        case "colocated" | "naive":
            changes["mode"] = mode
        case "tag-static":
            changes["tag"] = f"static({best_static(work)})"
        case "bts":
            changes["tag"] = "bts"
        case "tcss":
            changes |= {"tag": "bts", "staleness": work.staleness, "window": 2}
        case "shared":
            changes |= {"assist": "both", "ordered": False}
    return work.schedule.model_copy(update=changes)


def best_static(work: Workload) -> int:
    """The n of the fastest `static(n)`: from what balances both sides' work, up and down until it gets no better."""

    def step_time_s(n: int) -> float:
        rows = simulated(work, gap.model_copy(update={"tag": f"static({n})"}), 2).rows
        return round(rows[-1]["step_time_s"], 9)

    gap, count = schedule_of(work, "gap"), len(work.sizes)
    start = round(count * assisted_share(work))
    times = {start: step_time_s(start)}
    for direction in (1, -1):
        n, worse = start + direction, 0
        while 0 <= n <= count and worse < PATIENCE:
            best, times[n] = min(times.values()), step_time_s(n)
            worse = 0 if times[n] < best else worse + 1
            n += direction
    return min(times, key=lambda n: (times[n], n))


# The simulation ------------------------------------------------------------------------------------------------------


def predict(work: Workload, mode: str) -> Prediction:
    """What the driver does in this mode when everything takes what it costs."""
    schedule = schedule_of(work, mode)
    if mode in UNSTACKED:
        work = replace(work, costs=work.costs.scaled({"update": work.unstacked}))
    recorder = simulated(work, schedule, min(work.steps, ALIKE if _alike(work, schedule) else MOST_STEPS))
    ends = [0.0, *(row["time_s"] for row in recorder.rows)]
    step_time_s, steady, typical = _steady(work, recorder)
    return Prediction(
        mode,
        schedule,
        step_time_s,
        _busy(work, recorder.spans, steady),
        recorder.end_s + (work.steps - len(recorder.rows)) * step_time_s,
        _micro_batches(work, recorder.spans, "assist"),
        _micro_batches(work, recorder.spans, "help"),
        tuple(recorder.spans),
        typical,
        (ends[typical], ends[typical + 1]),
    )


def _steady(work: Workload, recorder: Recorder) -> tuple[float, Interval, int]:
    """Seconds of a step, from when to when, and one of the steps, once the driver has its rhythm.

    That is without the first and the last rollout, if there are others.
    """
    ends, count, each = [0.0, *(row["time_s"] for row in recorder.rows)], len(recorder.rows), work.updates_per_rollout
    first, last = (each, count - each) if count > 2 * each else (count - each, count)
    return (ends[last] - ends[first]) / (last - first), (ends[first], ends[last]), (first + last) // 2


def _alike(work: Workload, schedule: ScheduleConfig) -> bool:
    """Whether nothing but the weights goes from one step to the next, and costs are constants anyway."""
    return schedule.staleness == 0 and work.updates_per_rollout == 1 and work.save_every == 0


def simulated(work: Workload, schedule: ScheduleConfig, num_steps: int) -> Recorder:
    """The driver's spans and rows, in virtual time; whole rollouts, so maybe of a few steps more."""
    config = simulated_config(
        steps=ceil(num_steps / work.updates_per_rollout) * work.updates_per_rollout,
        samples_per_prompt=work.samples_per_prompt,
        schedule=schedule.model_copy(update={"prompts_per_microbatch": work.prompts_per_microbatch}),
        trainer={"updates_per_rollout": work.updates_per_rollout},
        checkpoint={"every": work.save_every},
        observe={"grid_every": 0},
    )
    names = () if schedule.mode == "colocated" else work.generators
    options: dict[str, Any] = {"run_dir": Path("plan")} if work.save_every else {}  # simulated groups write no file
    return simulate(
        config,
        [_group(work, name) for name in names],
        _group(work, TRAINER),
        prompts_per_step=work.prompts,
        costs=work.costs,
        **options,
    )


def _group(work: Workload, name: str) -> SimulatedGroup:
    """A group that takes what its work costs: for a whole micro-batch, of which a part takes its part."""
    trains = name == TRAINER
    scorer = work.generators[0] if trains else name  # colocated, the trainer scores as a generator would

    def generate(microbatch: MicroBatch, *_: object) -> float:
        return work.seconds(name, "assist" if trains else "generate", microbatch.num_samples)

    def score(rollout: Rollout) -> float:
        return work.seconds(scorer, "score", rollout.microbatch.num_samples)

    def update(scored: ScoredRollout, *_: object) -> float:
        return work.seconds(name, "update" if trains else "help", scored.rollout.microbatch.num_samples)

    sync, pull, save = work.seconds(name, "sync"), work.seconds(name, "pull"), work.seconds(name, "save")
    return SimulatedGroup(
        name, generate=generate, score=score, update=update, sync=sync, pull=pull, save=save, record=False
    )


def _busy(work: Workload, spans: list[Span], window: Interval) -> float:
    """Share of the devices' time in the window in which they are at work; a group counts by its devices."""
    each = work.devices[0] / len(work.generators)
    weights = dict.fromkeys(work.generators, each) | {TRAINER: float(work.devices[1])}
    used = {name: weights[name] for name in {span.worker for span in spans}}
    worked = sum(used[s.worker] * max(min(s.end, window[1]) - max(s.start, window[0]), 0.0) for s in spans)
    length = window[1] - window[0]
    return worked / (length * sum(used.values())) if length else 0.0


def _micro_batches(work: Workload, spans: list[Span], kind: SpanKind) -> tuple[float, ...]:
    """How many micro-batches' worth of this kind of work each step has; steps that are alike are repeated."""
    steps = range(max(span.step for span in spans) + 1)
    rows = [sum(s.rows for s in spans if s.kind == kind and s.step == step) for step in steps]
    rows += rows[-1:] * (min(work.steps, MOST_STEPS) - len(rows))
    return tuple(n // work.num_samples if n % work.num_samples == 0 else n / work.num_samples for n in rows)


# What is said beside the numbers --------------------------------------------------------------------------------------


def notes(work: Workload) -> tuple[str, ...]:
    """What a reader must know to read the numbers right."""
    both = sum(work.devices)
    colocated = (
        f"colocated has the trainer's devices alone ({work.devices[1]} of {both}) and generates as an assist does; on "
        "all of them, if both kinds of work scaled perfectly, it would come near the lower bound"
    )
    found = [colocated]
    if work.sizes[0] > work.staleness * sum(work.sizes) + ROUNDING:
        found.append(f"tcss: a stale share of {work.staleness:g} is less than one micro-batch, so nothing is stale")
    if work.steps > MOST_STEPS:
        found.append(f"at most {MOST_STEPS} of the {work.steps} steps are simulated; the total goes on as they did")
    return (*found, *work.notes)


# Splits --------------------------------------------------------------------------------------------------------------


def splits(work: Workload, devices: Devices) -> tuple[Split, ...]:
    """The fastest modes on every split of so many devices, if work takes 1 / devices of its group.

    The costs are those of `work.devices`. Every generator has a device at least. Of two kinds, the trainer has devices
    of its own kind alone; those that it leaves generate. Raises ConfigError.
    """
    replicas = len(work.generators)
    if isinstance(devices, int):
        if work.mixed:
            raise ConfigError(f"--devices: got {devices}, but this run has two kinds; allowed: G:T, as in 8:8")
        if devices < replicas + 1:
            least = f"a whole number >= {replicas + 1}, one for each group"
            raise ConfigError(f"--devices: got {devices}; allowed: {least}; or G:T, of two kinds")
        return tuple(_split(work, count, devices - count) for count in range(replicas, devices))
    own, other = devices
    if own < replicas or other < 1:
        raise ConfigError(f"--devices: got {own}:{other}; allowed: at least {replicas}:1, one for each group")
    work = two_kinds(work)
    return tuple(_split(work, own, count, other - count) for count in range(1, other + 1))


def _split(work: Workload, generators: int, trainers: int, borrowed: int = 0) -> Split:
    there = replace(placed(work, generators, trainers, borrowed), steps=min(work.steps, 6))
    return Split(generators, trainers, {mode: predict(there, mode).step_time_s for mode in SWEPT}, borrowed)


def setting(schedule: ScheduleConfig) -> str:
    """The overrides of `digen run` that give this schedule."""
    default = ScheduleConfig().model_dump()
    changed = {key: value for key, value in schedule.model_dump().items() if value != default[key]}
    changed.pop("prompts_per_microbatch", None)
    return " ".join(f"schedule.{key}={value}" for key, value in (changed or {"mode": schedule.mode}).items())
