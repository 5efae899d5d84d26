"""A reward that another process computes: over HTTP, with the messages of `digen/rewards/wire.py`.

Invariant: a sample has the score that the service gave to its own id, or none (rule R17). What is on the other side has
dependencies, devices and a Python of its own; `digen reward serve` is one, and any server that speaks the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat

from digen.errors import RewardError
from digen.rewards import wire
from digen.rewards.http import Endpoint, Limits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]


class Remote:
    """Scores that a reward service gives, in its scale."""

    def __init__(
        self,
        url: str,
        batch_size: Count = 8,
        concurrency: Count = 4,
        timeout_s: Seconds = 60.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        form: wire.Form = "json",
        token_env: str = "",
    ) -> None:
        """Options of the term.

        url: of the service, e.g. http://127.0.0.1:8100.
        batch_size: samples of one request. What a request without a sound answer asked for has no score.
        concurrency: requests under way at once, for each rank that scores.
        timeout_s: for one attempt. retries: further attempts, with growing waits between them.
        form: json, or msgpack, which is a quarter smaller.
        token_env: the environment variable that holds the service's token, if it wants one.
        """
        limits = Limits(concurrency=concurrency, timeout_s=timeout_s, retries=retries)
        self.endpoint = Endpoint(url, limits, token_env)
        self._batch_size, self._form = batch_size, form

    def load(self) -> None:
        """See that the service is there. Raises RewardError when it is not, or is no reward service."""
        found = self.endpoint.get("/health")
        try:
            wire.unpack(wire.Health, found, "json")
        except ValueError as error:
            raise RewardError(f"{self.endpoint.url}/health is no reward service of protocol {wire.PROTOCOL}") from error

    def __call__(
        self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]
    ) -> list[float | None]:
        size = self._batch_size
        parts = [
            wire.request(media[k : k + size], prompts[k : k + size], metadata[k : k + size], k)
            for k in range(0, len(media), size)
        ]

        def read(k: int, body: bytes) -> list[float | None]:
            return wire.scores(wire.unpack(wire.Answer, body, self._form), [sample.id for sample in parts[k].samples])

        bodies = [wire.pack(part, self._form) for part in parts]
        answers = self.endpoint.ask_all("/score", bodies, read, form=wire.TYPES[self._form])
        return [
            score
            for part, answer in zip(parts, answers, strict=True)
            for score in (answer or [None] * len(part.samples))
        ]
