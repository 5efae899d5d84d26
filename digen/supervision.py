"""Worker groups that died or hang: when that is so, whether the run can do without them, and how one is started again.

Invariant: an update is never repeated (rule R18): what is started again is what generates and scores, whose work goes
back to where it came from; a trainer that is lost ends the run, which then goes on from a checkpoint. A group is
started again at most `engine.restarts` times between the ends of two steps; then it is given up or, of generators that
may come and go (`generator.min_replicas`), away: tried again for as long as the run lasts, while the others go on.
Nothing here waits for anything for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import anyio

from digen.config import RunConfig
from digen.engines.base import WorkerGroup
from digen.errors import WorkerDied, WorkerError
from digen.inflight import NO_INDEX, InFlight, Work
from digen.schedule.costs import Costs
from digen.types import Version

FACTOR: Final = 10.0
"""Work hangs when it takes so many times what it typically takes, and longer than `engine.hang_s`."""
DIFFERS: Final = ("load", "save")
"""Work that may take much longer once than before: of saves, the last one waits for the disk."""
FIRST_BACK_OFF_S: Final = 0.5
"""Before the second attempt in a row to start a group again; doubled for each further one."""
LONGEST_BACK_OFF_S: Final = 60.0
DOUBLINGS: Final = 10
"""As many as can count before that."""

Revive = Callable[[WorkerGroup], Awaitable[None]]
"""Starts the ranks of a lost group anew and loads what they need."""


class Run(Protocol):
    """What of a run is asked or told here: the driver."""

    version: Version
    num_steps: int
    costs: Costs
    flight: InFlight

    @property
    def note(self) -> Callable[[str], None]: ...

    def forget(self, group: WorkerGroup) -> None:
        """The group was lost: whatever it had must be had from others."""
        ...


class Supervision:
    """What is known of lost groups. `revive`: None where the engine cannot start a group again.

    Generators do the same work, and the run goes on while enough of them are left; it ends when the trainer is lost, or
    a scorer that cannot be started again. A generator that is not there from the beginning is away.
    """

    def __init__(
        self,
        config: RunConfig[Any],
        generators: Sequence[WorkerGroup],
        scorer: WorkerGroup | None,
        revive: Revive | None,
        run: Run,
    ) -> None:
        self._hang_s, self._restarts = config.engine.hang_s, config.engine.restarts
        self._scoring_s = (1 + config.schedule.retries) * config.scoring.timeout_s
        self._least = config.generator.min_replicas
        self._generators = [group.name for group in generators]
        self._replaceable = {*self._generators, *([scorer.name] if scorer else [])}
        self._revive, self._run = revive, run
        self._lost: set[str] = set()
        """To be started again; who is away too."""
        self._attempts: Counter[str] = Counter()
        self._gone: set[str] = set()
        self._away: dict[str, str] = {}
        """Generators that the run does without for now, and why, as it was said."""
        for group in generators if self._least else ():
            if absent := why_lost(group):
                self._leave_out(group.name, absent)

    def limit_s(self, work: Work[Any]) -> float:
        """After how many seconds this work counts as hung. What was never measured may take ten times as long."""
        typical_s = self._run.costs.seconds(work.group.name, work.kind, work.rows)
        if typical_s is None or work.kind in DIFFERS:
            return FACTOR * self._hang_s
        patience_s = self._scoring_s if work.kind == "score" else 0.0  # rewards have limits of their own
        return max(self._hang_s, FACTOR * typical_s) + patience_s

    def sound(self, group: WorkerGroup) -> bool:
        """Whether the group may be given work."""
        return group.name not in self._lost and group.name not in self._gone

    def gone(self, group: WorkerGroup) -> bool:
        """Whether the run has given the group up."""
        return group.name in self._gone

    def lost(self, work: Work[Any], why: WorkerDied) -> None:
        """A group died or hangs at work, which goes back. Raises `why` where the step is void without it (rule R18)."""
        if work.undo is None:
            raise why
        work.undo()
        self._lose(work.group, why)

    def reviving(self, group: WorkerGroup) -> Work[None] | None:
        """Before anything else is asked of a group. Raises WorkerDied when the run cannot go on without it."""
        if self.sound(group) and (why := why_lost(group)):
            self._lose(group, why)
        if group.name not in self._lost:
            return None
        version = self._run.version
        do, then = partial(self._start_again, group), partial(self._started_again, group)
        return Work("load", group, version, NO_INDEX, version, do, then, undo=lambda: None)

    def progress(self) -> None:
        """A step has ended: attempts are counted anew, but of those that are away."""
        self._attempts = Counter({name: count for name, count in self._attempts.items() if name in self._away})

    def _lose(self, group: WorkerGroup, why: WorkerError) -> None:
        name, run = group.name, self._run
        died = why if isinstance(why, WorkerDied) else WorkerDied(why.group, why.rank, why.method, why.cause)
        if self._revive is None or name not in self._replaceable:
            raise died from why.__cause__
        run.forget(group)
        if run.version >= run.num_steps:  # nobody needs it any more
            self._give_up(name)
        elif self._attempts[name] < self._restarts and name not in self._away:
            self._lost.add(name)
            run.note(f"{died}; {name} is started again")
        elif self._least and name in self._generators:
            self._leave_out(name, died)
        else:
            self._give_up(name)
            if name not in self._generators or not self._left:
                raise died from why.__cause__
            run.note(f"{died}; the run goes on without {name}, which was started again {self._restarts} times")

    @property
    def _left(self) -> list[str]:
        """Generators that the run has, or will have in a moment."""
        return [name for name in self._generators if name not in self._gone and name not in self._away]

    def _give_up(self, name: str) -> None:
        self._lost.discard(name)
        self._gone.add(name)

    def _leave_out(self, name: str, why: WorkerError) -> None:
        """Go on without this generator, and try again to start it. Raises WorkerDied when too few are left."""
        said, self._away[name] = self._away.get(name), why.cause
        self._lost.add(name)
        count, least = len(self._left), self._least or 0
        if count < least:
            cause = f"generators left: {count}, generator.min_replicas={least}: {why.cause}"
            raise WorkerDied(why.group, why.rank, why.method, cause) from why.__cause__
        if said != why.cause:
            self._run.note(f"{why}; {name} is away: the run goes on with {count} of {len(self._generators)} generators")

    async def _start_again(self, group: WorkerGroup) -> None:
        """After a pause that grows with the attempts. Raises WorkerDied when it fails."""
        assert self._revive is not None
        self._attempts[group.name] += 1
        further = self._attempts[group.name] - 2
        if further >= 0:
            await anyio.sleep(min(FIRST_BACK_OFF_S * 2 ** min(further, DOUBLINGS), LONGEST_BACK_OFF_S))
        try:
            await self._revive(group)
        except WorkerDied:
            raise
        except WorkerError as error:
            raise WorkerDied(error.group, error.rank, error.method, error.cause, error.remote_traceback) from error

    def _started_again(self, group: WorkerGroup, _: None) -> None:
        name = group.name
        if name in self._away:
            del self._away[name]
            self._run.note(f"{name} is there: the run has {len(self._left)} of {len(self._generators)} generators")
        self._lost.discard(name)
        self._run.flight.watch(group)


def why_lost(group: WorkerGroup) -> WorkerError | None:
    """What a group that is lost died of, if its engine tells; None while it is sound."""
    lost: WorkerError | None = getattr(group, "lost", None)  # asked often: `isinstance(group, Watched)` is slow
    return lost
