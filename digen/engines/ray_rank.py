"""One rank in a Ray cluster: an actor process that makes a worker and answers calls, as `rank.py` does over a socket.

Invariant: one answer per call; an exception is an answer, and only the end of the process is none. Nothing here imports
torch, so a worker's environment (thread counts!) is complete before torch sees it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from digen.engines.placement import available_cores
from digen.engines.process import SLEEPING_THREADS, THREAD_COUNTS
from digen.engines.rank import Start, answer, close, leave_process_group, make_worker
from digen.engines.rank import _unpack as unpacked

PACKAGES: Final = ("digen", "ray", "torch", "diffusers", "transformers", "peft", "safetensors", "numpy")
"""What must be the same on every node: samples and gradients depend on it, or what travels between processes."""
GET_ADDRESS: Final = 0x8915
"""The ioctl SIOCGIFADDR of Linux."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rank's process is told before it makes its worker."""

    env: Mapping[str, str]
    threads: int | None
    neighbours: int
    """Ranks of the run on this node, this one too: they share its cores where `threads` is None."""
    log: Path | None
    on_one_node: bool
    """Whether all ranks of the group are here."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank's process says of itself."""

    pid: int
    address: str
    """Of its node."""
    meeting: str
    """Where the group can meet, if this is rank 0: `tcp://address:port`."""
    sees_logs: bool
    """Whether the folder for logs is here too."""
    versions: Mapping[str, str] = field(default_factory=dict)


class Rank:
    """The Ray actor."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.worker: Any = None
        self.reserved: socket.socket | None = None

    def facts(self) -> Facts:
        """Asked first, and once."""
        import ray

        address, log = ray.util.get_node_ip_address(), self.setting.log
        sees_logs = log is None or log.parent.is_dir()
        meeting = self._meeting("127.0.0.1" if self.setting.on_one_node else address)
        return Facts(os.getpid(), address, meeting, sees_logs, versions())

    def ping(self) -> None:
        """An answer while the process lives."""

    def begin(self, body: bytes, _after: object = None) -> bytes:
        """Make the worker of the pickled `Start`."""
        return answer(partial(self._construct, body))

    def do(self, body: bytes, _after: object = None) -> bytes:
        """Run a pickled (method, args, kwargs). Ray waits for `_after` before it calls this."""
        return answer(partial(self._call, body))

    def leave(self) -> None:
        """Close the worker and end the process."""
        import ray

        close(self.worker)
        leave_process_group()
        ray.actor.exit_actor()

    def _construct(self, body: bytes) -> None:
        self._prepare()
        start: Start = unpacked(bytearray(body))
        self.worker = make_worker(start.target, start.payload, start.context)

    def _call(self, body: bytes) -> Any:
        method, args, kwargs = unpacked(bytearray(body))
        return getattr(self.worker, method)(*args, **kwargs)

    def _prepare(self) -> None:
        setting = self.setting
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which then ends its workers
        threads = setting.threads or max(1, available_cores() // setting.neighbours)
        card = "lo" if setting.on_one_node else self._network_card()
        os.environ.update({**SLEEPING_THREADS, **dict.fromkeys(THREAD_COUNTS, str(threads))})
        if card:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", card)  # it looks for one by the host's name, often in vain
        os.environ.update(setting.env)
        if setting.log:
            redirect(setting.log)
        faulthandler.enable()
        os.register_at_fork(after_in_child=partial(hang_up, open_sockets()))  # or a fork hides this process's end

    def _meeting(self, address: str) -> str:
        """A port that stays ours until torch listens there: bound with SO_REUSEADDR, and not listened on."""
        self.reserved = socket.socket()
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind((address, 0))
        return f"tcp://{address}:{self.reserved.getsockname()[1]}"

    def _network_card(self) -> str | None:
        """The name of the network interface that has the address of this node."""
        import ray

        address = ray.util.get_node_ip_address()
        return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def redirect(log: Path) -> None:
    """Send all output of this process to the end of a file, also what C code writes."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def open_sockets() -> dict[int, str]:
    """Descriptor -> identity of the sockets of this process (Linux): Ray's, while there are no others."""
    folder = Path("/proc/self/fd")
    found = {}
    for link in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            found[int(link.name)] = str(link.readlink())
    return {number: identity for number, identity in found.items() if identity.startswith("socket:")}


def hang_up(known: Mapping[int, str]) -> None:
    """Close those of these sockets that are still the same ones."""
    for number in [number for number, identity in open_sockets().items() if known.get(number) == identity]:
        os.close(number)


def versions() -> dict[str, str]:
    """Of Python and `PACKAGES` as they are here; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def address_of(card: str) -> str | None:
    """The IPv4 address of a network interface (Linux); None where it has none or nobody says."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        found = fcntl.ioctl(asking.fileno(), GET_ADDRESS, struct.pack("256s", card.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return None
