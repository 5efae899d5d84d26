"""Workers of the transport tests, loaded by path: some tensors, and one side of a transport. And plugins that fail."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from threading import Event
from typing import Any

import torch

from digen.engines.base import WorkerContext
from digen.presets import rebuild
from digen.types import Published
from digen.weights.base import Ticket, load, make_transport, publish
from digen.weights.collective import Meeting
from digen.weights.fingerprint import glance
from digen.weights.inline import InlineTransport

SHAPES: Mapping[str, tuple[int, ...]] = {
    "first.weight": (300, 70),
    "first.bias": (70,),
    "scale": (),
    "nothing": (0, 4),
    "odd": (3, 7, 5),
    "last.weight": (1200, 1100),  # longer than a bucket
}


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}
    made["turned"] = torch.randn(30, 20, generator=draw).to(dtype).T  # not contiguous
    return made


BROADCAST = Meeting.broadcast
CHANGES: Mapping[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing": lambda w: w.pop("odd"),
    "extra": lambda w: w.update({"more": torch.zeros(3)}),
    "renamed": lambda w: w.update({"ode": w.pop("odd")}),
    "shape": lambda w: w.update({"odd": w["odd"].reshape(7, 3, 5)}),
    "dtype": lambda w: w.update({"odd": w["odd"].double()}),
    "nothing": lambda w: w.clear(),
}


class Side:
    """A worker that is trainer and generator alike."""

    def __init__(self, payload: object, context: WorkerContext) -> None:
        self.context = context
        self.transport: Any = None

    def begin(self, case: str, payload: Mapping[str, Any], seed: int, dtype: str = "float32") -> None:
        """A transport of its own for every test, in a folder of its own; and tensors."""
        self.close()
        shared = self.context.shared_dir and self.context.shared_dir / case
        if shared:
            shared.mkdir(exist_ok=True)
        context = replace(self.context, shared_dir=shared)
        self.transport = make_transport(rebuild(payload), context)
        self.weights = {name: w.contiguous() for name, w in weights(seed, getattr(torch, dtype)).items()}

    def push(self, version: int, seed: int, change: str | None = None, settle: bool = True) -> Published:
        """Publish new weights; afterwards they change, as training does it, now or at the next `settle`."""
        made = weights(seed)
        if change:
            CHANGES[change](made)
        self.trained = made
        published = publish(self.transport, version, made)
        if settle:
            self.settle()
        return published

    def settle(self) -> None:
        """As an optimizer step: wait until what was pushed is copied, then change the weights."""
        self.transport.settle()
        for tensor in self.trained.values():
            tensor.zero_()

    def pull(self, published: Published) -> str:
        return load(self.transport, published, self.weights)

    def has(self, seed: int, dtype: str | None = None) -> bool:
        """Whether the weights here are those of the seed, bit for bit, after having been cast to `dtype`."""
        for name, wanted in weights(seed).items():
            sent = wanted.to(getattr(torch, dtype)).to(wanted.dtype) if dtype else wanted
            if not torch.equal(self.weights[name], sent):
                return False
        return True

    def proven(self) -> None:
        self.transport.proven()

    def receive_wrong(self, name: str, at: int) -> None:
        """From now on one bit of this tensor arrives wrong."""
        receive = self.transport.receive

        def wrong(ticket: Ticket, into: Mapping[str, torch.Tensor]) -> None:
            receive(ticket, into)
            into[name].view(torch.int32).view(-1)[at] ^= 1

        self.transport.receive = wrong

    def break_disk(self) -> None:
        """From now on what is sent gets only half of the way."""
        send = self.transport.send

        def half(ticket: Ticket, tensors: Mapping[str, torch.Tensor]) -> None:
            name = next(iter(tensors))
            with suppress(KeyError):  # it is told of all of them
                send(ticket, {name: tensors[name]})
            raise OSError(28, "No space left on device")

        self.transport.send = half

    def hold(self) -> None:
        """From now on nothing is sent until `release`."""
        send, self.released = self.transport.send, Event()

        def later(ticket: Ticket, tensors: Mapping[str, torch.Tensor]) -> None:
            assert self.released.wait(60)
            send(ticket, tensors)

        self.transport.send = later

    def release(self) -> None:
        self.released.set()

    def say_nothing(self) -> None:
        """From now on the trainer keeps to itself what it has sent."""
        self.transport._send = lambda *_: None

    def busy(self, seconds: float) -> float:
        """As a forward pass: the thread of the calls is taken, and for a part of the time it holds the GIL."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.randn(200, 200) @ torch.randn(200, 200)
        return time.monotonic()

    def held(self) -> tuple[int, int]:
        """What the transport of the trainer keeps: versions that are published, and copies, files or folders."""
        transport, shared = self.transport, self.transport.context.shared_dir
        transport.free_dropped()
        kind = type(transport).__name__
        if kind == "SafetensorsTransport":
            kept = len(list(transport.config.weights.dir.glob("version-*")))
        elif kind == "CollectiveTransport":
            kept = len(transport.held)
        else:
            kept = len(list(shared.glob("weights-*"))) if shared else len(transport.pushed)
        return len(transport.pushed), kept

    def stop_sending(self) -> None:
        """From now on the trainer's threads are dead, as far as others can tell."""
        self.transport.closing.set()
        for sender in self.transport.senders:
            sender.thread.join()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def slow_down(self, seconds: float) -> None:
        """Wait so long before every bucket."""

        def slowly(buckets: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
            for bucket in buckets:
                time.sleep(seconds)
                yield bucket

        Meeting.broadcast = lambda meeting, buckets: BROADCAST(meeting, slowly(buckets))  # type: ignore[method-assign]

    def sending(self) -> bool:
        """Whether a broadcast is under way."""
        return any(held.num_readers for held in self.transport.held.values())

    def die_when_asked(self) -> None:
        """Die in the middle of the next broadcast."""

        def dying(meeting: Meeting, buckets: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
            yield from BROADCAST(meeting, islice(buckets, 1))
            self.die()

        Meeting.broadcast = dying  # type: ignore[method-assign]

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None


class Flipping(InlineTransport):
    """Loads one bit wrong, where nobody looks at once."""

    def receive(self, ticket: Ticket, into: Mapping[str, torch.Tensor]) -> None:
        super().receive(ticket, into)
        seen = glance(into, ticket.layout.version)
        largest = max(into.values(), key=torch.Tensor.numel).detach().view(torch.int32).view(-1)
        for at in range(1000):
            largest[at] ^= 1
            if glance(into, ticket.layout.version) == seen:
                return
            largest[at] ^= 1


class Late(InlineTransport):
    """Loads what was there before."""

    def receive(self, ticket: Ticket, into: Mapping[str, torch.Tensor]) -> None:
        """Nothing arrives."""


class Renaming(InlineTransport):
    """Sends a tensor under another name."""

    def push(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        names = dict.fromkeys(tensors)
        first = next(iter(names))
        return super().push(version, {f"{name}_old" if name == first else name: t for name, t in tensors.items()})


class Breaking(InlineTransport):
    """Ends in the middle."""

    def receive(self, ticket: Ticket, into: Mapping[str, torch.Tensor]) -> None:
        next(iter(into.values())).detach().zero_()
        raise ConnectionError("the other side is gone")
