"""The runs of `faults.py` with workers that are processes: the real driver and the real engine, and real signals.

Invariant: as there; a worker needs no torch, so that a run takes a few seconds, and its tensors are files of the
engine's store all the same, so that what is not dropped can be counted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import anyio

from digen.checkpoint import manifest
from digen.checkpoint.manifest import Part
from digen.config import RunConfig
from digen.driver import Driver
from digen.engines.base import WorkerContext, WorkerGroup, WorkerSpec
from digen.engines.process import ProcessEngine
from digen.errors import DigenError, WorkerDied
from digen.testing import Recorder, simulated_config, simulated_prompts
from digen.testing.faults import STEPS, Books, Ended, Planned, Setup
from digen.types import Ref, Scores, Start

HANG_S: Final = 1.5
"""`engine.hang_s` where something hangs."""
NEVER_S: Final = 600.0
"""Where nothing does: a busy machine is slow."""
GRACE_S: Final = 0.3
WATCHDOG_S: Final = 600.0
"""Longest time for a whole run."""
SECOND_S: Final = 0.01
"""What a second of a fault's size, or of a call's cost, takes here."""
WEIGHTS: Final = "weights.json"
WORKER: Final = f"{__name__}:Worker"


class FileStore:
    """Numbers as files of the engine's store, under names that `drop` finds."""

    def __init__(self, folder: Path, context: WorkerContext) -> None:
        self.folder, self.context, self.num_put = folder, context, 0

    def put(self, name: str, item: Any) -> Ref:
        self.num_put += 1
        key = f"{self.context.group}/{os.getpid()}/{self.num_put}/{name}"
        temporary = self.folder / f"{self.context.group}-{os.getpid()}.tmp"
        temporary.write_text(json.dumps(item))
        temporary.rename(self._path(key))
        return Ref(key, 8)

    def get(self, ref: Ref) -> Any:
        item = json.loads(self._path(ref.key).read_text())
        return {int(row): value for row, value in item.items()} if isinstance(item, dict) else item

    def _path(self, key: str) -> Path:
        return self.folder / f"{quote(key, safe='')}.safetensors"


class Worker:
    """One rank of a simulated group, to whose process what is planned really happens, once each."""

    def __init__(self, payload: Mapping[str, Any], context: WorkerContext) -> None:
        assert context.shared_dir is not None
        self.rank = context.rank
        self.books = Books(context.group, payload["samples"], world_size=context.world_size)
        self.books.store = FileStore(context.shared_dir, context)  # type: ignore[assignment]
        self.happened, self.cost_s = Path(payload["happened"]), payload["cost_s"]
        self.planned = [Planned(**fault) for fault in payload["faults"] if fault["group"] == context.group]
        self.counts: Counter[str] = Counter()
        self.outage = 0
        self.saved: tuple[int, float] = (0, 0.0)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._called, method)

    def _called(self, method: str, *args: Any) -> Any:
        number, self.counts[method] = self.counts[method], self.counts[method] + 1
        if self.outage and method == "score":
            self.outage -= 1
            raise ConnectionError("the reward does not answer")
        time.sleep(self.cost_s)
        for fault in self.planned:
            if (fault.method, fault.number) == (method, number) and self._first(fault):
                return self._with(fault, method, args)
        return self._do(method, args)

    def _first(self, fault: Planned) -> bool:
        try:
            (self.happened / fault.name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _do(self, method: str, args: tuple[Any, ...]) -> Any:
        own = getattr(self, f"_{method}", None)
        return own(*args) if own else self.books._on_rank(method, self.rank, args)  # noqa: SLF001 - in a process

    def _with(self, fault: Planned, method: str, args: tuple[Any, ...]) -> Any:
        do = partial(self._do, method, args)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception" | "reward outage":
                self.outage = round(fault.size) if fault.kind == "reward outage" else 0
                raise RuntimeError("an injected exception")
            case "slow" | "clock jump":
                time.sleep(min(fault.size * SECOND_S, 20.0))
            case "lost result":
                do()
                os.kill(os.getpid(), signal.SIGSTOP)
            case "duplicated result":
                _send_twice()
            case "corrupt weights":
                return "corrupt"
            case "full disk":
                return Part(problem="No space left on device")
            case "killed while idle":
                _die_later(fault.size * SECOND_S)
        return do()

    # What is not of the simulation ----------------------------------------------------------------------------------

    def _load(self) -> None:
        """There is nothing to load."""

    def _close(self) -> None:
        """Nothing runs beside the calls."""

    def _resume(self, path: Path, version: int) -> None:
        self.books.version, self.books.weights = version, json.loads((path / WEIGHTS).read_text())

    def _save(self, _path: Path, _aside: str, _stale: int | None) -> None:
        self.saved = self.books.version, self.books.weights

    def _seal(self, path: Path, aside: str, _files: object, facts: Mapping[str, Any]) -> None:
        folder = path.parent / aside
        folder.mkdir(parents=True)
        texts = {WEIGHTS: json.dumps(self.saved[1]), manifest.STATE: json.dumps(dict(facts))}
        manifest.seal(folder, path, [], texts)


def _die_later(seconds: float) -> None:
    """A child outlives the call, and kills this process."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os._exit(0)


def _send_twice() -> None:
    """The next answer goes to the driver twice."""
    plain, sent = socket.socket.sendall, list[bytes]()

    def sendall(connection: socket.socket, data: bytes) -> None:
        plain(connection, data)
        sent.append(bytes(data))
        if len(sent) == 2:  # header and body
            socket.socket.sendall = plain  # type: ignore[method-assign]
            plain(connection, b"".join(sent))

    socket.socket.sendall = sendall  # type: ignore[assignment, method-assign]


def config_of(setup: Setup) -> RunConfig[Any]:
    scoring = {"timeout_s": 0.2, **({"devices": "cpu"} if setup.scorer else {})}
    hangs = any(fault.kind in ("hang", "lost result", "slow") for fault in setup.faults)
    engine = {"hang_s": HANG_S if hangs else NEVER_S, "restarts": setup.restarts}
    checkpoint = {"every": setup.every}
    observe, schedule = {"grid_every": 0}, dict(setup.schedule)
    sections = {"engine": engine, "scoring": scoring, "checkpoint": checkpoint, "observe": observe}
    return simulated_config(steps=STEPS, samples_per_prompt=setup.samples, schedule=schedule, **sections)


def run_processes(setup: Setup, folder: Path, worker: str = WORKER) -> Ended:
    """One run, in `folder`, which must not exist; after the loss of its trainer from the newest checkpoint."""
    ended, failures, happened = Ended(), 0, folder / "happened"
    happened.mkdir(parents=True)
    while True:
        first = _newest(folder)
        try:
            with_watchdog = partial(_one, setup, folder, ended, worker)
            anyio.run(with_watchdog)
        except WorkerDied as died:
            failures = failures + 1 if _newest(folder) == first else 1
            if failures > setup.restarts or not setup.every:
                ended.error = died
        except DigenError as error:
            ended.error = error
        if ended.error or ended.weights is not None:
            ended.happened = [fault for fault in setup.faults if (happened / fault.name).exists()]
            return ended
        ended.restarts += 1


def _newest(folder: Path) -> Path | None:
    return next(iter(manifest.checkpoints(folder / "checkpoints")), None)


async def _one(setup: Setup, folder: Path, ended: Ended, worker: str) -> None:
    engine, recorder, checkpoint = ProcessEngine(folder, grace_s=GRACE_S), Recorder(), _newest(folder)
    version = (manifest.version_of(checkpoint) or 0) if checkpoint else 0
    with anyio.fail_after(WATCHDOG_S):
        async with engine.open(_specs(setup, folder, worker)) as groups:
            trainer, scorer = groups["trainer"], groups.get("scorer")
            if checkpoint:
                await trainer.call("resume", checkpoint, version)
            driver = Driver(
                config_of(setup),
                [group for name, group in groups.items() if name.startswith("g")],
                trainer,
                prompts=partial(simulated_prompts, num_prompts=setup.prompts),
                num_steps=STEPS,
                total=_total,
                drop=engine.store.drop,
                observer=recorder,
                run_dir=folder,
                start=Start(version, loaded=version > 0),
                scorer=scorer,
                revive=partial(_revive, engine),
            )
            try:
                await driver.run()
            finally:
                ended.notes += recorder.notes
                ended.rows += recorder.rows
                ended.spans = recorder.spans
            ended.left = len(list(engine.store.folder.glob("*.safetensors")))
    newest = _newest(folder)
    assert newest is not None
    ended.weights = json.loads((newest / WEIGHTS).read_text())


def _specs(setup: Setup, folder: Path, worker: str) -> list[WorkerSpec]:
    faults, samples = [asdict(fault) for fault in setup.faults], setup.samples * setup.prompts
    payload = {"faults": faults, "samples": samples, "happened": str(folder / "happened"), "cost_s": SECOND_S}
    spec = partial(WorkerSpec, target=worker, payload=payload, threads=1, log_dir=folder)
    return [spec(name, ranks=setup.ranks if name.startswith("g") else 1) for name in setup.names]


async def _revive(engine: ProcessEngine, group: WorkerGroup) -> None:
    await engine.respawn(group)
    await group.call("load")


def _total(scores: Scores) -> tuple[float, ...]:
    return tuple(sum(values) for values in scores.values)
