"""A fixed piece of work, and how near a step of digen comes to the time that its model passes alone need.

    python benchmarks/peer_workload.py             # a quarter of an hour on two quiet cores
    python benchmarks/peer_workload.py --quick     # one short round

One step: 4 prompts x 8 samples of 64 x 64 pixels on a small Stable Diffusion 3.5 with random weights, made here (two
layers of 4 x 32, 333 text tokens), 10 denoising steps, guidance off, Flow-SDE noise 0.7, adapters of rank 32 on eight
attention projections, the size of a JPEG as reward, one AdamW step, float32. That is 320 sample-forwards to generate
and 288 with a backward pass to train steps 0 to 8 (128 where only 0 to 3 are trained).

The floor is this work alone in one process of one thread, in batches of 8, without prompts, noise, log-probs, losses,
rewards or a sync: no trainer on one core is faster, and none on two cores is faster than half of it. digen runs beside
it with two processes of one thread, a generator and a trainer, synchronous, each helping the other
(`schedule.assist=both`); a slow reward waits in a process of its own (`scoring.devices`). Rounds take turns, floor then
digen, and a round's ratio compares neighbours; `fastest` is the fastest round's step over half the fastest floor.
Between them two floors run at once, each in a process of its own: what cores take from each other by sharing memory,
caches and clock is in that time and in digen's, but not in the floor's. All processes count what passes through their
transformer and their decoder. Prompts are encoded once per run; that is left out.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import anyio
import peer_work
from ablation import lost
from common import Chart, Table, arguments, publish, steady, waited
from peer_work import BATCH, PROMPTS, SAMPLES, STEPS, write
from real import Workers

from digen.config import RunConfig
from digen.engines.base import WorkerGroup, WorkerSpec
from digen.presets import payload, resolve, step_prompts
from digen.run import load, make_engine, specs
from digen.testing import Recorder
from digen.workload import SCORER

WORK = Path(peer_work.__file__).resolve()
FLOORS = ("floor", "second-floor")
PASSES = ("generate", "assist", "update", "help")
"""Calls in which samples go through the transformer."""
WARM_UP = 1
"""Steps of a run that are left out, besides its last, of which no weights are sent."""


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of the work; `limit` is how many times half the floor a step may take."""

    name: str
    trained: int
    limit: float
    reward: str = "jpeg"
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        return [
            f"algorithm.steps={{type: window, size: {self.trained}, low: 0, high: {self.trained}, noise: all}}",
            f'reward={{"{WORK}:{self.reward}": {{}}}}',
            *self.settings,
        ]


CASES = (
    Case("9 trained", 9, 1.10),
    Case("4 trained", 4, 1.10),
    Case("9 trained, slow reward", 9, 1.12, "slow_jpeg", ("scoring.devices=cpu",)),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    cases: tuple[Case, ...] = CASES
    rounds: int = 7
    steps: int = 4
    floor_steps: int = 1
    side: int = 64
    text_tokens: int = 256


QUICK = Size((replace(CASES[2], name="4 trained, slow reward", trained=4),), 1, 3, 1, 16, 16)


def config_of(case: Case, size: Size, checkpoint: Path) -> RunConfig[Any]:
    """digen's settings for the work."""
    settings = [
        f"steps={size.steps}",
        f"model.path={checkpoint}",
        f"model.height={size.side}",
        f"model.width={size.side}",
        f"model.max_text_tokens={size.text_tokens}",
        f"sampling.num_steps={STEPS}",
        "sampling.guidance=1",
        f"data.prompts={checkpoint / 'prompts.txt'}",
        f"data.prompts_per_step={PROMPTS}",
        f"algorithm.samples_per_prompt={SAMPLES}",
        "algorithm.noise={type: flow-sde, level: 0.7}",
        "algorithm.loss={type: clipped, clip: 1e-4, kl: 0}",
        "trainer.lora={rank: 32, alpha: 64}",
        "trainer.learning_rate=3e-4",
        f"trainer.batch_size={BATCH}",
        f"generator.batch_size={BATCH}",
        "trainer.tsp=1",
        "schedule.assist=both",
        f"generator.backend={WORK}:Generator",
        f"trainer.backend={WORK}:Trainer",
    ]
    return resolve("flowgrpo", "tiny-sd3", None, settings + case.overrides, {})


# Rounds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """Floor and digen, one after the other. Seconds of a step; the rest per step too."""

    floor_s: float
    both_s: float
    """A floor beside another one."""
    step_s: float
    floor_cpu_s: Mapping[str, float]
    cpu_s: Mapping[str, float]
    floor_counts: Mapping[str, float]
    counts: Mapping[str, float]
    busy: Mapping[str, float]
    waits: Mapping[str, Mapping[str, float]]
    above: Mapping[str, float]
    """What a step takes above half the floor, by cause and over half the floor; in all `ratio` - 1."""

    @property
    def ratio(self) -> float:
        """A step over half the floor's."""
        return self.step_s / (self.floor_s / 2)

    @property
    def ratio_of_both(self) -> float:
        """A step over half of a floor beside another one."""
        return self.step_s / (self.both_s / 2)


class Bench:
    """Floors and workers of one case, loaded once."""

    def __init__(self, config: RunConfig[Any], size: Size, workers: Workers, floors: Sequence[WorkerGroup]) -> None:
        self.config, self.size, self.workers, self.floors = config, size, workers, floors
        self.floor = floors[0]

    async def begin(self) -> None:
        """Load, encode all prompts, run once so that costs are known and caches warm."""
        texts = [prompt.text for prompt in step_prompts(self.config).prompts]
        await load({floor.name: floor for floor in self.floors})
        await self.workers.begin(texts)
        for group in self.workers.sampling:
            await group.call("have_encoded", texts)
        await self.both()
        await self.workers.run(self.config)

    async def both(self) -> float:
        """Seconds of two floors at once, of each on average."""
        took: list[float] = []

        async def one(floor: WorkerGroup) -> None:
            took.append((await floor.call("step"))[0])

        async with anyio.create_task_group() as tasks:
            for floor in self.floors:
                tasks.start_soon(one, floor)
        return fmean(took)

    async def round(self) -> Round:
        before = await totals([self.floor])
        floor_s = [(await self.floor.call("step"))[0] for _ in range(self.size.floor_steps)]
        between = await totals([self.floor])
        both_s = [await self.both() for _ in range(self.size.floor_steps)]
        began = await totals(self.workers.sampling)
        seen = await self.workers.run(self.config)
        ended = await totals(self.workers.sampling)
        settled = steady(seen, WARM_UP)
        return Round(
            fmean(floor_s),
            fmean(both_s),
            settled.step_s,
            moved(before, between, "cpu_s", len(floor_s)),
            moved(began, ended, "cpu_s", self.size.steps),
            moved(before, between, "counts", len(floor_s)),
            moved(began, ended, "counts", self.size.steps),
            settled.busy,
            waited(seen, WARM_UP),
            above(seen, WARM_UP, fmean(floor_s)),
        )


def above(seen: Recorder, warm_up: int, floor_s: float) -> dict[str, float]:
    """Where the two workers' time goes that the floor does not take, over the floor's time.

    Parts of a micro-batch take longer than their part of the time that whole ones take in the same steps.
    """
    low, high = seen.rows[warm_up - 1]["time_s"], seen.rows[-2]["time_s"]
    steps = range(warm_up, len(seen.rows) - 1)
    busy: Counter[str] = Counter()
    whole_s = 0.0
    for kinds in (("generate", "assist"), ("update", "help")):
        calls = [(s.rows, s.end - s.start) for s in seen.spans if s.kind in kinds and s.step in steps]
        largest = max(rows for rows, _ in calls)
        each_s = fmean(seconds / rows for rows, seconds in calls if rows == largest)
        whole_s += each_s * sum(rows for rows, _ in calls)
        busy["parts"] += sum(seconds - each_s * rows for rows, seconds in calls)
    for span in seen.spans:
        if span.worker != SCORER and span.kind not in PASSES:
            busy["other calls"] += max(0.0, min(span.end, high) - max(span.start, low))
    total_s = {
        **busy,
        "passes": whole_s - len(steps) * floor_s,
        "waits": 2 * (high - low) - whole_s - sum(busy.values()),
    }
    return {cause: seconds / len(steps) / floor_s for cause, seconds in sorted(total_s.items())}


Totals = Sequence[Mapping[str, Any]]


async def totals(groups: Sequence[WorkerGroup]) -> list[dict[str, Any]]:
    return [(await group.call("totals"))[0] for group in groups]


def moved(before: Totals, after: Totals, what: str, num_steps: int) -> dict[str, float]:
    """How much the totals of this kind grew, all workers together, for one step."""
    grown: Counter[str] = Counter()
    for a, b in zip(before, after, strict=True):
        grown.update({name: value - a[what].get(name, 0) for name, value in b[what].items()})
    return {name: value / num_steps for name, value in sorted(grown.items())}


async def bench(case: Case, size: Size, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """One case as plain JSON values. Raises AssertionError where digen and the floor do not do the same work."""
    config = config_of(case, size, checkpoint)
    engine = make_engine(config)
    given = {"config": payload(config), "trained": case.trained, "text_tokens": size.text_tokens}
    alone = [WorkerSpec(name, f"{WORK}:Floor", given, threads=1, log_dir=folder) for name in FLOORS]
    async with engine.open([*specs(config, folder), *alone]) as groups:
        floors = [groups[name] for name in FLOORS]
        made = Bench(config, size, Workers(engine, {n: g for n, g in groups.items() if n not in FLOORS}), floors)
        await made.begin()
        rounds = [await made.round() for _ in range(size.rounds)]
        ended = {group.name: (await totals([group]))[0] for group in (*made.workers.sampling, floors[0])}
    expected = {"decoded": PROMPTS * SAMPLES, "generated": PROMPTS * SAMPLES * STEPS}
    expected["trained"] = PROMPTS * SAMPLES * case.trained
    for one in rounds:
        assert one.counts == one.floor_counts == expected, (one.counts, one.floor_counts, expected)
    tokens = set().union(*(one["tokens"] for one in ended.values()))
    assert tokens == {77 + size.text_tokens}, tokens
    return report(case, rounds, {name: one["peak_gib"] for name, one in ended.items()})


def report(case: Case, rounds: Sequence[Round], peak_gib: Mapping[str, float]) -> dict[str, Any]:
    ratios = [one.ratio for one in rounds]
    return {
        "case": case.name,
        "counts": dict(rounds[0].counts),
        "floor_counts": dict(rounds[0].floor_counts),
        "floor_s": median(one.floor_s for one in rounds),
        "both_s": median(one.both_s for one in rounds),
        "step_s": median(one.step_s for one in rounds),
        "ratio": median(ratios),
        "ratios": ratios,
        "fastest": min(one.step_s for one in rounds) / (min(one.floor_s for one in rounds) / 2),
        "ratio_of_both": median(one.ratio_of_both for one in rounds),
        "limit": case.limit,
        "cpu_over_floor": median(one.cpu_s["all"] / one.floor_cpu_s["all"] for one in rounds),
        "cpu_s": {name: median(one.cpu_s[name] for one in rounds) for name in rounds[0].cpu_s},
        "floor_cpu_s": median(one.floor_cpu_s["all"] for one in rounds),
        "busy": {name: fmean(one.busy[name] for one in rounds) for name in rounds[0].busy},
        "above": dict(min(rounds, key=lambda one: abs(one.ratio - median(ratios))).above),
        "waits": {
            name: {cause: fmean(one.waits[name][cause] for one in rounds) for cause in causes}
            for name, causes in rounds[0].waits.items()
        },
        "peak_gib": peak_gib,
    }


# What came of it ------------------------------------------------------------------------------------------------------


def tables(reports: Sequence[Mapping[str, Any]]) -> list[Table]:
    columns = ["work", "floor s", "two at once s", "step s", "over half", "rounds", "fastest", "limit"]
    columns += ["over half of two at once", "busy generator / trainer", "CPU"]
    rows = [
        [
            one["case"],
            f"{one['floor_s']:.2f}",
            f"{one['both_s']:.2f}",
            f"{one['step_s']:.2f}",
            f"{one['ratio']:.3f}",
            f"{min(one['ratios']):.3f}-{max(one['ratios']):.3f}",
            f"{one['fastest']:.3f}",
            f"{one['limit']:.2f}",
            f"{one['ratio_of_both']:.3f}",
            " / ".join(f"{share:.1%}" for name, share in one["busy"].items() if name != SCORER),
            f"{one['cpu_over_floor']:.3f}",
        ]
        for one in reports
    ]
    causes = list(reports[0]["above"])
    parts = [[one["case"], *(f"{one['above'][cause]:.1%}" for cause in causes)] for one in reports]
    waiting = [[one["case"], lost(one)] for one in reports]
    return [
        Table("Step time over half of the floor", columns, rows),
        Table("What is above half of the floor, in the round in the middle", ["work", *causes], parts),
        Table("Waits", ["work", "waits"], waiting),
    ]


def main() -> None:
    given = arguments(__doc__)
    size = QUICK if given.quick else Size()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "checkpoint")
        reports = [anyio.run(bench, case, size, folder / "checkpoint", folder) for case in size.cases]
    series = {
        "rounds": [(min(one["ratios"]), max(one["ratios"])) for one in reports],
        "limit": [(0.0, one["limit"]) for one in reports],
    }
    chart = Chart([one["case"] for one in reports], series, "step time over half of the floor", "work")
    missed = [
        f"{one['case']}: {one['ratio']:.3f}, limit {one['limit']}; two floors at once take "
        f"{one['both_s'] / one['floor_s']:.3f} times as long as one; {lost(one)}"
        for one in reports
    ]
    missed = [line for line, one in zip(missed, reports, strict=True) if one["ratio"] > one["limit"]]
    publish("peer_workload", given.out, tables(reports), {"missed": missed, "cases": reports}, chart)
    print("\n".join(["missed:", *missed]) if missed else "every limit was kept")


if __name__ == "__main__":
    main()
