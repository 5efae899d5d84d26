"""A running vLLM-Omni engine, called from a worker's synchronous methods: one for each rank of a generator.

Invariant: nothing that the engine answers is taken for granted. A worker's error comes back as a dictionary and not as
an exception, an aborted request as an output without images, and a failed pause leaves the door shut: each is an error
or undone here. Weights change between batches only, by calls that the engine runs when no batch is running. After a
failed update the engine is closed: of half-loaded weights nothing may be sampled. An engine whose processes have died
is noticed within seconds, while it is asked for something or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from anyio.from_thread import start_blocking_portal

from digen.backends.generation.vllm_host import Answer, Wanted
from digen.errors import SyncError

T = TypeVar("T")
KEY = "digen"
"""Of what is ours in a request's `extra_args`, and in the reply of every call of ours."""
WATCH_S = 1.0
"""How often an engine that nobody asks for anything is looked at."""


class AsyncEngine(Protocol):
    """What is used of `vllm_omni.AsyncOmni`."""

    def generate(self, prompt: Any, *, request_id: str, sampling_params_list: Sequence[Any]) -> AsyncIterator[Any]: ...

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> Any: ...

    async def pause_generation(self, *, mode: str) -> None: ...

    async def resume_generation(self) -> None: ...

    async def sleep(self, *, level: int) -> Any: ...

    async def wake_up(self) -> Any: ...

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


class EngineError(RuntimeError):
    """The engine did not do what it was asked for; the message is its own."""


class OmniEngine:
    """Starts an engine in an event loop of its own, and ends both in `close`.

    make: constructs the engine inside that loop. params: what turns a `Wanted` into the engine's sampling parameters.
    num_ranks: how many answer to `call`. lost: is told once, from any thread, when the engine's processes have died.
    """

    def __init__(
        self,
        make: Callable[[], AsyncEngine],
        params: Callable[[Wanted, Any], Any],
        num_ranks: int,
        lost: Callable[[str], None],
    ) -> None:
        self.params, self.num_ranks, self._lost = params, num_ranks, lost
        self.num_requests = 0
        self.adapters: Any = None
        """What requests name for the adapters that were loaded last."""
        self.ended = ""
        """Why there is no engine any more."""
        self.asleep = False
        self._exits = ExitStack()
        self._portal = self._exits.enter_context(start_blocking_portal("asyncio"))
        try:
            self._engine = self._portal.call(make)
        except BaseException:
            self._exits.close()
            raise
        self._exits.callback(lambda: self._portal.call(self._engine.shutdown))
        self._exits.callback(self._portal.start_task_soon(self._watch).cancel)

    def sample(self, wanted: Sequence[Wanted]) -> list[Answer]:
        """Make samples, all of them requests at the same time, which the engine batches.

        Raises EngineError when one of them failed or was aborted: then there are no samples.
        """
        self._check()
        return self._ask(self._sample, wanted)

    async def _sample(self, wanted: Sequence[Wanted]) -> list[Answer]:
        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(self._one(each)) for each in wanted]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in made]

    async def _one(self, wanted: Wanted) -> Answer:
        self.num_requests += 1
        name = f"digen-{self.num_requests}"
        params = self.params(wanted, self.adapters)
        prompt = {"prompt": wanted.prompt.text}
        outputs = self._engine.generate(prompt, request_id=name, sampling_params_list=[params])
        output = [each async for each in outputs][-1:]
        return _answer(name, output[0] if output else None)

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        """Run a method of the worker extension; the report of all ranks. Raises EngineError: what the engine says."""
        self._check()
        return self._ask(self._call, method, args)

    async def _call(self, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
        replies = await self._engine.collective_rpc(method, args=args)
        return report(method, replies, self.num_ranks)

    def load(self, update: Callable[[OmniEngine], None]) -> None:
        """Have `update` give the engine other weights. If it fails the engine is closed, and SyncError says why."""
        try:
            update(self)
        except Exception as error:
            self.ended = f"its weights could not be loaded: {error}"
            self.close()
            raise SyncError(f"the engine has no weights any more, {self.ended}") from error

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The engine has its weights on the device within the block, and gives the memory back after it."""
        self._ask(self._wake)
        self.asleep = False
        try:
            yield
        finally:
            if not self.ended:
                self.rest()

    def rest(self) -> None:
        """Weights to host memory (level 1: of deeper sleep this engine does not wake); a running batch ends first."""
        self._ask(self._rest)
        self.asleep = True

    async def _rest(self) -> None:
        try:
            await self._engine.pause_generation(mode="keep")
            acknowledged(await self._engine.sleep(level=1))
        except BaseException:
            await self._engine.resume_generation()  # a failed pause too leaves the door shut
            raise

    async def _wake(self) -> None:
        try:
            acknowledged(await self._engine.wake_up())
        finally:
            await self._engine.resume_generation()

    def _ask(self, what: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run it in the engine's loop. When it fails because the engine has died, that is said first."""
        try:
            return self._portal.call(what, *args)
        except Exception as error:
            self._portal.call(self._look)
            if self.ended:
                raise EngineError(f"the engine has ended: {self.ended}") from error
            raise

    async def _watch(self) -> None:
        while not self.ended:
            await asyncio.sleep(WATCH_S)
            await self._look()

    async def _look(self) -> None:
        """Whether the engine's processes live."""
        if self.ended:
            return
        try:
            await self._engine.check_health()
        except Exception as error:  # noqa: BLE001 - the engine's own words, whatever they are
            self.ended = f"its processes have died: {error}"
            self._lost(self.ended)

    def _check(self) -> None:
        if self.ended:
            raise EngineError(f"the engine has ended: {self.ended}")
        if self.asleep:
            raise EngineError("the engine is asleep")  # and would let the request wait for ever

    def close(self) -> None:
        """End engine and event loop; a second time is allowed."""
        self.ended = self.ended or "it was closed"
        self._exits.close()


def _answer(name: str, output: Any) -> Answer:
    """The sample in the last output of a request. Raises EngineError when there is none."""
    if error := getattr(output, "error", None):
        raise EngineError(f"request {name} failed: {error}")
    answer = getattr(output, "trajectory_latents", None)
    if output is None or not output.images or not isinstance(answer, Mapping):
        raise EngineError(f"request {name} came back without a sample: it was aborted")
    return dict(answer)


def report(method: str, replies: Any, num_ranks: int = 1) -> dict[str, Any]:
    """What a method of ours says in the replies of all stages and ranks: one and the same, or EngineError."""
    found = list(_flat(replies))
    for reply in found:
        if not isinstance(reply, Mapping) or reply.get(KEY) != method:
            raise EngineError(f"{method}: {_said(reply)}")
    if len(found) != num_ranks:
        raise EngineError(f"{method}: {len(found)} replies of {num_ranks} ranks" if found else f"{method}: no reply")
    if other := next((reply for reply in found if reply != found[0]), None):
        raise EngineError(f"{method}: one rank says {_said(found[0])}, another one {_said(other)}")
    return {name: value for name, value in found[0].items() if name != KEY}


def acknowledged(replies: Any) -> None:
    """Raises EngineError when a rank did not go to sleep, or did not wake."""
    for reply in _flat(replies):
        status = getattr(reply, "status", "SUCCESS")
        if status != "SUCCESS":
            raise EngineError(f"{status}: {getattr(reply, 'error_msg', '')}")


def _flat(replies: Any) -> Iterator[Any]:
    if isinstance(replies, list | tuple):
        for reply in replies:
            yield from _flat(reply)
    else:
        yield replies


def _said(reply: Any) -> str:
    if isinstance(reply, Mapping):
        return str(reply.get("error") or reply.get("todo") or dict(reply))
    return f"an answer of another kind: {reply!r}"
