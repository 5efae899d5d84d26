"""A reward as a service of its own: one process that scores for `remote`, with dependencies and devices of its own.

Invariant: the reward is called from one place, one call at a time; a request gets the scores of its own samples and of
no other, whatever it was batched with; what is asked beyond the limits is refused at once with a status, never kept.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

import digen
from digen.errors import RewardError
from digen.rewards import wire
from digen.rewards.base import RewardSet

if TYPE_CHECKING:
    import numpy as np
    import uvicorn
    from numpy.typing import NDArray
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LARGEST_REQUEST: Final = 512 << 20
"""Bytes."""
MOST_WAITING: Final = 64
"""Requests; further ones are told to come back later."""


@dataclass(eq=False, slots=True)
class Job:
    """A request that waits for its scores."""

    samples: Sequence[wire.SentSample]
    media: NDArray[np.uint8]
    done: anyio.Event = field(default_factory=anyio.Event)
    values: Sequence[float] = ()
    """NaN where there is none; nothing at all when the reward is broken, for which `error` is the reason."""
    error: str = ""


class Service:
    """Scores what is asked with the one reward of `rewards`, which is loaded; up to `batch_size` samples in one call.

    `token`: what requests must bring; "" lets everybody in.
    """

    def __init__(self, name: str, rewards: RewardSet, batch_size: int = 32, token: str = "") -> None:
        self.name, self.rewards, self.batch_size, self._token = name, rewards, batch_size, token
        self._waiting: deque[Job] = deque()
        self._news = anyio.Event()

    def app(self) -> Starlette:
        """The service as an ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._work)
                yield
                tasks.cancel_scope.cancel()

        routes = [Route("/health", self._health), Route("/score", self._score, methods=["POST"])]
        return Starlette(routes=routes, lifespan=lifespan)

    # --- what is asked ---

    async def _health(self, _: Request) -> Response:
        from starlette.responses import JSONResponse

        found = wire.Health(reward=self.name, version=digen.__version__).model_dump()
        return JSONResponse({"status": "ok", **found, "waiting": len(self._waiting)})

    async def _score(self, request: Request) -> Response:
        from starlette.responses import Response

        form: wire.Form = "msgpack" if request.headers.get("content-type") == wire.TYPES["msgpack"] else "json"
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not secrets.compare_digest(given.encode(), self._token.encode()):
            return _refusal(401, "the token is missing or wrong")
        if len(self._waiting) >= MOST_WAITING:
            return _refusal(503, f"{MOST_WAITING} requests are waiting")
        body = await _whole(request)
        if body is None:
            return _refusal(413, f"the request has more than {LARGEST_REQUEST} bytes")
        try:
            job = await anyio.to_thread.run_sync(_read, body, form)
        except ValueError as error:
            return _refusal(422, str(error))
        self._waiting.append(job)
        self._news.set()
        await job.done.wait()
        if len(job.values) != len(job.samples):
            return _refusal(500, job.error)
        return Response(wire.pack(_answer(job), form), media_type=wire.TYPES[form])

    # --- scoring, in one place ---

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._news = anyio.Event()
                await self._news.wait()
            jobs = self._take()
            await self._score_together(jobs)
            if len(jobs) > 1 and all(math.isnan(value) for job in jobs for value in job.values):
                for job in jobs:  # one of them may have spoilt it for all
                    await self._score_together([job])
            for job in jobs:
                job.done.set()

    def _take(self) -> list[Job]:
        """The oldest request and those after it that fit into one call with it."""
        jobs = [self._waiting.popleft()]
        count = len(jobs[0].samples)
        while self._waiting:
            after = self._waiting[0]
            count += len(after.samples)
            if count > self.batch_size or after.media.shape[1:] != jobs[0].media.shape[1:]:
                break
            jobs.append(self._waiting.popleft())
        return jobs

    async def _score_together(self, jobs: Sequence[Job]) -> None:
        import numpy as np

        samples = [sample for job in jobs for sample in job.samples]
        media = np.concatenate([job.media for job in jobs])
        prompts, metadata = [sample.prompt for sample in samples], [sample.metadata for sample in samples]
        try:
            (values,) = (await anyio.to_thread.run_sync(self.rewards.score, media, prompts, metadata)).values()
        except RewardError as error:
            for job in jobs:
                job.values, job.error = (), str(error)
            return
        for job in jobs:
            job.values, values = values[: len(job.samples)], values[len(job.samples) :]


def server(service: Service, host: str, port: int) -> tuple[uvicorn.Server, socket.socket]:
    """A server for it, and the socket to `run(sockets=[...])` it on, bound already. Port 0: any that is free."""
    import uvicorn

    bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return uvicorn.Server(uvicorn.Config(service.app(), log_level="warning", timeout_graceful_shutdown=5)), bound


async def _whole(request: Request) -> bytes | None:
    """A request's body; None when it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_REQUEST:
            return None
    return bytes(body)


def _read(body: bytes, form: wire.Form) -> Job:
    """Raises ValueError for what is no request."""
    import numpy as np

    samples = wire.unpack(wire.Request, body, form).samples
    if len({sample.id for sample in samples}) < len(samples):
        raise ValueError("two samples have the same id")
    media = [wire.pixels(sample) for sample in samples]
    if len({pixels.shape for pixels in media}) > 1:
        raise ValueError("samples of one request must all be of one size")
    return Job(samples, np.stack(media))


def _answer(job: Job) -> wire.Answer:
    pairs = zip(job.samples, job.values, strict=True)
    scores = [
        wire.SentScore(id=sample.id, score=None, error="the reward has no score; the service's log says why")
        if math.isnan(value)
        else wire.SentScore(id=sample.id, score=value)
        for sample, value in pairs
    ]
    return wire.Answer(scores=scores)


def _refusal(status: int, reason: str) -> Response:
    from starlette.responses import Response

    return Response(json.dumps({"error": reason}), status, media_type=wire.TYPES["json"])
