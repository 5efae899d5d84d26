"""One tree of errors, each also a standard one, each picklable (they cross process borders).

Invariant: a message says what is wrong, what was given and what is allowed; it never needs the traceback.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from difflib import get_close_matches


class DigenError(Exception):
    """Root of every error that digen raises on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class ConfigError(DigenError, ValueError):
    """A setting is unknown, of the wrong type, out of bounds or impossible together with another one."""

    exit_code = 2


class DataError(DigenError, ValueError):
    """A prompt file cannot be read as what it says it is; the message names file and line."""

    exit_code = 2


class PluginError(ConfigError, LookupError):
    """A plugin (algorithm, model, backend, reward, engine) is unknown or cannot be loaded."""


class WorkerError(DigenError, RuntimeError):
    """A call failed inside a worker. Carries group, rank, method and the remote traceback."""

    def __init__(self, group: str, rank: int, method: str, cause: str, remote_traceback: str = "") -> None:
        super().__init__(group, rank, method, cause, remote_traceback)
        self.group, self.rank, self.method = group, rank, method
        self.cause, self.remote_traceback = cause, remote_traceback

    def __str__(self) -> str:
        return f"{self.group} rank {self.rank} failed in {self.method}(): {self.cause}"


class WorkerDied(WorkerError, ConnectionError):  # noqa: N818 - what happened, not what went wrong in a call
    """The process of a rank ended while a call was running or before one was sent."""


class SyncError(DigenError, RuntimeError):
    """A replica's weights are not the trainer's after a sync (rule R15)."""


class CheckpointError(DigenError, RuntimeError):
    """A checkpoint cannot be written, or is not what its manifest says."""


class RewardError(DigenError, RuntimeError):
    """A reward could not be computed and the run is set to stop on that (rule R17)."""


class Stopped(DigenError):  # noqa: N818 - what happened
    """The run was told to end by a signal of this number; `exit_code` is what a shell makes of it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.args[0]).name}"


class DivergedError(DigenError, ArithmeticError):
    """Loss or gradient stayed non-finite for more steps than allowed; nothing non-finite was applied."""


def one_of(what: str, got: object, allowed: Iterable[object]) -> str:
    """The standard sentence for a wrong name: what it is, what was given, the nearest name, what is allowed."""
    names = sorted(str(a) for a in allowed)
    near = get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what}: got {got!r}.{hint} Allowed: {', '.join(names) or 'nothing'}."
