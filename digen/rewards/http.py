"""Asking one server many things at once: what the rewards that are scored elsewhere share.

Invariant: whatever the server does, `ask_all` ends, within (1 + retries) attempts of `timeout_s` each and the waits
between them. An answer that is late, cut off, too large or not what `read` accepts is no answer: None, never a value
(rule R17). Every failed attempt is counted in `failures`, by its cause.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import anyio

from digen.errors import RewardError

if TYPE_CHECKING:
    import ssl

    import httpx2

log = logging.getLogger(__name__)

T = TypeVar("T")
JSON = "application/json"
LARGEST_ANSWER = 1 << 20
"""Bytes. Answers are a few numbers or a page of text."""
LONGEST_WAIT_S = 30.0
"""Between two attempts; waits are drawn from 0 to `Limits.back_off_s`, doubled at each attempt, up to this."""
AT_FAULT = frozenset({400, 401, 403, 404, 405, 413, 422})
"""Statuses that say that the request is wrong, so that the same one will not be answered later."""
REASON_S, REASON = 1.0, 200
"""How long, and how many characters, what an answer of another status says of itself is listened to."""
HERE = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts that no proxy is asked for, whatever the environment says: a proxy's are others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one reward, in one process, may ask of its server."""

    concurrency: int = 8
    """Requests under way at once."""
    timeout_s: float = 60.0
    """For one attempt, from connecting to the last byte."""
    retries: int = 3
    back_off_s: float = 0.5
    """Longest wait before the second attempt; doubled for each further one."""
    most_failures: int = 10
    """So many failed attempts in a row, and the server is left alone for `rest_s`."""
    rest_s: float = 30.0
    largest: int = LARGEST_ANSWER
    """Bytes of an answer."""


@cache
def _tls() -> ssl.SSLContext:
    """Certificates of this machine, read once: it takes longer than most requests."""
    import httpx2

    return httpx2.create_ssl_context()


class NoAnswer(Exception):  # noqa: N818 - what happened; it never leaves this file but as a count
    """An attempt failed. `cause`: a few words that are the same for all failures of a kind; `again`: worth a retry."""

    def __init__(self, cause: str, detail: str = "", *, again: bool = True) -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause, self.again = cause, again


class Breaker:
    """Leaves a server alone that failed `most` times in a row: for `rest_s` nobody asks, then one request tries."""

    def __init__(self, most: int, rest_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rest_s, self._now = most, rest_s, now
        self._in_a_row = 0
        self._closed_until = 0.0

    def allows(self) -> bool:
        """Whether a request may be made now; after a rest that is one, until it is known how it went."""
        if self._in_a_row < self._most:
            return True
        if self._now() < self._closed_until:
            return False
        self._closed_until = self._now() + self._rest_s
        return True

    def record(self, *, ok: bool) -> None:
        """How an attempt went."""
        self._in_a_row = 0 if ok else self._in_a_row + 1
        if self._in_a_row >= self._most:
            self._closed_until = self._now() + self._rest_s


class Endpoint:
    """One server. `url` is what paths are appended to; `token_env` names the variable that holds a bearer token.

    Raises ValueError for what is no URL.
    """

    def __init__(self, url: str, limits: Limits, token_env: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: got {url!r}; allowed: http://HOST:PORT or https://HOST")
        if parts.username is not None:  # settings are written to files
            raise ValueError(f"url: got one of {parts.hostname} with a user in it; allowed: a token, by token_env")
        self.url, self.limits, self._token_env = url.rstrip("/"), limits, token_env
        self._is_here = parts.hostname in HERE
        self.breaker = Breaker(limits.most_failures, limits.rest_s)
        self.failures: Counter[str] = Counter()
        """Failed attempts by cause, since this was made."""

    def get(self, path: str) -> bytes:
        """What is at this path. Raises RewardError, with the reason, when after all attempts there is no answer."""
        reasons: list[str] = []
        found = self.ask_all(path, [None], lambda _, body: body, told=reasons.append)[0]
        if found is None:
            raise RewardError(f"{self.url}{path} does not answer: {reasons[-1]}")
        return found

    def ask_all(
        self,
        path: str,
        bodies: Sequence[bytes | None],
        read: Callable[[int, bytes], T],
        *,
        form: str = JSON,
        told: Callable[[str], None] = log.warning,
    ) -> list[T | None]:
        """`read(k, answer)` of every body's answer, in their order; None where there is no sound one.

        `read` raises ValueError for an answer that is not what was asked for. A body of None is a GET. `form` is the
        content type. What failed is told in one sentence.
        """
        return anyio.run(partial(self._ask_all, path, bodies, read, form, told))

    async def _ask_all(
        self,
        path: str,
        bodies: Sequence[bytes | None],
        read: Callable[[int, bytes], T],
        form: str,
        told: Callable[[str], None],
    ) -> list[T | None]:
        answers: list[T | None] = [None] * len(bodies)
        failed: list[NoAnswer] = []
        limiter = anyio.CapacityLimiter(self.limits.concurrency)
        async with self._client(form) as client, anyio.create_task_group() as tasks:

            async def one(k: int, body: bytes | None) -> None:
                try:
                    async with limiter:
                        answers[k] = await self._persist(partial(self._attempt, client, path, body, partial(read, k)))
                except NoAnswer as error:
                    failed.append(error)

            for k, body in enumerate(bodies):
                tasks.start_soon(one, k, body)
        if failed:
            causes = ", ".join(f"{count} x {cause}" for cause, count in Counter(map(str, failed)).most_common(3))
            told(f"{len(failed)} of {len(bodies)} requests to {self.url}{path} got no sound answer: {causes}")
        return answers

    def _client(self, form: str) -> httpx2.AsyncClient:
        import httpx2

        headers = {"content-type": form, "accept": form, "accept-encoding": "identity"}
        if self._token_env:
            token = os.environ.get(self._token_env)
            if not token:
                raise RewardError(f"{self.url}: environment variable {self._token_env}, for its token, is not set")
            headers["authorization"] = f"Bearer {token}"
        # No time limit for single reads: `_exchange` has one for the whole.
        return httpx2.AsyncClient(headers=headers, timeout=None, verify=_tls(), trust_env=not self._is_here)

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

        return await AsyncRetrying(
            stop=stop_after_attempt(1 + self.limits.retries),
            wait=wait_random_exponential(multiplier=self.limits.back_off_s, max=LONGEST_WAIT_S),
            retry=retry_if_exception(lambda error: isinstance(error, NoAnswer) and error.again),
            reraise=True,
        )(attempt)

    async def _attempt(
        self, client: httpx2.AsyncClient, path: str, body: bytes | None, read: Callable[[bytes], T]
    ) -> T:
        if not self.breaker.allows():
            error = NoAnswer("not asked", "it failed too often in a row and is left alone", again=False)
            self.failures[error.cause] += 1
            raise error
        try:
            answer = read(await self._exchange(client, path, body))
        except NoAnswer as error:
            self.failures[error.cause] += 1
            self.breaker.record(ok=False)
            raise
        except (ValueError, RecursionError) as error:
            self.failures["unsound answer"] += 1
            self.breaker.record(ok=False)
            raise NoAnswer("unsound answer", str(error).partition("\n")[0][:200]) from error
        self.breaker.record(ok=True)
        return answer

    async def _exchange(self, client: httpx2.AsyncClient, path: str, body: bytes | None) -> bytes:
        """One request; the whole body of its answer."""
        import httpx2

        whole = bytearray()
        try:
            with anyio.fail_after(self.limits.timeout_s):
                method, url = ("GET" if body is None else "POST"), self.url + path
                async with client.stream(method, url, content=body) as response:
                    status = response.status_code
                    if status != httpx2.codes.OK:
                        raise NoAnswer(f"status {status}", await _reason(response), again=status not in AT_FAULT)
                    async for chunk in response.aiter_raw():
                        whole += chunk
                        if len(whole) > self.limits.largest:
                            raise NoAnswer("answer too large", f"over {self.limits.largest} bytes")
        except TimeoutError:
            raise NoAnswer("timed out", f"no whole answer within {self.limits.timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise NoAnswer("connection failed", f"{type(error).__name__} {error}".strip()) from error
        return bytes(whole)


async def _reason(response: httpx2.Response) -> str:
    """The beginning of what an answer of another status says, in one line."""
    import httpx2

    said = bytearray()
    with suppress(httpx2.HTTPError, httpx2.StreamError, OSError), anyio.move_on_after(REASON_S):
        async for chunk in response.aiter_raw():
            said += chunk
            if len(said) > REASON:
                break
    return " ".join(said.decode(errors="replace").split())[:REASON]
