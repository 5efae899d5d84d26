"""One worker process as the driver sees it: start it, call it, learn how it ended, end it.

Invariant: whatever is cancelled and whenever, the byte streams stay whole: what a cancelled call has not yet sent is
sent by the next one, and answers to earlier calls are thrown away by their number.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.to_thread

from digen.engines.base import WorkerContext
from digen.engines.rank import HEADER, Failure
from digen.errors import WorkerDied, WorkerError

CHUNK = 1 << 20
"""Most bytes taken from a socket before other tasks get their turn."""
LAST_LINES = 10
"""How much of a dead worker's log its error repeats."""
EXIT_S = 1.0
"""Longest time between the end of a process's socket and the end of the process."""
KILLED_S = 10.0
"""Longest time between SIGKILL and the end of a process, on a machine that has a lot to do."""
BOOT = "import sys; sys.path[:] = {path!r}; from digen.engines.rank import main; main({fd}, {parent})"


class RemoteRank:
    """A worker process with its socket. `call` is for one task at a time; `end` may come at any moment."""

    def __init__(self, context: WorkerContext, env: Mapping[str, str], log: Path | None) -> None:
        """Start the process; its output goes to the end of the file `log`, or where the driver's goes."""
        self.context = context
        self._log = log
        self._sent = self._answered = -1
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs, _output(log) as output:
            # Linux kills a child when the *thread* that started it ends: this must run in the event loop's thread.
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter)
                [
                    *(sys.executable, "-u", "-X", "faulthandler"),
                    *("-c", BOOT.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())),
                    f"{context.group}-{context.rank}",  # for those who look at the process list
                ],
                env=env,
                pass_fds=[theirs.fileno()],
                process_group=0,  # signals sent to it reach the worker's own children too, and Ctrl-C reaches none
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    async def call(self, method: str, body: bytes) -> Any:
        """Send a pickled call and wait for its answer. Raises WorkerError or WorkerDied."""
        try:
            await self._send(body)
            answer = await self._receive()
        except (OSError, anyio.ClosedResourceError):
            raise await self.death(method) from None
        try:
            value = pickle.loads(answer)  # noqa: S301 (from our own child, over a socket pair that nobody else holds)
        except Exception as error:
            cause = f"the result does not unpickle in the driver: {type(error).__name__}: {error}"
            raise self._error(WorkerError, method, cause) from error
        if isinstance(value, Failure):
            raise self._error(WorkerError, method, value.cause, value.remote_traceback)
        return value

    async def death(self, method: str) -> WorkerDied:
        """How the process ended, or is ended here, as the error of a call of `method`."""
        with anyio.CancelScope(shield=True):
            words = await anyio.to_thread.run_sync(self._last_words)
        return WorkerDied(self.context.group, self.context.rank, method, words)

    async def exited(self) -> None:
        """Return when the process has ended, as the kernel tells at once; never where it cannot be asked to."""
        if sys.platform != "linux":
            await anyio.sleep_forever()
        if self._process.returncode is not None:
            return
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except ProcessLookupError:
            return
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """End the process and its children at once, from any thread."""
        self._signal(signal.SIGKILL)
        self._gone(EXIT_S)

    async def end(self, grace_s: float) -> None:
        """End the process and its children; each of hanging up (when idle), SIGTERM and SIGKILL gets `grace_s`."""
        if self._socket.fileno() == -1:
            return
        idle = self._sent == self._answered and not self._outgoing
        hang_up = partial(self._socket.shutdown, socket.SHUT_WR)
        terminate, kill = partial(self._signal, signal.SIGTERM), partial(self._signal, signal.SIGKILL)
        for way in (hang_up, terminate, kill)[0 if idle else 1 :]:
            with suppress(OSError):
                way()
            if await anyio.to_thread.run_sync(self._gone, max(grace_s, KILLED_S) if way is kill else grace_s):
                break
        kill()  # what it may have left behind
        if self._socket.fileno() != -1:
            anyio.notify_closing(self._socket)
            self._socket.close()

    async def _send(self, body: bytes) -> None:
        self._sent += 1
        self._outgoing += HEADER.pack(self._sent, len(body)) + body
        while self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)

    async def _receive(self) -> bytearray:
        while True:
            number, body = await self._message()
            self._answered = number
            if number == self._sent:
                return body

    async def _message(self) -> tuple[int, bytearray]:
        await self._fill(HEADER.size)
        number, size = HEADER.unpack_from(self._incoming)
        end = HEADER.size + size
        await self._fill(end)
        body = self._incoming[HEADER.size : end]
        del self._incoming[:end]
        return number, body

    async def _fill(self, size: int) -> None:
        while len(self._incoming) < size:
            await anyio.wait_readable(self._socket)
            with suppress(BlockingIOError):
                chunk = self._socket.recv(CHUNK)
                if not chunk:
                    raise ConnectionResetError
                self._incoming += chunk

    def _error(self, kind: type[WorkerError], method: str, cause: str, remote_traceback: str = "") -> WorkerError:
        error = kind(self.context.group, self.context.rank, method, cause, remote_traceback)
        if remote_traceback:
            error.add_note(f"In the worker:\n{remote_traceback}")
        return error

    def _last_words(self) -> str:
        """How the process ended and what it wrote last. To be called when its socket has ended; in a thread."""
        if not self._gone(EXIT_S):
            self._signal(signal.SIGKILL)  # it lives but cannot be reached any more
            self._process.wait()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = _tail(self._log)
        where = (
            f"; the end of {self._log}:\n{said}" if said else f"; it wrote nothing to {self._log}" if self._log else ""
        )
        return f"process {self._process.pid} {how}{where}"

    def _gone(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes] | None]:
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        yield file


def _tail(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])
