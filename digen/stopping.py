"""Ctrl-C and SIGTERM. The first is obeyed in good order and within `FINISH_S` and the workers' own time to end; the
second at once.

Invariant: whichever it is, workers and what they share are gone when the process is, and the process ends with the exit
code that shells know (130, 143).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Final

import anyio
from anyio.abc import TaskStatus

from digen.errors import Stopped

FINISH_S: Final = 15.0
"""Longest time for the call that the trainer is at, and for saving."""


def _nothing(_: Stopped) -> bool:
    return False


@dataclass(slots=True)
class Orders:
    """What whoever can be stopped says about it, as soon as there is something to say."""

    save: Callable[[Stopped], bool] = _nothing
    """Begin to save, and then end with this error; False: there is nothing to wait for."""
    abandon: Callable[[], None] = lambda: None
    """End the workers without waiting for them, and free what they share."""


async def obeying(work: Callable[[Orders], Awaitable[None]], note: Callable[[str], None]) -> None:
    """Run `work` to its end, or until a signal stops it: then Stopped is raised. In other threads there are none."""
    if current_thread() is not main_thread():
        await work(Orders())
        return
    orders, told, failure = Orders(), list[Stopped](), list[Exception]()

    async def listen(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if told:
                    orders.abandon()
                    os._exit(told[0].exit_code)
                told.append(Stopped(number))
                tasks.start_soon(wind_up, told[0])

    async def wind_up(why: Stopped) -> None:
        if orders.save(why):
            note(f"{why}: saving first, for {FINISH_S:g} s at most; once more ends it at once")
            await anyio.sleep(FINISH_S)
        doing.cancel()

    async with anyio.create_task_group() as tasks:
        await tasks.start(listen)
        try:
            with anyio.CancelScope() as doing:
                await work(orders)
        except Exception as error:  # noqa: BLE001 - raised below, in no exception group
            failure.append(error)
        tasks.cancel_scope.cancel()
    if told and failure and failure[0] is not told[0]:
        note(f"{told[0]}, and then: {failure[0]}")
    if told or failure:
        raise (told or failure)[0]
