"""All modes on real workers: the bundled model, one generator and one trainer process of one thread each.

    python benchmarks/ablation.py             # about twenty minutes on two cores
    python benchmarks/ablation.py --quick     # one ratio, one short round

Three update/generate ratios, set through the share of trained timesteps and best-of-n. For each, the worker processes
are started once, and rounds go through all modes in turn; every run begins with the same weights, which the workers
load again, and its first steps (cold caches, costs not yet measured) and its last are left out. `colocated` is one
process of two threads, so that all modes have the same two cores. Plain SGD, so that final weights can be compared; the
reward is brightness.py, because scoring cannot be moved to the trainer and would hide what is compared here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import anyio
import torch
from common import UNSTACKED, Chart, Table, arguments, publish, schedule_of, steady, waited
from common import Costs as StepCosts

from digen.config import RunConfig
from digen.data.prompts import load_prompts
from digen.data.sampler import StepPrompts
from digen.driver import Driver
from digen.engines.base import Engine, WorkerContext, WorkerGroup
from digen.inflight import Work
from digen.observe.bubbles import CAUSES
from digen.presets import prompt_file, resolve
from digen.rewards.total import total
from digen.run import load, make_engine, specs
from digen.testing import Recorder
from digen.types import Published, SpanKind
from digen.weights.shared_memory import SharedMemoryTransport

MODES = ("colocated", "naive", "gap", "tsp", "tag-static", "bts", "tcss", "shared", "shared-tcss")
CHAIN = ("naive", "gap", "tsp", "tag-static", "bts", "tcss")
"""Each adds one idea to the one before."""
STALE = ("tcss", "shared-tcss")
RATIOS = {
    "1:1": ["algorithm.steps.fraction=0.4"],
    "1:0.5": ["algorithm.steps.fraction=0.4", "algorithm.best_of_n={best: 2, worst: 2}"],
    "1:0.25": ["algorithm.steps.fraction=0.3", "algorithm.best_of_n={best: 1, worst: 1}"],
}
"""Generate to update: what the settings are near, as measured without TSP."""
COMMON = [
    "data.prompts_per_step=12",
    "algorithm.samples_per_prompt=8",
    "algorithm.steps.type=random-fraction",
    "trainer.optimizer=sgd",
    "trainer.learning_rate=0.3",
    "trainer.weight_decay=0",
    f'reward={{"{Path(__file__).parent.resolve()}/brightness.py:brightness": {{}}}}',
]
STACKED_ALL = 0
"""`trainer.tsp`: all trained timesteps in one pass."""
WARM_UP = 2
TOLERANCE = 1e-5
TARGET, TARGET_RATIO, TARGET_BUSY = 1.75, "1:0.5", 0.90


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    ratios: tuple[str, ...] = tuple(RATIOS)
    rounds: int = 3
    steps: int = 5
    overrides: tuple[str, ...] = ()


QUICK = Size(("1:0.5",), 1, 4, ("data.prompts_per_step=6",))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one mode. Times in s; shares are of the measured steps."""

    step_s: float
    busy: Mapping[str, float]
    waits: Mapping[str, Mapping[str, float]]
    """Worker -> cause -> share."""
    deciding: float
    """Share of the run in which the driver chose work: BTS's search is in it."""
    medians: Mapping[str, float]
    """Kind of work -> median seconds for a micro-batch's worth of samples (pulls and syncs: of one)."""
    weights: Mapping[str, Any]


class TimedDriver(Driver):
    """The driver, and the time that its choices take."""

    deciding_s = 0.0

    def next_work(self, group: WorkerGroup) -> Work[Any] | None:
        began = time.perf_counter()
        try:
            return super().next_work(group)
        finally:
            self.deciding_s += time.perf_counter() - began


def config_of(mode: str, ratio: str, size: Size, assists: int = 0) -> RunConfig[Any]:
    schedule = [f"schedule.{key}={value}" for key, value in schedule_of(mode, assists).items()]
    plain = [] if "tag" in schedule_of(mode) else ["schedule.tag=none"]
    threads = ["trainer.threads=2"] if mode == "colocated" else ["trainer.threads=1", "generator.threads=1"]
    tsp = [f"trainer.tsp={1 if mode in UNSTACKED else STACKED_ALL}"]
    steps = [f"steps={size.steps}"]
    every = [*COMMON, *RATIOS[ratio], *size.overrides, *schedule, *plain, *threads, *tsp, *steps]
    return resolve("flowgrpo", "glyph", None, every, {})


class Bench:
    """The workers of one ratio, loaded once: a generator and a trainer, and one that is colocated."""

    def __init__(self, ratio: str, size: Size, engine: Engine, groups: Mapping[str, WorkerGroup]) -> None:
        self.ratio, self.size, self.engine, self.groups = ratio, size, engine, groups
        self.assists: int | None = None
        self.outcomes: dict[str, list[Outcome]] = {mode: [] for mode in MODES}

    async def rounds(self) -> None:
        await load(self.groups)
        self.start = (await self.groups["trainer"].call("push", 0))[0]
        for _ in range(self.size.rounds):
            for mode in MODES:
                if mode == "tag-static" and self.assists is None:
                    self.assists = self.costs().balanced(self.microbatches)
                self.outcomes[mode].append(await self.once(mode))

    @property
    def microbatches(self) -> int:
        return config_of("naive", self.ratio, self.size).data.prompts_per_step

    def costs(self) -> StepCosts:
        """What this machine takes for a micro-batch, from the modes that do whole ones."""

        def of(mode: str, kind: SpanKind) -> float:
            found = [o.medians[kind] for o in self.outcomes[mode] if kind in o.medians]
            return median(found) if found else 0.0

        generate, update, stacked = of("naive", "generate"), of("naive", "update"), of("tsp", "update")
        pull, sync, assist = of("naive", "pull"), of("naive", "sync"), of("tag-static", "assist")
        return StepCosts(generate, update, stacked, of("naive", "score"), assist or None, sync, pull)

    async def once(self, mode: str) -> Outcome:
        config = config_of(mode, self.ratio, self.size, self.assists or 0)
        trainer = self.groups["colocated" if mode == "colocated" else "trainer"]
        generators = [] if mode == "colocated" else [self.groups["generator"]]
        for group in (*generators, trainer):
            await group.call("pull", self.start)
        seen = Recorder()
        driver = TimedDriver(
            config,
            generators,
            trainer,
            prompts=StepPrompts(
                load_prompts(prompt_file(config, "prompts"), config.data.column),
                config.data.prompts_per_step,
                shuffle=True,
                seed=config.seed,
            ),
            num_steps=self.size.steps,
            total=partial(total, terms=config.reward),
            drop=self.engine.store.drop,
            observer=seen,
        )
        began = time.perf_counter()
        await driver.run()
        deciding = driver.deciding_s / (time.perf_counter() - began)
        published = (await trainer.call("push", self.size.steps))[0]
        weights = self.weights_of(published)
        self.engine.store.drop(published.weights)
        return outcome(seen, deciding, weights, config.algorithm)

    def weights_of(self, published: Published) -> dict[str, torch.Tensor]:
        """As a generator would get them."""
        store = self.engine.store
        transport = SharedMemoryTransport(
            config_of("naive", self.ratio, self.size),
            WorkerContext("here", 0, 1, "cpu", store, shared_dir=store.folder),
        )
        entries = transport.read(published).layout.entries
        weights = {entry.name: torch.empty(entry.shape, dtype=entry.type) for entry in entries}
        transport.pull(published, weights)
        return weights


def outcome(seen: Recorder, deciding: float, weights: Mapping[str, Any], algorithm: Any) -> Outcome:
    settled = steady(seen, WARM_UP)
    medians: dict[str, float] = {}
    for kind in {span.kind for span in seen.spans}:
        whole = algorithm.kept_per_prompt() if kind in ("update", "help") else algorithm.samples_per_prompt
        spans = [span for span in seen.spans if span.kind == kind]
        medians[kind] = median((s.end - s.start) * (whole / s.rows if s.rows else 1.0) for s in spans)
    step_s = median(row["step_time_s"] for row in seen.rows[WARM_UP:-1])
    return Outcome(step_s, settled.busy, waited(seen, WARM_UP), deciding, medians, weights)


async def bench(ratio: str, size: Size, log_dir: Path) -> dict[str, Any]:
    both, alone = config_of("shared", ratio, size), config_of("colocated", ratio, size)
    colocated = replace(specs(alone, log_dir)[0], name="colocated")
    engine = make_engine(both)
    async with engine.open([*specs(both, log_dir), colocated]) as groups:
        made = Bench(ratio, size, engine, groups)
        await made.rounds()
        return report(made)


# What came of it ------------------------------------------------------------------------------------------------------


def farthest(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def mean_of(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(part[key] for part in parts) for key in parts[0]}


def report(made: Bench) -> dict[str, Any]:
    """One ratio as plain JSON values."""
    naive = made.outcomes["naive"]
    reference, first = naive[0].weights, made.weights_of(made.start)
    modes = {}
    for mode, outcomes in made.outcomes.items():
        speedups = [n.step_s / o.step_s for n, o in zip(naive, outcomes, strict=True)]
        modes[mode] = {
            "step_s": median(o.step_s for o in outcomes),
            "speedup": median(speedups),
            "speedups": speedups,
            "busy": mean_of([o.busy for o in outcomes]),
            "waits": {name: mean_of([o.waits[name] for o in outcomes]) for name in outcomes[0].waits},
            "deciding": fmean(o.deciding for o in outcomes),
            "weights_from_naive": max(farthest(o.weights, reference) for o in outcomes),
        }
    costs = made.costs()
    return {
        "ratio": made.ratio,
        "microbatches": made.microbatches,
        "costs_s": {
            "generate": costs.generate,
            "score": costs.score,
            "update": costs.update,
            "update_stacked": costs.stacked,
            "assist": costs.assists,
            "sync": costs.sync,
            "pull": costs.pull,
        },
        "update_to_generate": costs.update / costs.generate,
        "assists_of_tag_static": made.assists,
        "weights_moved": farthest(reference, first),
        "modes": modes,
    }


def missed(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The targets that were not reached, each with where the time went."""
    found = []
    for one in reports:
        ratio, modes = one["ratio"], one["modes"]
        best = max(STALE, key=lambda mode: modes[mode]["speedup"])
        busy = fmean(modes[best]["busy"].values())
        if ratio == TARGET_RATIO and modes[best]["speedup"] < TARGET:
            found.append(f"{ratio}: {best} is {modes[best]['speedup']:.2f} times as fast as naive, target {TARGET}")
        if busy < TARGET_BUSY:
            found.append(
                f"{ratio}: with {best} workers are busy {busy:.1%}, target {TARGET_BUSY:.0%}; {lost(modes[best])}"
            )
        for before, after in pairwise(CHAIN):
            if max(modes[after]["speedups"]) < min(modes[before]["speedups"]):
                found.append(f"{ratio}: {after} is slower than {before} in every round; {lost(modes[after])}")
        apart = {mode: m["weights_from_naive"] for mode, m in modes.items() if mode not in STALE}
        found += [f"{ratio}: {m} ends {d:.1e} from naive's weights" for m, d in apart.items() if d > TOLERANCE]
        found += [
            f"{ratio}: {mode} spends {m['deciding']:.1%} of a step deciding, target 1 %"
            for mode, m in modes.items()
            if m["deciding"] > 0.01
        ]
    return found


def lost(mode: Mapping[str, Any]) -> str:
    """`trainer: waits for generator 5.1 %, sync 0.4 %`, longest first."""
    parts = []
    for worker, causes in mode["waits"].items():
        longest = sorted(((share, CAUSES[cause]) for cause, share in causes.items() if share >= 0.001), reverse=True)
        parts.append(f"{worker}: {', '.join(f'{name} {share:.1%}' for share, name in longest) or 'none'}")
    return "; ".join(parts)


def tables(reports: Sequence[Mapping[str, Any]]) -> list[Table]:
    made = []
    for one in reports:
        costs = "  ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in one["costs_s"].items())
        title = f"{one['ratio']} (update/generate {one['update_to_generate']:.2f}; ms of a micro-batch: {costs})"
        rows = [
            [
                mode,
                f"{m['step_s']:.3f}",
                f"{m['speedup']:.2f}",
                f"{min(m['speedups']):.2f}-{max(m['speedups']):.2f}",
                " / ".join(f"{share:.1%}" for share in m["busy"].values()),
                f"{m['deciding']:.2%}",
                f"{m['weights_from_naive']:.1e}" if mode not in STALE else "stale",
            ]
            for mode, m in one["modes"].items()
        ]
        columns = ["mode", "step s", "vs naive", "rounds", "busy generator / trainer", "deciding", "weights"]
        made.append(Table(title, columns, rows))
        waiting = [[mode, lost(m)] for mode, m in one["modes"].items()]
        made.append(Table(f"{one['ratio']}: what workers wait for, share of a step", ["mode", "waits"], waiting))
    return made


def main() -> None:
    given = arguments(__doc__)
    size = QUICK if given.quick else Size()
    with tempfile.TemporaryDirectory() as folder:
        reports = [anyio.run(bench, ratio, size, Path(folder)) for ratio in size.ratios]
    series = {
        one["ratio"]: [(min(m["speedups"]), max(m["speedups"])) for m in one["modes"].values()] for one in reports
    }
    chart = Chart(MODES, series, "speedup over naive, range over the rounds", "mode, by generate to update")
    problems = missed(reports)
    publish("ablation", given.out, tables(reports), {"missed": problems, "ratios": reports}, chart)
    print("\n".join(["missed:", *problems]) if problems else "every target was reached")


if __name__ == "__main__":
    main()
