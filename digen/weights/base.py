"""How the weights of a version get from rank 0 of the trainer to every rank of every generator. Rules R4, R15.

Invariant: what is pushed is copied, and after `settle` nothing that happens to the trainer's weights reaches the copy;
whoever pulls compares a list of names, shapes and dtypes with its own tensors before the first of them is written, and
once `proven` returns all bytes of them are known to be the trainer's. That list is the ticket: an entry of the engine's
store, which the driver passes on and drops; when it is gone, what it stands for is freed or used for the next version.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Thread
from typing import Any, cast

import torch
from torch import Tensor

from digen import plugins
from digen.config import RunConfig
from digen.engines.base import TensorStore, WorkerContext
from digen.errors import SyncError
from digen.types import Published, Ref, Version
from digen.weights.fingerprint import fingerprint, glance
from digen.weights.layout import Layout

TICKET = "ticket"
POLL_S = 0.005
"""How often the trainer looks whether a replica has what it sent, and the replica whether the trainer has sent word."""
KEPT = 8
"""Dropped versions of which the trainer's word is kept: a replica asks for it a moment after its pull."""


@dataclass(frozen=True, slots=True)
class Word:
    """What the trainer says of a version when it is through with it: an entry of the store, beside the ticket's."""

    store: TensorStore
    ref: Ref

    @classmethod
    def of(cls, ticket: Ref, store: TensorStore) -> Word:
        return cls(store, Ref(f"{ticket.key}/word", 0))

    def give(self, *, fingerprint: str = "", problem: str = "") -> None:
        """One of them: of the whole weights as they were sent; why they could not be sent."""
        text = json.dumps({"fingerprint": fingerprint, "problem": problem}).encode()
        self.store.put(self.ref.key, {"word": torch.frombuffer(bytearray(text), dtype=torch.uint8)})

    def fingerprint(self) -> str | None:
        """None: there is no word yet. Raises SyncError when the weights could not be sent."""
        if not self.store.has(self.ref):
            return None
        word = json.loads(self.store.get(self.ref)["word"].numpy().tobytes())
        if word["problem"]:
            raise SyncError(f"the trainer could not send its weights: {word['problem']}")
        return str(word["fingerprint"])

    def drop(self) -> None:
        self.store.drop(self.ref)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What is published: which tensors, and where the transport puts them."""

    layout: Layout
    where: str
    """The transport's own word for the place: a file, a folder, a number."""
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that are kept in the store together with the ticket."""
    word: Word | None = None
    """Where the trainer says that all has been sent."""

    def check_word(self) -> None:
        """For who waits for what is sent beside. Raises SyncError when the rest will not come."""
        if self.word:
            self.word.fingerprint()


class WeightTransport(ABC):
    """One side of the way: `push` on rank 0 of the trainer, `pull` on every rank of a generator.

    A transport of your own implements `place`, `send`, `receive` and `free`. Its constructor must return at once.
    """

    sends_beside = False
    """Whether `send` runs in a thread beside the calls, and `receive` waits for what is not there yet: so trainer and
    generators copy at the same time, and the trainer can go on."""

    def __init__(self, config: RunConfig[Any], context: WorkerContext) -> None:
        self.config, self.context = config, context
        self.dtype = sent_dtype(config)
        self.pushed: dict[str, tuple[Ref, Ticket]] = {}
        """What this side published and has not freed yet, by the key of its ticket."""
        self.num_pushed = 0
        self.words: list[tuple[Ref, Word]] = []
        """Of these tickets."""
        self.sending: Beside | None = None
        self.proving: Beside | None = None
        self.closing = Event()
        self.settling = Event()
        """What was pushed last is about to change."""

    @abstractmethod
    def place(self, layout: Layout) -> Ticket:
        """Make room for these tensors."""

    @abstractmethod
    def send(self, ticket: Ticket, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors there."""

    @abstractmethod
    def receive(self, ticket: Ticket, into: Mapping[str, Tensor]) -> None:
        """Copy them from there. Raises SyncError, with nothing written if that can be known before."""

    def arrived(self, ticket: Ticket) -> bool:  # noqa: ARG002 - for those who know
        """Whether some replica has all of it. Until then the trainer does not hash it, for that would take the memory's
        bandwidth from the copies; unless the weights are about to change.
        """
        return True

    @abstractmethod
    def free(self, ticket: Ticket) -> None:
        """Give up what a dropped ticket stands for."""

    def close(self) -> None:
        """End threads, and free what is left; no call follows."""
        self.closing.set()
        self.settling.set()
        for beside in (self.sending, self.proving):
            if beside:
                beside.thread.join()
        for _, word in self.words:
            word.drop()
        self.words.clear()
        for _, ticket in self.pushed.values():
            self.free(ticket)
        self.pushed.clear()

    # -------------------------------------------------------------------------------------------------------------

    def push(self, version: Version, tensors: Mapping[str, Tensor]) -> Ref:
        """Publish these whole tensors, which must not change until `settle`; what stands for them, with their bytes.

        Raises DigenError or OSError when there is no room for them, SyncError when the other side is gone.
        """
        self.settle()
        self.free_dropped()
        ticket = self.place(Layout.of(version, tensors, self.dtype))
        if not self.sends_beside:
            self.send(ticket, tensors)
        self.num_pushed += 1
        text = json.dumps({"where": ticket.where, "layout": ticket.layout.as_json()}).encode()
        key = f"{self.context.group}/weights/{self.num_pushed}/{version}"
        entry = {**ticket.carried, TICKET: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        ref = replace(self.context.store.put(key, entry), nbytes=ticket.layout.nbytes)
        self.pushed[key] = ref, replace(ticket, carried={})
        word = Word.of(ref, self.context.store)
        self.words.append((ref, word))
        self.settling.clear()
        self.sending = Beside(partial(self._send, ticket, tensors, word))
        return ref

    def _send(self, ticket: Ticket, tensors: Mapping[str, Tensor], word: Word) -> None:
        """What the thread of a push does: the rest of the sending, and a whole fingerprint."""
        try:
            if self.sends_beside:
                self.send(ticket, tensors)
            while not (self.arrived(ticket) or self.settling.wait(POLL_S)):
                pass
            found = fingerprint(tensors, self.dtype)
        except Exception as error:
            word.give(problem=f"{type(error).__name__}: {error}")
            raise
        word.give(fingerprint=found)

    def settle(self) -> None:
        """Wait until what was pushed is copied and hashed: to be called before the weights change.

        Raises what `send` raised.
        """
        self.settling.set()
        sending, self.sending = self.sending, None
        if sending:
            sending.wait()

    def pull(self, published: Published, into: Mapping[str, Tensor]) -> None:
        """Copy what was published into tensors of the same names and shapes. Raises SyncError naming what is wrong."""
        self.proven()  # of what is now written to
        ticket = self.read(published)
        ticket.layout.check(published.version, into, self.dtype)
        self.receive(ticket, into)
        here = {name: tensor.detach() for name, tensor in into.items()}
        self.proving = Beside(partial(self._prove, Word.of(published.weights, self.context.store), published, here))

    def _prove(self, word: Word, published: Published, here: Mapping[str, Tensor]) -> None:
        """What the thread of a pull does."""
        found, version = fingerprint(here, self.dtype), published.version
        limit = time.monotonic() + self.config.weights.timeout_s
        while (expected := word.fingerprint()) is None:
            if self.closing.wait(POLL_S):
                return
            if time.monotonic() > limit:
                waited = f"{self.config.weights.timeout_s:g} s"
                raise SyncError(f"the trainer has not said in {waited} what the weights of version {version} hash to")
        if found != expected:
            who = f"{self.context.group} rank {self.context.rank}"
            raise SyncError(
                f"{who} has other weights than the trainer since it pulled version {version}: fingerprint of all bytes "
                f"{found}, expected {expected}"
            )

    def proven(self) -> None:
        """Wait until all bytes of what was pulled last are known to be the trainer's. Raises SyncError, every time."""
        if self.proving:
            self.proving.wait()

    def read(self, published: Published) -> Ticket:
        """The ticket. Raises SyncError when it was dropped."""
        try:
            carried = self.context.store.get(published.weights)
        except KeyError as error:
            raise SyncError(f"the weights of version {published.version} are gone: {error.args[0]}") from error
        text = json.loads(carried.pop(TICKET).numpy().tobytes())
        word = Word.of(published.weights, self.context.store)
        return Ticket(Layout.from_json(text["layout"]), text["where"], carried, word)

    def free_dropped(self) -> None:
        """Free what the driver has dropped since the last time."""
        for key, (ref, ticket) in list(self.pushed.items()):
            if not self.context.store.has(ref):
                del self.pushed[key]
                self.free(ticket)
        dropped = [entry for entry in self.words if entry[0].key not in self.pushed]
        for entry in dropped[:-KEPT]:
            self.words.remove(entry)
            entry[1].drop()


class Beside:
    """A piece of work in a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.problem: Exception | None = None
        self.thread = Thread(target=self._run, args=(work,), name="digen-weights", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Raises what the work raised."""
        self.thread.join()
        if self.problem:
            raise self.problem

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            self.problem = error


def sent_dtype(config: RunConfig[Any]) -> torch.dtype | None:
    """What weights are cast to on their way (`weights.dtype`); None: they travel as they are."""
    found: torch.dtype | None = getattr(torch, config.weights.dtype) if config.weights.dtype else None
    return found


def make_transport(config: RunConfig[Any], context: WorkerContext) -> WeightTransport:
    """The transport that the config names, or the fastest where the workers are: threads, or processes of one host."""
    name = config.weights.transport or ("inline" if context.shared_dir is None else "shared_memory")
    return cast("type[WeightTransport]", plugins.find("transports", name))(config, context)


def publish(transport: WeightTransport, version: Version, tensors: Mapping[str, Tensor]) -> Published:
    """Push whole tensors, with a glance at what is sent."""
    return Published(version, transport.push(version, tensors), glance(tensors, version, transport.dtype))


def load(transport: WeightTransport, published: Published, into: Mapping[str, Tensor]) -> str:
    """Pull, and glance at what is now loaded: it is what was sent, as far as can be told at once (rule R15)."""
    transport.pull(published, into)
    return glance(into, published.version, transport.dtype)
