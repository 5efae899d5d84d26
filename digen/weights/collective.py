"""Weights by broadcast: rank 0 of the trainer and the ranks of one replica are a process group of their own.

Invariant: nobody waits for ever. A replica asks for a version when it is idle, a thread of the trainer answers, so
neither gradients nor other replicas wait for it; after `weights.timeout_s` without the other side a SyncError ends the
run. Weights are copied only if they change before every replica has them. Gloo on CPU, NCCL on GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from threading import Condition, RLock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.errors import SyncError
from digen.weights.base import Ticket, WeightTransport
from digen.weights.layout import Layout
from digen.workload import generator_names

BUCKET = 1 << 24
"""Bytes of one broadcast."""
AHEAD = 4
"""Broadcasts under way at once: while the last bucket is copied in, the next ones are on their way."""
STREAMS = 2
"""Process groups that gloo's buckets take in turn: one connection has one thread, which is slower than memory."""
POLL_S, IDLE_POLL_S = 0.005, 0.2
"""How often the trainer looks whether a replica asks, and whether a version was dropped: while there is something that
the replica has not got, and while there is not."""


class CollectiveTransport(WeightTransport):
    """Bucketed broadcast over a process group of trainer rank 0 and a replica (gloo on CPU, nccl on GPU)."""

    def __init__(self, config: RunConfig[Any], context: WorkerContext) -> None:
        super().__init__(config, context)
        self.replicas = generator_names(config.generator.replicas)
        self.senders: list[Sender] = []
        self.held: dict[str, Held] = {}
        """What the trainer can send, by the `where` of its ticket."""
        self.changed = Condition(RLock())
        """Of `held`, which senders read, each in its thread."""
        self.meeting: Meeting | None = None
        """The replica's half."""

    # The trainer ----------------------------------------------------------------------------------------------------

    def place(self, layout: Layout) -> Ticket:
        if not self.senders:
            self.senders = [Sender(self, name) for name in self.replicas]
        for sender in self.senders:
            if sender.failure:
                raise SyncError(f"weights can no longer be sent to {sender.replica}: {sender.failure}")
        return Ticket(layout, str(self.num_pushed))

    def send(self, ticket: Ticket, tensors: Mapping[str, Tensor]) -> None:
        with self.changed:
            self.held[ticket.where] = Held(ticket.layout, tensors)
            self.changed.notify_all()

    def arrived(self, ticket: Ticket) -> bool:
        with self.changed:
            held = self.held.get(ticket.where)
            return held is None or bool(held.sent_to)

    def settle(self) -> None:
        """Copy what some replica has not got yet; SyncError if one takes longer than it may to receive it."""
        super().settle()
        with self.changed:
            if not self.changed.wait_for(self._nobody_reads_weights, self.config.weights.timeout_s):
                raise SyncError(f"a replica takes weights for over {self.config.weights.timeout_s:g} s")
            for where, held in list(self.held.items()):
                if held.sent_to.issuperset(self.replicas):
                    del self.held[where]
                elif held.copy is None:
                    held.keep(self.empty(held.layout.nbytes))

    def _nobody_reads_weights(self) -> bool:
        return not any(held.num_readers for held in self.held.values() if held.copy is None)

    @contextmanager
    def reading(self, where: str, replica: str) -> Iterator[Held | None]:
        """What a sender sends; None when it is gone."""
        with self.changed:
            held = self.held.get(where)
            if held:
                held.num_readers += 1
        try:
            yield held
            if held:
                held.sent_to.add(replica)
        finally:
            with self.changed:
                if held:
                    held.num_readers -= 1
                self.changed.notify_all()

    def pause(self, replica: str) -> None:
        """For a sender, until it may be that its replica asks for something."""
        with self.changed:
            news = any(replica not in held.sent_to for held in self.held.values())
            self.changed.wait(POLL_S if news else IDLE_POLL_S)

    def free(self, ticket: Ticket) -> None:
        with self.changed:
            self.held.pop(ticket.where, None)

    def free_dropped(self) -> None:
        with self.changed:
            super().free_dropped()

    def close(self) -> None:
        with self.changed:
            self.closing.set()
            self.changed.notify_all()
        for sender in self.senders:
            sender.thread.join(self.config.weights.timeout_s)
        super().close()
        self.senders, self.meeting = [], None

    # A replica ------------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket, into: Mapping[str, Tensor]) -> None:
        context, layout = self.context, ticket.layout
        with told(f"the weights of version {layout.version} did not arrive from the trainer"):
            if self.meeting is None:
                self.meeting = Meeting(self, context.group, context.rank + 1, context.world_size)
            self.meeting.ask(ticket.where)
            cuts = list(layout.cuts(BUCKET))
            slots = [self.slot(layout, into, *cut) for cut in cuts]
            buckets = (self.empty(b - a) if slot is None else slot for slot, (a, b) in zip(slots, cuts, strict=True))
            for bucket, slot, (start, _) in zip(self.meeting.broadcast(buckets), slots, cuts, strict=True):
                if slot is None:
                    layout.unpack(bucket, into, start)

    # Both -----------------------------------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.context.device)

    def slot(self, layout: Layout, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor | None:
        """The very bytes of these tensors that are broadcast; None where they are not, or not on the device."""
        found = layout.slot(tensors, start, end)
        return found if found is not None and found.device == torch.device(self.context.device) else None


class Held:
    """One version as the trainer has it: the weights themselves until they change, then a copy of them."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        self.layout, self.tensors = layout, tensors
        self.copy: Tensor | None = None
        self.num_readers = 0
        self.sent_to: set[str] = set()

    def keep(self, copy: Tensor) -> None:
        """Copy the weights to this uint8 tensor, and let go of them."""
        self.layout.pack(self.tensors, copy)
        self.copy, self.tensors = copy, {}

    def buckets(self, transport: CollectiveTransport) -> Iterator[Tensor]:
        """In order. Where a bucket is no part of a tensor as it is sent, it is put together in a new one."""
        copy, tensors = self.copy, self.tensors
        for start, end in self.layout.cuts(BUCKET):
            bucket = copy[start:end] if copy is not None else transport.slot(self.layout, tensors, start, end)
            if bucket is None:
                bucket = transport.empty(end - start)
                self.layout.pack(tensors, bucket, start)
            yield bucket


class Meeting:
    """A process group of rank 0 of the trainer (here rank 0) and the ranks of one replica (here 1 and up).

    Each pull is a round: every rank of the replica asks for the same copy, the trainer answers whether it has it.
    """

    def __init__(self, transport: CollectiveTransport, replica: str, rank: int, num_receivers: int) -> None:
        folder, timeout_s = transport.context.shared_dir, transport.config.weights.timeout_s
        if folder is None:
            raise SyncError("weights.transport=collective needs workers that are processes")
        self.rank, self.num_receivers, self.timeout = rank, num_receivers, timedelta(seconds=timeout_s)
        self.device = torch.device(transport.context.device)
        # Exported, but not declared to be.
        self.store = dist.FileStore(str(folder / f"meeting-{replica}"), -1)  # type: ignore[attr-defined]
        self.groups: list[Any] = []
        self.round = 0

    def ask(self, where: str) -> None:
        """A receiver's half of the beginning of a round. SyncError when the trainer does not have that copy."""
        number, self.round = self.round, self.round + 1
        self.store.set(f"ask/{number}/{self.rank}", where)
        self._connect()
        self.store.wait([f"answer/{number}"], self.timeout)
        if answer := self.store.get(f"answer/{number}").decode():
            raise SyncError(answer)

    def asked(self) -> str | None:
        """The trainer's: for which copy all receivers ask; None when they do not."""
        keys = [f"ask/{self.round}/{rank}" for rank in range(1, self.num_receivers + 1)]
        if not self.store.check(keys):
            return None
        self._connect()
        return str(self.store.get(keys[0]).decode())

    def answer(self, problem: str) -> None:
        """Nothing: it comes."""
        number, self.round = self.round, self.round + 1
        self.store.set(f"answer/{number}", problem)

    def broadcast(self, buckets: Iterator[Tensor]) -> Iterator[Tensor]:
        """Send or receive buckets in order; each is yielded when it is through."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self.timeout
        under_way: deque[tuple[Tensor, Any]] = deque()
        for number, bucket in enumerate(buckets):
            group = self.groups[number % len(self.groups)]
            under_way.append((bucket, group.broadcast([bucket], options)))
            if len(under_way) > AHEAD:
                yield _through(*under_way.popleft())
        while under_way:
            yield _through(*under_way.popleft())

    def _connect(self) -> None:
        if self.groups:
            return
        size = 1 + self.num_receivers
        streams = 1 if self.device.type == "cuda" else STREAMS
        stores = [dist.PrefixStore(f"group{k}", self.store) for k in range(streams)]  # type: ignore[attr-defined]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout  # noqa: SLF001 - there is no other way to set it
            self.groups = [dist.ProcessGroupNCCL(store, self.rank, size, options) for store in stores]
        else:
            self.groups = [dist.ProcessGroupGloo(store, self.rank, size, self.timeout) for store in stores]


def _through(bucket: Tensor, work: Any) -> Tensor:
    work.wait()
    if bucket.is_cuda:
        torch.cuda.current_stream(bucket.device).synchronize()
    return bucket


class Sender:
    """A thread of the trainer that answers one replica until the transport closes."""

    def __init__(self, transport: CollectiveTransport, replica: str) -> None:
        self.transport, self.replica = transport, replica
        self.failure = ""
        self.thread = Thread(target=self._serve, name=f"digen-weights-{replica}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        transport = self.transport
        try:
            meeting = Meeting(transport, self.replica, 0, transport.config.generator.ranks)
            while not transport.closing.is_set():
                transport.pause(self.replica)
                transport.free_dropped()
                if (where := meeting.asked()) is not None:
                    self._answer(meeting, where)
        except (RuntimeError, OSError) as error:  # the replica is told by its own timeout, the driver by the next push
            self.failure = f"{type(error).__name__}: {error}"

    def _answer(self, meeting: Meeting, where: str) -> None:
        with self.transport.reading(where, self.replica) as held:
            if held is None:
                meeting.answer("the trainer does not have these weights any more")
                return
            meeting.answer("")
            for _ in meeting.broadcast(held.buckets(self.transport)):
                pass


@contextmanager
def told(what: str) -> Iterator[None]:
    """Errors of torch.distributed as SyncError."""
    try:
        yield
    except SyncError:
        raise
    except RuntimeError as error:
        raise SyncError(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
