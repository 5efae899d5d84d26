"""One rank: the child end of the process engine. `main` is the whole life of a worker process.

Invariant: one answer per call, in the order of the calls; an exception is an answer, and only the end of the process
is none. Nothing here imports torch, so a worker's environment (thread counts!) is complete before torch sees it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from digen.engines.base import WorkerContext
from digen.plugins import load

HEADER = struct.Struct("<QQ")
"""Before every message: number of the call, bytes that follow. Call 0 constructs the worker."""


@dataclass(frozen=True, slots=True)
class Start:
    """The body of call 0."""

    target: str
    payload: Any
    context: WorkerContext


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as it crosses the process border: as text, since its class may not exist on the other side."""

    cause: str
    remote_traceback: str


class Message(NamedTuple):
    """One call or one answer; `body` is a pickle."""

    number: int
    body: bytearray


def main(fd: int, parent: int) -> None:
    """Serve the calls that arrive on the socket `fd` until the driver (process `parent`) hangs up or dies."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which then ends its workers
    driver = socket.socket(fileno=fd)
    driver.set_inheritable(False)
    os.register_at_fork(after_in_child=driver.close)  # or a fork would hide this process's death from the driver
    serve(driver)
    leave_process_group()
    driver.detach()  # it stays open until the process is gone: that is how the driver knows


def serve(driver: socket.socket) -> None:
    """Make the worker in call 0, then answer calls until there are no more."""
    worker: Any = None

    def construct(body: bytearray) -> None:
        nonlocal worker
        start = _unpack(body)
        worker = make_worker(start.target, start.payload, start.context)

    def call(body: bytearray) -> Any:
        method, args, kwargs = _unpack(body)
        return getattr(worker, method)(*args, **kwargs)

    while message := read(driver):
        body = answer(partial(call if message.number else construct, message.body))
        try:
            driver.sendall(HEADER.pack(message.number, len(body)))
            driver.sendall(body)
        except ConnectionError:  # the driver is gone
            break
    close(worker)


def make_worker(target: str, payload: Any, context: WorkerContext) -> Any:
    """Import the class and construct it, on its device. Raises PluginError and what the constructor raises."""
    made: Any = load(target)
    if context.device != "cpu":
        import torch

        torch.cuda.set_device(context.device)
    return made(payload, context)


def close(worker: Any) -> None:
    """Let the worker end what it has begun, if it has a way to."""
    if hasattr(worker, "close"):
        worker.close()


def answer(work: Callable[[], Any]) -> bytes:
    """Pickle of what `work` returns, or of a `Failure`."""
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 (the worker boundary: it is raised again on the other side)
        return pickle.dumps(failure(error))
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 (pickling runs the value's own code)
        cause = f"the result does not pickle: {type(error).__name__}: {error}"
        return pickle.dumps(Failure(cause, traceback.format_exc()))


def failure(error: BaseException) -> Failure:
    """The exception as text. The traceback starts where the engine's own frames end."""
    here, frames = str(Path(__file__).parent), error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith(here):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, text)


def read(connection: socket.socket) -> Message | None:
    """The next message; None when the other side has hung up, even in the middle of one."""
    try:
        if header := _exactly(connection, HEADER.size):
            number, size = HEADER.unpack(header)
            body = _exactly(connection, size)
            return None if body is None else Message(number, body)
    except ConnectionError:
        pass
    return None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the driver dies, even in the middle of a call (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def leave_process_group() -> None:
    """Leave the torch process group, if the worker has joined one: torch complains about those who just go."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    missing = memoryview(data)
    while missing:
        count = connection.recv_into(missing)
        if not count:
            return None
        missing = missing[count:]
    return data


def _unpack(body: bytearray) -> Any:
    try:
        return pickle.loads(body)  # noqa: S301 (from our own driver, over a socket pair that nobody else holds)
    except Exception as error:
        raise TypeError(f"the arguments do not unpickle in the worker: {type(error).__name__}: {error}") from error
