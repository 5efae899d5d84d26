"""Several pieces of work at once, of which the first failure counts; for engines, on asyncio and trio alike.

Invariant: when `all_at_once` returns or raises, no piece is still running.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import anyio

from digen.errors import WorkerError


async def all_at_once(jobs: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run all jobs at once. The first WorkerError cancels the others and is raised as it is, in no exception group."""
    failures: list[WorkerError] = []

    async def one(job: Callable[[], Awaitable[object]]) -> None:
        try:
            await job()
        except WorkerError as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(one, job)
    if failures:
        raise failures[0]
