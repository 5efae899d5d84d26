"""One run, from a config to its summary: what `digen run` does, and what a script calls.

Invariant: everything that can be known to be wrong is found before a worker starts; however the run ends, its workers
are ended and what it wrote is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
from rich.console import Console

from digen import plugins
from digen.config import GroupConfig, RunConfig, doubts
from digen.data.prompts import load_prompts
from digen.data.sampler import StepPrompts
from digen.driver import Driver
from digen.engines.base import Engine, WorkerGroup, WorkerSpec
from digen.engines.together import all_at_once
from digen.observe.base import Observer
from digen.observe.files import RunFolder, write_atomic
from digen.observe.live import RunInfo
from digen.observe.many import open_observer
from digen.observe.summary import Summary, print_summary, summarise_folder
from digen.presets import dump, payload, prompt_file
from digen.rewards.base import RewardSet
from digen.rewards.total import total
from digen.schedule.costs import Costs
from digen.types import Span
from digen.workload import TRAINER, finished_spans, generator_names


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Where a run's files are and what it did."""

    run_dir: Path
    algorithm: str
    model: str
    summary: Summary

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values (docs/metrics.md)."""
        place = {"run_dir": str(self.run_dir), "algorithm": self.algorithm, "model": self.model}
        return {**place, **self.summary.as_json()}


def run(config: RunConfig[Any], *, console: Console, costs: Costs | None = None) -> RunSummary:
    """Train. Progress and the closing summary go to `console`; `costs` are known before anything is measured.

    Raises ConfigError or DataError before anything is started; WorkerError, RewardError, SyncError or DivergedError
    when the run cannot go on.
    """
    prompts = StepPrompts(
        load_prompts(prompt_file(config, "prompts"), config.data.column),
        config.data.prompts_per_step,
        shuffle=config.data.shuffle,
        seed=config.seed,
    )
    num_steps = prompts.num_steps(config.steps, config.epochs, config.trainer.updates_per_rollout)
    RewardSet(config.reward, config.scoring.timeout_s).check()
    folder = RunFolder.create(config.run_dir, config.algorithm.name, config.model.name)
    write_atomic(folder.config, dump(config))
    info = RunInfo(config.algorithm.name, config.model.name, config.seed, folder.path, num_steps)
    observer = open_observer(info, folder, console, tensorboard=config.observe.tensorboard)
    for doubt in doubts(config):
        observer.on_note(doubt)
    try:
        anyio.run(partial(_run, config, prompts, num_steps, folder, observer, costs or Costs()))
    finally:
        observer.close()
    summary = summarise_folder(folder)
    print_summary(summary, console, folder.path)
    return RunSummary(folder.path, config.algorithm.name, config.model.name, summary)


async def _run(
    config: RunConfig[Any], prompts: StepPrompts, num_steps: int, folder: RunFolder, observer: Observer, costs: Costs
) -> None:
    engine = make_engine(config)
    async with engine.open(specs(config, folder.logs)) as groups:
        generators = [group for name, group in groups.items() if name != TRAINER]
        await load(groups, observer)
        await _note_cut_prompts(config, (generators or [groups[TRAINER]])[0], prompts, observer)
        driver = Driver(
            config,
            generators,
            groups[TRAINER],
            prompts=prompts,
            num_steps=num_steps,
            total=partial(total, terms=config.reward),
            drop=engine.store.drop,
            observer=observer,
            run_dir=folder.path,
            costs=costs,
        )
        await driver.run()


def known_costs(config: RunConfig[Any], other: Path) -> Costs:
    """What another run measured, for the groups of this one. Raises ConfigError when it measured nothing."""
    return Costs.of(finished_spans(other)).renamed(generator_names(config.generator.replicas), TRAINER)


def make_engine(config: RunConfig[Any]) -> Engine:
    """The engine that the config names."""
    kind = cast("type[Engine]", plugins.find("engines", config.engine.name))
    return kind()


def specs(config: RunConfig[Any], log_dir: Path) -> list[WorkerSpec]:
    """The worker groups of a run: every generator replica, then the trainer; colocated runs have only the trainer."""
    generator, trainer = config.generator, config.trainer
    replicas = 0 if config.schedule.mode == "colocated" else generator.replicas
    names = generator_names(replicas) if replicas else ()
    target = plugins.target("generators", generator.backend)
    return [
        *(spec(config, name, target, generator, log_dir) for name in names),
        spec(config, TRAINER, plugins.target("trainers", trainer.backend), trainer, log_dir),
    ]


def spec(config: RunConfig[Any], name: str, target: str, group: GroupConfig, log_dir: Path | None) -> WorkerSpec:
    """One worker group as the engine starts it."""
    return WorkerSpec(
        name,
        target,
        payload(config),
        ranks=group.ranks,
        devices=group.devices,
        threads=group.threads,
        env=group.env,
        log_dir=log_dir,
    )


async def load(groups: Mapping[str, WorkerGroup], observer: Observer | None = None) -> None:
    """Load models and rewards on all groups at once. Time 0 of a run is when the last one is ready."""
    start = anyio.current_time()
    seconds: dict[str, float] = {}

    async def one(group: WorkerGroup) -> None:
        await group.call("load")
        seconds[group.name] = anyio.current_time() - start

    await all_at_once(partial(one, group) for group in groups.values())
    if observer is not None:
        whole = anyio.current_time() - start
        for name, end in seconds.items():
            observer.on_span(Span("load", name, 0, -1, 0, -whole, end - whole))


async def _note_cut_prompts(
    config: RunConfig[Any], group: WorkerGroup, prompts: StepPrompts, observer: Observer
) -> None:
    texts: Sequence[str] = [prompt.text for prompt in prompts.prompts]
    cut = (await group.call("num_cut", texts))[0]
    if cut:
        limit = config.model.max_text_tokens
        observer.on_note(f"{cut} of {len(texts)} prompts have over {limit} tokens and are cut by the text encoder")
