"""What a plan is made for: the counts of a step and what its work takes, from flags, a file or a finished run.

Invariant: a workload is a frozen value in which every cost is known that any schedule may need; what was not given is
assumed in one place and said in its notes. Whatever is wrong with what was given is an error here. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from digen import schema
from digen.config import Count, NonNegative, Positive, ScheduleConfig, Section, Share
from digen.errors import ConfigError, one_of
from digen.observe.files import RunFolder, read_rows, read_spans
from digen.schedule.costs import Costs
from digen.settings import Setting, Tree, from_file, merge, source
from digen.types import Span, SpanKind

TRAINER = "trainer"
SCORER = "scorer"
STALENESS = 0.5
"""Of the mode `tcss`, where nothing else is said."""
STEPS = 8
SAMPLES = 16

S = TypeVar("S", bound=BaseModel)


class Words(Section):
    """The words of `digen plan`: keys of a costs file, flags on the command line. Seconds are of one micro-batch."""

    microbatches: Count | None = None
    """Micro-batches of a step (B)."""
    generate: Positive | None = None
    """Seconds of a generator."""
    assist: Positive | None = None
    """Seconds of the trainer to generate one; as long as a generator if not given."""
    update: Positive | None = None
    """Seconds of the trainer to compute its gradients (with TSP)."""
    update_unstacked: Positive | None = None
    """The same without TSP; as long as with it if not given."""
    score: NonNegative | None = None
    """Seconds of a generator to score one."""
    sync: NonNegative | None = None
    """Seconds of the optimizer step and of publishing the weights, once a step."""
    pull: NonNegative | None = None
    """Seconds of a generator to load new weights, once a step."""
    replicas: Count | None = None
    """Generators that work on their own micro-batches."""
    slower: str | None = Field(None, pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?)*$")
    """How many times as long each generator takes to generate and to score, as in 1,3"""
    steps: Count | None = None
    """Global steps."""
    samples: Annotated[int, Field(ge=2)] | None = None
    """Samples of a micro-batch."""
    max_in_flight: Count | None = None
    """Generation calls under way at once."""
    staleness: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """Largest stale share of a step in the mode `tcss`."""
    measured_on: str | None = Field(None, pattern=r"^[1-9]\d*:[1-9]\d*$")
    """Devices that the costs are for, of all generators and of the trainer, as in 16:16"""


PRICES: Mapping[str, tuple[SpanKind, bool]] = {
    "generate": ("generate", True),
    "score": ("score", True),
    "pull": ("pull", False),
    "assist": ("assist", True),
    "update": ("update", True),
    "sync": ("sync", False),
}
"""Word -> kind of work, and whether it is work on samples."""
OF_GENERATORS: tuple[SpanKind, ...] = ("generate", "score", "pull", "help")
BY_SPEED: tuple[SpanKind, ...] = ("generate", "score", "help")
"""What a slower device takes longer for; a pull waits for the network."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Counts of a step, costs of all groups, and the schedule's settings that are the same in every mode."""

    costs: Costs
    generators: tuple[str, ...]
    prompts: int
    """Of a step; the last micro-batch may be smaller."""
    prompts_per_microbatch: int
    samples_per_prompt: int
    steps: int = STEPS
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    staleness: Share = STALENESS
    unstacked: float = 1.0
    """How many times as long an update takes without TSP."""
    updates_per_rollout: int = 1
    save_every: int = 0
    """Steps between checkpoints; 0: none until the end."""
    devices: tuple[int, int] = (1, 1)
    """Of all generators together and of the trainer, that the costs are for."""
    mixed: bool = False
    """Whether these are devices of two kinds."""
    assumed: frozenset[SpanKind] = frozenset()
    """Kinds of work whose costs nobody gave."""
    notes: tuple[str, ...] = ()
    run: MeasuredRun | None = None

    @property
    def num_samples(self) -> int:
        """Of a whole micro-batch."""
        return self.prompts_per_microbatch * self.samples_per_prompt

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch of a step."""
        starts = range(0, self.prompts, self.prompts_per_microbatch)
        return tuple(self.samples_per_prompt * min(self.prompts_per_microbatch, self.prompts - k) for k in starts)

    def seconds(self, worker: str, kind: SpanKind, rows: int = 0) -> float:
        """What this work takes; 0 where nobody ever needed it."""
        return self.costs.seconds(worker, kind, rows) or 0.0


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A finished run as it was, to hold predictions against."""

    work: Workload
    steps: tuple[tuple[Costs, float], ...]
    """Costs within a step and the seconds that it took, of all steps but the first; means of each rollout's steps."""


def generator_names(replicas: int) -> tuple[str, ...]:
    """As a run names its generators."""
    return ("generator",) if replicas == 1 else tuple(f"generator-{k}" for k in range(replicas))


def read(costs: Path | None, flags: Mapping[str, Any]) -> Workload:
    """The workload of a file or a finished run, in which flags (word -> value) replace what it says.

    Raises ConfigError: an unknown word, a value out of bounds, a cost that is missing, no such file or run.
    """
    is_run = costs is not None and costs.is_dir()
    settings = [] if costs is None or is_run else _file(costs)
    settings += [Setting((word,), value, _flag(word)) for word, value in flags.items() if value is not None]
    words = _checked(Words, merge({}, settings, ()), settings)
    if costs is not None and is_run:
        return _complete(_replaced(of_run(costs), words))
    for word in ("microbatches", "generate", "update"):
        if getattr(words, word) is None:
            places = "a costs file or a finished run (--costs)" if costs is None else f"{costs}"
            raise ConfigError(f"{word}: missing; allowed: {_flag(word)}, or {places} that says it")
    empty = Workload(Costs(), (), prompts=1, prompts_per_microbatch=1, samples_per_prompt=SAMPLES)
    return _complete(_replaced(empty, words))


def of_run(path: Path) -> Workload:
    """A finished run: its settings, and its costs over all of its steps. Raises ConfigError and DataError."""
    folder, spans = RunFolder.open(path), finished_spans(path)
    tree = merge({}, from_file(_text(folder.config), str(folder.config)), ())
    algorithm, generator, trainer = (tree.get(key, {}) for key in ("algorithm", "generator", "trainer"))
    samples, best_of_n = algorithm.get("samples_per_prompt", SAMPLES), algorithm.get("best_of_n")
    kept = sum(best_of_n.values()) / samples if best_of_n else 1.0
    schedule = _checked(ScheduleConfig, tree.get("schedule", {}), ())
    replicas = generator.get("replicas", 1)
    work = Workload(
        Costs(),
        generator_names(replicas),
        prompts=tree.get("data", {}).get("prompts_per_step", 1),
        prompts_per_microbatch=schedule.prompts_per_microbatch,
        samples_per_prompt=samples,
        schedule=schedule,
        staleness=schedule.staleness or STALENESS,
        updates_per_rollout=trainer.get("updates_per_rollout", 1),
        save_every=tree.get("checkpoint", {}).get("every", 0),
        devices=(replicas * generator.get("ranks", 1), trainer.get("ranks", 1)),
        mixed=generator.get("node", {}) != trainer.get("node", {}),
    )
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    return _with_costs(work, list(_of_all_samples(spans, kept)), {int(r["step"]): r["step_time_s"] for r in rows})


def _with_costs(work: Workload, spans: Sequence[Span], times: Mapping[int, float]) -> Workload:
    """What a run's work took on the whole, and within each of its steps, which took these times."""
    work = replace(work, costs=Costs.over(spans).renamed(work.generators, TRAINER), steps=len(times) or STEPS)
    complete, period = _complete(work), work.updates_per_rollout
    by_rollout: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rollout[span.step // period].append(span)
    steps: list[tuple[Costs, float]] = []
    for rollout in sorted({step // period for step in times})[1:] or {0} & times.keys():
        own = Costs.over(by_rollout[rollout], trimmed=False).renamed(work.generators, TRAINER)
        seconds = fmean(time for step, time in times.items() if step // period == rollout)
        steps.append((complete.costs.updated(own), seconds))
    return replace(work, run=MeasuredRun(complete, tuple(steps)) if steps else None)


def finished_spans(path: Path) -> list[Span]:
    """All work that a run finished. Raises ConfigError when there is none, DataError when the log is damaged."""
    folder = RunFolder.open(path)
    spans = read_spans(folder.events) if folder.events.is_file() else []
    if not any(span.kind == "update" for span in spans):
        raise ConfigError(f"{path}: no costs can be taken from this run: {folder.events.name} has no finished update")
    return spans


def _of_all_samples(spans: Iterable[Span], kept: float) -> Iterable[Span]:
    """Updates counted in generated samples, as if best-of-n had kept them all, as the simulation does."""
    for span in spans:
        yield replace(span, rows=round(span.rows / kept)) if span.kind in ("update", "help") else span


def _replaced(work: Workload, words: Words) -> Workload:
    """What words say, in place of what was known."""
    if words.samples is not None:
        prompts = ceil(work.prompts / work.prompts_per_microbatch)
        work = replace(work, prompts=prompts, prompts_per_microbatch=1, samples_per_prompt=words.samples)
    if words.microbatches is not None:
        work = replace(work, prompts=words.microbatches * work.prompts_per_microbatch)
    slower = [float(factor) for factor in words.slower.split(",")] if words.slower else []
    if words.replicas is not None or slower or not work.generators:
        names = generator_names(words.replicas or len(slower) or 1)
        each = work.devices[0] / max(len(work.generators), 1)
        devices = (round(each * len(names)), work.devices[1])
        work = replace(work, costs=work.costs.renamed(names, TRAINER), generators=names, devices=devices)
    if words.max_in_flight is not None:
        work = replace(work, schedule=work.schedule.model_copy(update={"max_in_flight": words.max_in_flight}))
    if words.measured_on is not None:
        generators, trainer = map(int, words.measured_on.split(":"))
        work = replace(work, devices=(generators, trainer))
    work = replace(work, steps=words.steps or work.steps, staleness=words.staleness or work.staleness)
    return _slowed(_priced(work, words), slower)


def _slowed(work: Workload, slower: Sequence[float]) -> Workload:
    """Each generator takes so many times as long."""
    if slower and (min(slower) <= 0 or len(slower) != len(work.generators)):
        got, count = ",".join(f"{factor:g}" for factor in slower), len(work.generators)
        raise ConfigError(f"slower: got {got}; allowed: a number > 0 for each of {count} generators (--slower)")
    costs = work.costs
    for name, factor in zip(work.generators, slower, strict=False):
        costs = costs.scaled(dict.fromkeys(BY_SPEED, factor), [name])
    return replace(work, costs=costs)


def _priced(work: Workload, words: Words) -> Workload:
    costs = work.costs
    for word, (kind, of_samples) in PRICES.items():
        seconds = getattr(words, word)
        for worker in () if seconds is None else work.generators if word in OF_GENERATORS else (TRAINER,):
            costs = costs.fixed(worker, kind, work.num_samples if of_samples else 0, seconds)
    update = costs.seconds(TRAINER, "update", work.num_samples)
    if words.update_unstacked is not None and update:
        work = replace(work, unstacked=words.update_unstacked / update)
    return replace(work, costs=costs)


def _complete(work: Workload) -> Workload:
    """Assume what no mode may lack, and say so. The same work takes 1 / devices of a group as long."""
    costs, notes, size = work.costs, list(work.notes), work.num_samples
    devices = work.devices[0] / len(work.generators)
    measured = [seconds for name in work.generators if (seconds := costs.seconds(name, "generate", size))]
    if not measured:
        raise ConfigError("generate: no generator of this run generated anything; allowed: --generate")
    missing: set[SpanKind] = set()
    if costs.seconds(TRAINER, "assist", size) is None:
        missing.add("assist")
        costs = costs.fixed(TRAINER, "assist", size, fmean(measured) * devices / work.devices[1])
        notes.append("an assist is taken to be as long as a generator's generate on as many devices (--assist)")
    update = costs.seconds(TRAINER, "update", size) or 0.0
    assumed = {"generate": fmean(measured), "score": 0.0, "pull": 0.0, "help": update * work.devices[1] / devices}
    for name, kind in product(work.generators, OF_GENERATORS):
        if costs.seconds(name, kind, size) is None:
            missing.add(kind)
            costs = costs.fixed(name, kind, size if assumed[kind] else 0, assumed[kind])
    if "help" in missing:
        notes.append("in shared, a generator's update is taken to be as long as the trainer's on as many devices")
    if "generate" in missing:
        notes.append("a generator that never generated is taken to be as fast as the others")
    if work.unstacked == 1.0:
        notes.append("colocated, naive and gap update as fast as with TSP (--update-unstacked)")
    return replace(work, costs=costs, notes=tuple(notes), assumed=work.assumed | missing)


def placed(work: Workload, generators: int, trainers: int, borrowed: int = 0) -> Workload:
    """The same work on other numbers of devices: it takes 1 / devices of its group as long.

    `borrowed`: devices of the trainer's kind that generate beside the generators' own, in groups of the same size.
    """
    faster, quicker = work.devices[0] / generators, work.devices[1] / trainers
    costs = work.costs.scaled({**dict.fromkeys(BY_SPEED, faster), "assist": quicker, "update": quicker})
    each = max(1, generators // len(work.generators))
    sizes = [each] * (borrowed // each) + ([borrowed % each] if borrowed % each else [])
    more = tuple(f"borrowed-{k}" for k in range(len(sizes)))
    for name, size in zip(more, sizes, strict=True):
        for kind, seconds in _borrowed(work, size).items():
            costs = costs.fixed(name, kind, 0 if kind == "pull" else work.num_samples, seconds)
    return replace(work, costs=costs, devices=(generators + borrowed, trainers), generators=work.generators + more)


def two_kinds(work: Workload) -> Workload:
    """What each side takes of the other's work, known or assumed by how fast each generates. Raises ConfigError."""
    if "assist" in work.assumed:
        raise ConfigError("assist: missing; what devices of the trainer's kind take to generate; allowed: --assist")
    if "help" not in work.assumed:
        return work
    costs, size = work.costs, work.num_samples
    by_trainer = costs.seconds(TRAINER, "update", size) or 0.0
    for name in work.generators:
        slower = work.seconds(name, "generate", size) / work.seconds(TRAINER, "assist", size)
        costs = costs.fixed(name, "help", size, by_trainer * slower)
    return replace(work, costs=costs)


def _borrowed(work: Workload, devices: int) -> dict[SpanKind, float]:
    """What so many devices of the trainer's kind take for a generator's work on a micro-batch."""
    size, trainer = work.num_samples, work.devices[1] / devices
    mean = {kind: fmean(work.seconds(name, kind, size) for name in work.generators) for kind in OF_GENERATORS}
    generate = work.seconds(TRAINER, "assist", size) * trainer
    return {
        "generate": generate,
        "score": mean["score"] * generate / mean["generate"],
        "pull": mean["pull"],
        "help": work.seconds(TRAINER, "update", size) * trainer,
    }


def _file(path: Path) -> list[Setting]:
    """The words of a YAML or JSON file."""
    settings = from_file(_text(path), str(path))
    for setting in settings:
        if setting.path[0] not in Words.model_fields:
            raise ConfigError(one_of(f"{setting.origin}: key", setting.path[0], Words.model_fields))
    return settings


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from error


def _flag(word: str) -> str:
    return f"--{word.replace('_', '-')}"


def _checked(kind: type[S], tree: Tree, settings: Sequence[Setting]) -> S:
    """A validated section, or all that is wrong with it, each with where it was said."""
    known = schema.keys(kind)
    found = list(schema.flags_for_numbers(tree, known).items())
    try:
        checked = kind.model_validate(tree)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path, texts = schema.lines(details, tree, known)
            found += [(path, text) for text in texts]
    if found:
        raise ConfigError("\n".join(f"{text} ({source(settings, path)})" if settings else text for path, text in found))
    return checked
