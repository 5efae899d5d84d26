"""Going on with a run: from which checkpoint, with which settings, and what its files then hold.

Invariant: the newest checkpoint that is whole is taken, and what is wrong with newer ones is said; a run is trained by
one process at a time; after a resume `metrics.jsonl` has one row for each step.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from digen.calls import Calls
from digen.checkpoint import manifest
from digen.checkpoint.drift import PROMPTS, refuse_drift
from digen.checkpoint.manifest import PREVIOUS
from digen.config import RunConfig
from digen.data.sampler import StepPrompts
from digen.engines.base import WorkerGroup
from digen.engines.together import all_at_once
from digen.errors import CheckpointError, ConfigError
from digen.observe.files import RunFolder, read_spans, write_atomic
from digen.presets import prompt_sources
from digen.schedule import gap
from digen.trained import WEIGHTS
from digen.types import MicroBatch, Rollout, Version

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Past:
    """What there is of a run when it begins; the defaults are those of a new one."""

    checkpoint: Path | None = None
    version: Version = 0
    stale: Mapping[int, int] = field(default_factory=dict)
    """Coming step -> how many of its samples were made under the weights of `stale_version`."""
    stale_version: Version | None = None
    num_bad_steps: int = 0
    elapsed_s: float = 0.0
    """On the clock of the run's spans."""
    notes: tuple[str, ...] = ()


@contextmanager
def locked(folder: RunFolder) -> Iterator[tuple[str, ...]]:
    """Keep the run to this process; the lock goes with the process, however that ends. Raises ConfigError.

    Yields what there is to say of a process that had the lock and did not end well.
    """
    try:
        file = (folder.path / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"{folder.path} cannot be written: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(file)
            raise ConfigError(f"{folder.path} is being trained by another process{owner and f': {owner}'}") from None
        before = _owner(file)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since_s": round(time.time())}))
        file.flush()
        try:
            yield (f"the lock of {before} is stale, and was taken over",) if before else ()
        finally:
            file.truncate(0)  # what is left here otherwise is of a process that was killed


def _owner(file: TextIO) -> str:
    """Who has, or had, the lock, and since when; "" when nobody says."""
    file.seek(0)
    try:
        found = json.loads(file.read(1 << 12))
        hours, seconds = divmod(max(0, round(time.time() - found["since_s"])), 3600)
        return f"process {found['pid']:d} on {found['host']}, for {hours} h {seconds // 60} min"
    except (ValueError, KeyError, TypeError):
        return ""


def write_facts(folder: RunFolder, config: RunConfig[Any]) -> None:
    """Write down what `go_on` will compare with."""
    write_atomic(folder.run, json.dumps({"prompts_sha256": _fingerprint(config)}, indent=1) + "\n")


def go_on(folder: RunFolder, config: RunConfig[Any], num_steps: int, allowed: Collection[str]) -> Past:
    """The past of a run that goes on with this config; its logs are cut back to the checkpoint.

    Raises ConfigError when no checkpoint can be read, when more than `num_steps` are done, or for a change that is not
    `allowed` (keys or sections of keys). Without any checkpoint a run goes on from step 0.
    """
    notes: list[str] = []
    path = newest(folder, config.trainer.updates_per_rollout, notes.append)
    version = manifest.version_of(path) if path else 0
    assert version is not None
    state = manifest.state(path) if path else {}
    changed = [PROMPTS] if _prompts_changed(folder, config) else []
    if config.trainer.lr_schedule != "constant" and state.get("num_steps", num_steps) != num_steps:
        changed.append("steps")
    made_by = (path / manifest.CONFIG if path else folder.config).read_text("utf-8")
    where = str(path or folder.path)
    notes += [f"allowed change: {text}" for text in refuse_drift(made_by, config, changed, allowed, where)]
    if version > num_steps:
        raise ConfigError(f"{folder.path} has done {version} steps; to go on, set steps higher; got {num_steps}")
    notes.append(_whence(folder, path, done=version == num_steps))
    _cut(folder, version)
    spans = read_spans(folder.events) if folder.events.is_file() else []
    return Past(
        checkpoint=path,
        version=version,
        stale={int(step): count for step, count in state.get("stale", {}).items()},
        stale_version=state.get("stale_version"),
        num_bad_steps=state.get("num_bad_steps", 0),
        elapsed_s=max((span.end for span in spans), default=0.0),
        notes=tuple(notes),
    )


def _whence(folder: RunFolder, path: Path | None, *, done: bool) -> str:
    if done:
        return f"{path} is of the last step: nothing is left to do; to go on, set steps higher"
    return f"going on from {path}" if path else f"{folder.path} has no checkpoint: from step 0"


def newest(folder: RunFolder, rollout: int, note: Note) -> Path | None:
    """The newest checkpoint that is whole; newer ones are named in notes, and damaged ones renamed.

    Raises ConfigError when there are some and none can be gone on from. `rollout`: `updates_per_rollout`.
    """
    problems, damaged = [], []
    for path in manifest.checkpoints(folder.checkpoints):
        try:
            manifest.check(path)
        except CheckpointError as error:
            problems.append(str(error))
            damaged += [path] if (path / manifest.MANIFEST).exists() else []  # without one it was never a checkpoint
            continue
        if problem := _unusable(path, rollout):
            problems.append(problem)
            continue
        for other in damaged:
            other.rename(other.with_name(f"{other.name}.damaged"))
        for problem in problems:
            note(problem)
        return path
    if problems:
        raise ConfigError("\n".join([f"{folder.path} has no checkpoint to go on from:", *problems]))
    return None


def _unusable(path: Path, rollout: int) -> str | None:
    """Why a run cannot go on from a checkpoint that is whole."""
    if reason := manifest.state(path).get("no_optimizer"):
        return f"{path} has no optimizer state ({reason}); --init-from begins anew from its weights"
    if (manifest.version_of(path) or 0) % rollout:
        return f"{path} was saved between two rollouts (trainer.updates_per_rollout={rollout})"
    return None


def _fingerprint(config: RunConfig[Any]) -> str:
    return prompt_sources(config).fingerprint()


def _prompts_changed(folder: RunFolder, config: RunConfig[Any]) -> bool:
    try:
        known = json.loads(folder.run.read_text("utf-8")).get("prompts_sha256")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder.run} cannot be read: {error}") from error
    return bool(known != _fingerprint(config))


def _cut(folder: RunFolder, version: Version) -> None:
    """Rows of steps that will be done again leave; a line that was being written when the run was killed too."""
    for log in (folder.events, folder.decisions, folder.metrics, folder.logs / "driver.log"):
        if log.is_file():
            lines = log.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith(b"\n")]
            if log == folder.metrics:
                kept = [line for line in kept if json.loads(line)["step"] < version]
            if kept != lines:
                write_atomic(log, b"".join(kept))


def stale_microbatches(config: RunConfig[Any], prompts: StepPrompts, stale: Mapping[int, int]) -> list[MicroBatch]:
    """The micro-batches that so many samples of each step are: the first ones."""
    found = []
    for step, count in sorted(stale.items()):
        per_microbatch, per_prompt = config.schedule.prompts_per_microbatch, config.algorithm.samples_per_prompt
        for microbatch in gap.cut(step, prompts(step), per_prompt, per_microbatch, config.seed):
            if (count := count - microbatch.num_samples) < 0:
                break
            found.append(microbatch)
    return found


async def make_again(
    calls: Calls, generators: Sequence[WorkerGroup], past: Past, wanted: Sequence[MicroBatch]
) -> tuple[Rollout, ...]:
    """Stale rollouts once more, in order, under the weights that they were made with, which the checkpoint holds.

    A sample depends on weights and identity alone (rule R8), so they are what they were, whoever makes them.
    """
    if not wanted or past.checkpoint is None or past.stale_version is None:
        return ()
    weights, version = past.checkpoint / PREVIOUS / WEIGHTS, past.stale_version
    made: dict[int, Rollout] = {}
    queue = deque(enumerate(wanted))

    async def one(group: WorkerGroup) -> None:
        await group.call("load_weights", weights, version)
        while queue:
            number, microbatch = queue.popleft()
            made[number] = await calls.generate(group, microbatch, version, tuple(range(microbatch.num_samples)))

    await all_at_once(partial(one, group) for group in generators)
    return tuple(made[number] for number in sorted(made))
