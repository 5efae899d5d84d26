"""A placement that fits: how many devices generate and train, and what has to be set for either to fit. Pure.

Invariant: nothing is changed that would change what is learned or drawn, but where nothing else fits and it is said so;
settings that the user gave stay. The first placement that fits is taken, in the order of what it costs in time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, Literal

from digen.config import RunConfig
from digen.errors import ConfigError
from digen.memory.ranks import RankMemory, generator_memory, rollouts, trainer_memory
from digen.memory.sizes import Sizes

RESERVE: Final = 0.1
"""Share of a device's memory that a plan leaves alone: for CUDA itself, for messages, fragments and its own error."""
MOST_DEVICES: Final = 4096
Side = Literal["generator", "trainer"]
Settings = Mapping[str, Any]
"""Values by dotted key."""
_SMALLER: Final[Mapping[Side, tuple[Settings, ...]]] = {
    "trainer": (
        {"trainer.activation_checkpointing": True},
        {"trainer.tsp": 1},
        {"trainer.batch_size": "least"},
        {"trainer.sync_gradients": "pass", "trainer.zero_stage": 3},
        {"trainer.cpu_offload": True},
    ),
    "generator": ({"generator.batch_size": "least"}, {"model.vae_tiling": True}),
}
"""What makes a rank need less, the cheapest first."""
CHANGES_PIXELS: Final = "model.vae_tiling"


@dataclass(frozen=True, slots=True)
class Fit:
    """A side of a run with settings that were added to make it fit, and what it then holds."""

    config: RunConfig[Any]
    rank: RankMemory
    added: Settings
    missing: float
    """Bytes by which a rank does not fit; 0 or less when it does."""

    @property
    def fits(self) -> bool:
        return self.missing <= 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What `digen plan ALGORITHM` shows."""

    config: RunConfig[Any]
    """With the placement that was found."""
    ranks: tuple[RankMemory, ...]
    rollouts: int
    """Bytes of one step's samples in the host's memory."""
    gpus: int | None
    memory: float | None
    """Bytes of a device; None: nobody said, so nothing is judged."""
    added: Settings
    problems: tuple[str, ...] = ()
    """What does not fit, with what would."""

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else not self.problems

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values, in bytes."""
        return {
            "gpus": self.gpus,
            "memory": self.memory,
            "reserve": RESERVE,
            "fits": self.fits,
            "groups": [rank.as_json() for rank in self.ranks],
            "rollouts": self.rollouts,
            "settings": dict(self.added),
            "problems": list(self.problems),
        }


Count = Callable[[RunConfig[Any], Side], Sizes]
"""Counts a model as one side keeps it."""


def check_devices(config: RunConfig[Any], gpus: int | None, memory: float | None) -> None:
    """Raises ConfigError for numbers of devices, or of bytes of each, that make no sense."""
    if gpus is not None and not 1 <= gpus <= MOST_DEVICES:
        raise ConfigError(f"--gpus: got {gpus}; allowed: 1 to {MOST_DEVICES}")
    if gpus == 1 and config.schedule.mode != "colocated":
        raise ConfigError("--gpus: got 1; allowed: 2 or more, or 1 with schedule.mode=colocated")
    if memory is not None and not 0 < memory < 1e15:
        raise ConfigError(f"--gpu-memory: got {memory / 1e9:g}; allowed: gigabytes of one device, e.g. 80")


def place(
    config: RunConfig[Any], count: Count, gpus: int | None, memory: float | None, given: Collection[str] = ()
) -> MemoryPlan:
    """The plan of a run as it is configured or, with `gpus`, placed on so many. Raises ConfigError for senseless ones.

    given: keys that are not to be changed.
    """
    check_devices(config, gpus, memory)
    search = _Search(config, count, gpus, memory, given)
    trainer, generator = search.best()
    sides = [side for side in (generator, trainer) if side is not None]
    added = {**search.split(trainer.config.trainer.ranks), **{k: v for side in sides for k, v in side.added.items()}}
    planned = with_settings(config, added)
    problems = [search.problem(side) for side in sides if memory is not None and not side.fits]
    ranks = tuple(side.rank for side in sides)
    shown = {k: v for k, v in added.items() if value_of(config, k) != v}
    return MemoryPlan(planned, ranks, rollouts(planned, search.sizes("trainer")), gpus, memory, shown, tuple(problems))


class _Search:
    def __init__(
        self, config: RunConfig[Any], count: Count, gpus: int | None, memory: float | None, given: Collection[str]
    ) -> None:
        self.config, self.count, self.gpus, self.memory, self.given = config, count, gpus, memory, given
        self.counted: dict[tuple[Side, bool], Sizes] = {}
        self.colocated = config.schedule.mode == "colocated"

    def sizes(self, side: Side, tiling: bool | None = None) -> Sizes:
        """The model as this side keeps it, counted once."""
        tiling = self.config.model.vae_tiling if tiling is None else tiling
        if (side, tiling) not in self.counted:
            self.counted[side, tiling] = self.count(with_settings(self.config, {CHANGES_PIXELS: tiling}), side)
        return self.counted[side, tiling]

    def best(self) -> tuple[Fit, Fit | None]:
        """The trainer's placement and the generators', for the number of trainer ranks that is the first to fit."""
        tried = []
        for offload in (False, True):
            for ranks in self.numbers():
                tried.append(self.fit("trainer", self.split(ranks), offload=offload))
                if tried[-1].fits:
                    break
            if tried[-1].fits:
                break
        trainer = tried[-1] if tried[-1].fits else min(tried, key=lambda fit: fit.missing)
        if self.colocated:
            return trainer, None
        return trainer, self.fit("generator", self.split(trainer.config.trainer.ranks))

    def numbers(self) -> Iterator[int]:
        """Numbers of trainer ranks, beginning with the configured share of the devices."""
        trainer, generator = self.config.trainer.ranks, self.config.generator.ranks * self.config.generator.replicas
        if self.gpus is None or "trainer.ranks" in self.given:
            yield trainer
            return
        least = 0 if self.colocated else 1
        share = 1.0 if self.colocated else trainer / (trainer + generator)
        ranks = min(max(round(self.gpus * share), 1), max(self.gpus - least, 1))
        while ranks <= self.gpus - least:
            yield ranks
            ranks = max(ranks + 1, min(ceil(1.5 * ranks), self.gpus - least))

    def split(self, ranks: int) -> dict[str, Any]:
        """So many trainer ranks, and generators on the other devices: as large replicas as configured, if they fit."""
        if self.gpus is None:
            return {}
        rest = 0 if self.colocated else max(self.gpus - ranks, 1)
        found: dict[str, Any] = {"trainer.ranks": ranks, "trainer.devices": _named(rest, ranks)}
        if rest:
            size = next(n for n in range(min(self.config.generator.ranks, rest), 0, -1) if rest % n == 0)
            found |= {"generator.ranks": size, "generator.replicas": rest // size, "generator.devices": _named(0, rest)}
        if ranks > 1 and self.config.trainer.backend == "local":
            found["trainer.backend"] = "fsdp"
        return {key: value for key, value in found.items() if key not in self.given}

    def fit(self, side: Side, split: Settings, *, offload: bool = True) -> Fit:
        """With as few of the settings that need less as make it fit; all of them where nothing does."""
        added: dict[str, Any] = {}
        found = self.tried(side, split, added)
        for step in _SMALLER[side] if self.memory is not None and self.gpus is not None else ():
            if found.fits or found.rank.when in ("encode", "load"):  # no setting makes these less
                break
            least = self.config.algorithm.loss.rows_together if side == "trainer" else 1
            wanted = {k: least if v == "least" else v for k, v in step.items()}
            new = {k: v for k, v in wanted.items() if self.may(k, v, with_settings(self.config, split), offload)}
            added |= new
            found = self.tried(side, split, added) if new else found
        for key in list(added) if found.fits else ():
            without = self.tried(side, split, {k: v for k, v in added.items() if k != key})
            if without.fits:
                added, found = dict(without.added), without
        return found

    def may(self, key: str, value: Any, config: RunConfig[Any], offload: bool) -> bool:
        """Whether a setting is free, new, and one that the backend has."""
        backend = config.trainer.backend
        readers = {
            "trainer.sync_gradients": ("fsdp",),
            "trainer.zero_stage": ("deepspeed",),
            "trainer.cpu_offload": ("fsdp", "deepspeed") if offload else (),
        }
        allowed = backend in readers.get(key, (backend,))
        return allowed and key not in self.given and value_of(config, key) != value

    def tried(self, side: Side, split: Settings, added: Settings) -> Fit:
        config = with_settings(self.config, {**split, **added})
        limit = None if self.memory is None else self.memory * (1 - RESERVE)
        sizes = self.sizes(side, config.model.vae_tiling)
        rank = trainer_memory(config, sizes, limit) if side == "trainer" else generator_memory(config, sizes)
        return Fit(config, rank, dict(added), 0.0 if limit is None else rank.peak - limit)

    def problem(self, side: Fit) -> str:
        """What is missing, and what would do."""
        missing = f"needs {side.missing / 1e9:.1f} GB more per {side.rank.group} rank (while it does: {side.rank.when})"
        ways = list(self.ways(side))
        return f"{missing}; " + (f"fits with {' or '.join(ways)}" if ways else "nothing here makes it fit")

    def ways(self, side: Fit) -> Iterator[str]:
        """Other settings, devices or numbers of devices with which a side fits."""
        name: Side = "trainer" if side.rank.group == "trainer" else "generator"
        taken = [key for step in _SMALLER[name] for key in step if key in self.given or self.gpus is None]
        if taken and self.memory is not None:
            free = replace_given(self, taken)
            fit = free.fit(name, self.split(side.config.trainer.ranks))
            if fit.fits:
                yield " ".join(setting(key, value) for key, value in fit.added.items())
        if name == "trainer" and self.gpus is not None and "trainer.ranks" not in self.given:
            number = self.gpus * 2
            while number <= min(16 * self.gpus, MOST_DEVICES):
                more = _Search(self.config, self.count, number, self.memory, self.given)
                more.counted = self.counted
                if more.best()[0].fits:
                    yield f"{number} GPUs"
                    break
                number *= 2
        yield f"devices of {ceil(side.rank.peak / (1 - RESERVE) / 1e9)} GB"


def replace_given(search: _Search, taken: Collection[str]) -> _Search:
    """A search that may change these keys too."""
    given = [key for key in search.given if key not in taken]
    free = _Search(search.config, search.count, search.gpus or 1, search.memory, given)
    free.counted = search.counted
    return free


def setting(key: str, value: Any) -> str:
    """As on the command line."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def value_of(config: RunConfig[Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_settings(config: RunConfig[Any], settings: Settings) -> RunConfig[Any]:
    """A run with other values of keys of its sections."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config


def _named(first: int, count: int) -> str:
    return f"cuda:{first}" if count == 1 else f"cuda:{first}-{first + count - 1}"
