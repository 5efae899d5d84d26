"""One run, from a config to its summary: what `digen run` does, and what a script calls.

Invariant: everything that can be known to be wrong is found before a worker starts; however the run ends, its workers
are ended and what it wrote is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
from rich.console import Console

from digen import plugins, trained
from digen.calls import Calls
from digen.checkpoint.manifest import rotate, saved
from digen.checkpoint.resume import Past, go_on, locked, make_again, stale_microbatches, write_facts
from digen.config import GroupConfig, RunConfig, doubts
from digen.data.sampler import StepPrompts
from digen.driver import Driver
from digen.engines.base import Engine, WorkerGroup, WorkerSpec
from digen.engines.together import all_at_once
from digen.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    RewardError,
    Stopped,
    SyncError,
    WorkerDied,
    WorkerError,
)
from digen.memory.here import check_memory
from digen.observe.base import Observer
from digen.observe.console import PlainView
from digen.observe.files import JsonlObserver, RunFolder, sweep, write_atomic
from digen.observe.live import RunInfo
from digen.observe.many import ManyObservers, open_observer
from digen.observe.summary import Summary, print_summary, summarise_folder
from digen.observe.video import video_format, video_notes
from digen.preflight import check_packages, check_weights
from digen.presets import dump, payload, step_prompts
from digen.rewards.base import RewardSet
from digen.rewards.judge_server import check_devices, serving
from digen.rewards.total import total
from digen.schedule.costs import Costs
from digen.stopping import Orders, obeying
from digen.supervision import Revive, why_lost
from digen.types import Scores, Span, Start
from digen.workload import SCORER, TRAINER, finished_spans, generator_names


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


def run(
    config: RunConfig[Any], *, console: Console, costs: Costs | None = None, resume: Collection[str] | None = None
) -> RunSummary:
    """Train. Progress and the closing summary go to `console`; `costs` are known before anything is measured.

    `resume`: go on with the run in `config.run_dir`; which keys that change results may differ from what they were. Of
    a run that has done all its steps nothing is left but the summary.
    Raises ConfigError or DataError before anything is started; WorkerError, RewardError, SyncError, DivergedError or
    CheckpointError when the run cannot go on.
    """
    prompts = step_prompts(config)
    num_steps = prompts.num_steps(config.steps, config.epochs, config.trainer.updates_per_rollout)
    check_rewards(config)
    check_packages("generators", config.generator.backend)
    check_weights(config.model)
    notes = check_memory(config)
    video_format(config)  # to be refused now, if at all
    if resume is None:
        weights_from(config)
        folder = RunFolder.create(config.run_dir, config.algorithm.name, config.model.name)
    else:
        folder = RunFolder.open(config.run_dir or Path())
    with locked(folder) as doubtful:
        sweep(folder.path)
        past = Past() if resume is None else go_on(folder, config, num_steps, resume)
        write_atomic(folder.config, dump(config))
        write_facts(folder, config)
        job = Job(config, prompts, num_steps, folder, past, costs or _own_costs(config, folder), (*notes, *doubtful))
        (_train if past.version < num_steps else _end)(job, console)
    summary = summarise_folder(folder)
    print_summary(summary, console, folder.path)
    return RunSummary(folder.path, config.algorithm.name, config.model.name, summary)


def check_rewards(config: RunConfig[Any]) -> None:
    """Construct every reward, and see that what it loads is on this machine. Raises ConfigError naming what is not."""
    rewards = RewardSet(config.reward, config.scoring.timeout_s)
    rewards.check()
    if missing := rewards.missing():
        raise ConfigError("\n".join(missing))
    check_devices(rewards.servers(), config)


@dataclass(frozen=True, slots=True)
class Job:
    """A run that may start: everything has been checked."""

    config: RunConfig[Any]
    prompts: StepPrompts
    num_steps: int
    folder: RunFolder
    past: Past
    costs: Costs
    notes: Sequence[str] = ()
    """What the preflight has to say."""


def _train(job: Job, console: Console) -> None:
    """Train, again from the newest checkpoint when workers are lost without which a step is void."""
    failures, again = 0, True
    while again:
        observer, first = _observer(job, console), job.past.version
        try:
            anyio.run(obeying, partial(_with_servers, job, observer), observer.on_note)
            again = False
        except WorkerDied as died:
            failures = failures + 1 if saved(job.folder.checkpoints) == first else 1
            if failures > job.config.engine.restarts or not job.config.checkpoint.every:
                observer.on_note(_how_to_go_on(job))
                raise
            observer.on_note(f"{died}; the run is started again from its newest checkpoint")
        except (WorkerError, RewardError, SyncError, CheckpointError, ConfigError, Stopped) as error:
            if failures or not isinstance(error, ConfigError):  # else nothing has been started yet
                observer.on_note(_how_to_go_on(job))
            raise
        finally:
            observer.close()
        if again:
            past = go_on(job.folder, job.config, job.num_steps, ())
            job = replace(job, past=past, costs=_own_costs(job.config, job.folder), notes=())


def _observer(job: Job, console: Console) -> Observer:
    config, first = job.config, job.past.version
    info = RunInfo(config.algorithm.name, config.model.name, config.seed, job.folder.path, job.num_steps)
    observer = open_observer(info, job.folder, console, tensorboard=config.observe.tensorboard, first_step=first)
    for note in (*doubts(config), *video_notes(config), *job.notes, *job.past.notes):
        observer.on_note(note)
    return observer


def _how_to_go_on(job: Job) -> str:
    done = saved(job.folder.checkpoints)
    return f"saved: {done} of {job.num_steps} steps; to go on: digen run --resume {job.folder.path}"


def _end(job: Job, console: Console) -> None:
    """What may be missing of a run that was killed between its last checkpoint and its end: old checkpoints go.

    Rows and sample grids are there, they come before the checkpoint. Raises DivergedError again if it ended with that.
    """
    config, folder, past = job.config, job.folder, job.past
    info = RunInfo(config.algorithm.name, config.model.name, config.seed, folder.path, job.num_steps)
    observer = ManyObservers(JsonlObserver(folder), PlainView(info, console))
    for note in past.notes:
        observer.on_note(note)
    observer.close()
    rotate(folder.checkpoints, config.checkpoint.keep, config.checkpoint.best)
    if past.num_bad_steps >= config.trainer.max_bad_steps:
        found = f"{past.num_bad_steps} steps in a row had a gradient that is not finite"
        raise DivergedError(f"{folder.path}: the last {found}; trainer.max_bad_steps={config.trainer.max_bad_steps}")


async def _with_servers(job: Job, observer: Observer, orders: Orders) -> None:
    """The run, while the servers that its rewards want are up."""
    async with serving(job.config.reward, job.folder.logs, observer.on_note) as rewards:
        await _run(replace(job, config=job.config.model_copy(update={"reward": rewards})), observer, orders)


async def _run(job: Job, observer: Observer, orders: Orders) -> None:
    config, past = job.config, job.past
    engine = make_engine(config)
    orders.abandon = partial(_abandon, engine, observer)
    async with engine.open(specs(_as_workers_see_it(job), job.folder.logs)) as groups:
        present = {name: group for name, group in groups.items() if not why_lost(group)}
        generators = [group for name, group in groups.items() if name not in (TRAINER, SCORER)]
        trainer, scorer = groups[TRAINER], groups.get(SCORER)
        clock = Clock(past.elapsed_s) if past.checkpoint or past.elapsed_s else None
        await load(present, observer, clock, _texts(job))
        await _note_cut_prompts(config, next(iter(present.values())), job.prompts, observer)
        start = await _begin(job, [g for g in generators if g.name in present], trainer, observer, clock)
        driver = Driver(
            config,
            generators,
            trainer,
            prompts=job.prompts,
            num_steps=job.num_steps,
            total=_total(config),
            drop=engine.store.drop,
            observer=observer,
            run_dir=job.folder.path,
            start=start,
            costs=job.costs,
            scorer=scorer,
            revive=_revive(job, engine),
        )
        orders.save = partial(_save_now, driver)
        try:
            await driver.run()
        except DivergedError:
            await driver.saves.finish(trainer)  # what was being written is sound
            raise


def _revive(job: Job, engine: Engine) -> Revive | None:
    """How a lost group is started again; None where it could not get the present weights."""
    if job.config.weights.transport == "collective":
        return None

    async def revive(group: WorkerGroup) -> None:
        await engine.respawn(group)
        await load({group.name: group}, prompts=_texts(job))

    return revive


def _abandon(engine: Engine, observer: Observer) -> None:
    engine.abandon()
    observer.close()  # or a terminal has no cursor any more


def _save_now(driver: Driver, why: Stopped) -> bool:
    driver.flight.wake()
    return driver.saves.ask(driver.version, why)


def _total(config: RunConfig[Any]) -> Callable[[Scores], tuple[float, ...]]:
    """Each row's reward, from its single ones."""
    return partial(total, terms=config.reward, group_size=config.algorithm.samples_per_prompt)


def _as_workers_see_it(job: Job) -> RunConfig[Any]:
    """With what is known only now: the number of steps, for the learning rate; a folder for weights on their way."""
    config, folder = job.config, job.folder.path.absolute()
    place = config.weights.dir.absolute() / folder.name if config.weights.dir else folder / "weights"
    weights = config.weights.model_copy(update={"dir": place})
    return config.model_copy(update={"steps": job.num_steps, "weights": weights})


async def _begin(
    job: Job, generators: Sequence[WorkerGroup], trainer: WorkerGroup, observer: Observer, clock: Clock | None
) -> Start:
    """Give the trainer the weights that the run starts from, and make the stale samples again that it had."""
    config, past = job.config, job.past
    if past.checkpoint is None:
        if weights := weights_from(config):
            await trainer.call("begin_from", weights)
        return Start(loaded=weights is not None, elapsed_s=clock.now() if clock else 0.0)
    await trainer.call("resume", past.checkpoint, past.version)
    stale = {step: count for step, count in past.stale.items() if step < job.num_steps}
    wanted = stale_microbatches(config, job.prompts, stale)
    calls = Calls(config, _total(config), None, observer.on_note)
    made = await make_again(calls, generators, past, wanted)
    return Start(past.version, True, made, past.num_bad_steps, clock.now() if clock else 0.0)


def weights_from(config: RunConfig[Any]) -> Path | None:
    """The checkpoint that `checkpoint.init_from` names; None when it names none. ConfigError when it does not fit."""
    if config.checkpoint.init_from is None:
        return None
    found = trained.find(config.checkpoint.init_from, "live")
    for key in ("model.name", "trainer.lora"):
        section, name = key.split(".")
        asked, got = (getattr(getattr(c, section), name) for c in (config, found.config))
        if asked != got:
            raise ConfigError(f"checkpoint.init_from: {found.folder} has {key}={got}, this run has {asked}")
    if found.path.is_dir():
        raise ConfigError(f"checkpoint.init_from: {found.folder} is an export; allowed: the folder of a run")
    return found.checkpoint


def _own_costs(config: RunConfig[Any], folder: RunFolder) -> Costs:
    """What an earlier part of this run measured."""
    try:
        return known_costs(config, folder.path)
    except ConfigError:
        return Costs()


def known_costs(config: RunConfig[Any], other: Path) -> Costs:
    """What another run measured, for the groups of this one. Raises ConfigError when it measured nothing."""
    return Costs.of(finished_spans(other)).renamed(generator_names(config.generator.replicas), TRAINER)


def make_engine(config: RunConfig[Any]) -> Engine:
    """The engine that the config names."""
    kind = cast("Callable[..., Engine]", plugins.find("engines", config.engine.name))
    return kind() if config.engine.address is None else kind(config.engine.address)


def specs(config: RunConfig[Any], log_dir: Path) -> list[WorkerSpec]:
    """Generator replicas (none if colocated; beyond `min_replicas` optional), the trainer, and what scores if apart."""
    generator, trainer = config.generator, config.trainer
    replicas = 0 if config.schedule.mode == "colocated" else generator.replicas
    names = generator_names(replicas) if replicas else ()
    needed, target = names[: generator.min_replicas], plugins.target("generators", generator.backend)
    shares = [generator.devices if config.engine.name == "ray" else generator.devices_of(k) for k in range(replicas)]
    apart = GroupConfig(devices=config.scoring.devices) if config.scoring.devices else None
    return [
        *(
            replace(spec(config, name, target, generator, log_dir), devices=devices, optional=name not in needed)
            for name, devices in zip(names, shares, strict=True)
        ),
        spec(config, TRAINER, plugins.target("trainers", trainer.backend), trainer, log_dir),
        *([spec(config, SCORER, "digen.backends.scoring:Scorer", apart, log_dir)] if apart else []),
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
        node=group.node,
        log_dir=log_dir,
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """A run's clock that goes on from so many seconds; made inside the event loop."""

    elapsed_s: float
    made_s: float = field(default_factory=anyio.current_time)

    def now(self) -> float:
        return self.elapsed_s + anyio.current_time() - self.made_s


async def load(
    groups: Mapping[str, WorkerGroup],
    observer: Observer | None = None,
    clock: Clock | None = None,
    prompts: Sequence[str] = (),
) -> None:
    """Load models and rewards on all groups at once. Time 0 of a run is when the last one is ready.

    With a `clock` a run goes on, and loading takes time of it. `prompts` are encoded first, while the text encoders
    have the devices for themselves.
    """
    start = anyio.current_time()
    seconds: dict[str, float] = {}

    async def one(group: WorkerGroup) -> None:
        if prompts:
            await group.call("encode", tuple(prompts))
        await group.call("load")
        seconds[group.name] = anyio.current_time() - start

    await all_at_once(partial(one, group) for group in groups.values())
    if observer is not None:
        whole = anyio.current_time() - start
        begin = clock.now() - whole if clock else -whole
        for name, end in seconds.items():
            observer.on_span(Span("load", name, 0, -1, 0, begin, begin + end))


def _texts(job: Job) -> Sequence[str]:
    """The prompts of the run, and what guidance leads them away from, in the order in which they are needed first."""
    steps = range(job.past.version, min(job.num_steps, job.past.version + job.prompts.steps_per_epoch))
    prompts = [prompt for step in steps for prompt in job.prompts(step)]
    own = [p.negative for p in prompts if p.negative is not None] if job.config.sampling.guidance > 1 else []
    return list(dict.fromkeys([*(p.text for p in prompts), *own]))


async def _note_cut_prompts(
    config: RunConfig[Any], group: WorkerGroup, prompts: StepPrompts, observer: Observer
) -> None:
    texts: Sequence[str] = [prompt.text for prompt in prompts.prompts]
    if cut := (await group.call("num_cut", texts))[0]:
        limit = config.model.max_text_tokens
        observer.on_note(f"{cut} of {len(texts)} prompts have over {limit} tokens and are cut by the text encoder")
