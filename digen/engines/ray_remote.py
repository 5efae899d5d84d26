"""One rank of a Ray cluster as the driver sees it: call it, learn how it ended, end it (`remote.py`, for processes).

Invariant: a rank runs one call at a time, in the order of the calls; the answer to a cancelled call is thrown away.
"""

from __future__ import annotations

import pickle
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from digen.engines.base import WorkerContext
from digen.engines.rank import Failure
from digen.engines.ray_cluster import RayThread
from digen.engines.ray_rank import Facts
from digen.engines.ray_store import DriverStore, TensorsLost
from digen.engines.remote import LAST_LINES
from digen.errors import WorkerDied, WorkerError

PING_S: Final = 1.0
"""How often an idle rank is asked whether it lives."""
LAST_BYTES: Final = 4096


@dataclass(slots=True)
class Traffic:
    """What the driver sent to workers and got from them: calls and names of tensors."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class RayRank:
    """A worker in an actor process. `call` is for one task at a time; `end` may come at any moment."""

    def __init__(
        self,
        context: WorkerContext,
        actor: Any,
        facts: Facts,
        thread: RayThread,
        store: DriverStore,
        traffic: Traffic,
        log: Path | None,
    ) -> None:
        self.context = context
        self._actor, self._facts, self._thread = actor, facts, thread
        self._store, self._traffic, self._log = store, traffic, log
        self._last: Any = None
        """The reference of the newest call."""
        self._over: Exception | None = None
        """What Ray says of its end."""

    async def call(self, method: str, body: bytes) -> Any:
        """Send a pickled call and wait for its answer. Raises WorkerError or WorkerDied."""
        from ray.exceptions import RayError

        run = self._actor.begin if method == "__init__" else self._actor.do
        self._last = run.remote(body, self._store.dropped)
        try:
            answer = await self._thread.get(self._last)
        except RayError as error:
            self._over = error
            raise await self.death(method) from None
        self._traffic.calls += 1
        self._traffic.sent_bytes += len(body)
        self._traffic.received_bytes += len(answer)
        return self._opened(method, answer)

    async def death(self, method: str) -> WorkerDied:
        """How the process ended, as the error of a call of `method`."""
        with anyio.CancelScope(shield=True):
            said = await anyio.to_thread.run_sync(_tail, self._log)
        silent = f"; it wrote nothing to {self._log}" if self._log else ""
        where = f"; the end of {self._log}:\n{said}" if said else silent
        how = _reason(self._over)
        who = f"process {self._facts.pid} on {self._facts.address}"
        return WorkerDied(self.context.group, self.context.rank, method, f"{who} {how}{where}")

    async def exited(self) -> None:
        """Return when the process has ended, or its node is gone."""
        from ray.exceptions import RayError

        while True:
            try:
                await self._thread.get(self._actor.ping.remote())
            except RayError as error:
                self._over = self._over or error
                return
            await anyio.sleep(PING_S)

    def kill(self) -> None:
        """End the process at once, from any thread."""
        import ray

        ray.kill(self._actor)

    async def end(self, grace_s: float) -> None:
        """End the process: politely if it is idle; at most twice `grace_s`."""
        import ray
        from ray.exceptions import RayError

        idle = self._last is None or bool(ray.wait([self._last], timeout=0)[0])
        if idle and self._over is None:
            with anyio.move_on_after(grace_s), suppress(RayError):
                await self._thread.get(self._actor.leave.remote())  # answered by the end of the process
        with suppress(RayError):
            await anyio.to_thread.run_sync(self.kill)
        with anyio.move_on_after(grace_s), suppress(RayError):
            await self._thread.get(self._actor.ping.remote())

    def _opened(self, method: str, answer: bytes) -> Any:
        group, rank = self.context.group, self.context.rank
        try:
            value = pickle.loads(answer)  # noqa: S301 (from our own worker, over Ray, which does the same)
        except Exception as error:
            cause = f"the result does not unpickle in the driver: {type(error).__name__}: {error}"
            raise WorkerError(group, rank, method, cause) from error
        if not isinstance(value, Failure):
            return value
        lost = value.cause.startswith(f"{TensorsLost.__name__}:")  # the rank has no fault, but its work is lost
        failed = (WorkerDied if lost else WorkerError)(group, rank, method, value.cause, value.remote_traceback)
        failed.add_note(f"In the worker:\n{value.remote_traceback}")
        raise failed


def _reason(error: Exception | None) -> str:
    """What Ray says of a process that is gone, in a line."""
    from ray.exceptions import ActorUnavailableError

    if isinstance(error, ActorUnavailableError):
        return "does not answer any more: it has ended, or its node is gone"
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.*?)\.?(?: Some common causes.*)?$", text)
    return f"has ended: {detail[1] if detail else text}"


def _tail(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])
