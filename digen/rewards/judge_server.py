"""A model server that a run starts for its judge, and stops: `serve` of the rewards `judge` and `unified-reward`.

Invariant: workers see nothing of this: they get the URL of a server that answers. The port is held from before the
server starts until after its end, so that two runs never get the same one. However a run ends, by an error, by Ctrl-C
or by a SIGKILL of the driver, the server ends too, with its children (`judge_keeper.py`). That it dies is told with the
end of its log and it is started again, a few times; what it leaves unanswered meanwhile is a failed reward (rule R17).
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import anyio
import anyio.to_thread
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from digen.config import GroupConfig, RewardTerm, RunConfig
from digen.engines.placement import named_devices
from digen.errors import ConfigError, RewardError
from digen.rewards.base import RewardSet
from digen.rewards.weights import MODEL, Repository

HOST: Final = "127.0.0.1"
GRACE_S: Final = 15.0
"""Between SIGTERM and SIGKILL."""
RESTARTS: Final = 3
"""How often in a run a server is started again that died."""
PATIENCE_S: Final = (0.05, 1.0)
"""Between two looks whether it answers: at first and at last."""
ANSWER_S: Final = 5.0
LAST_LINES: Final = 10
FIRST_ERRORS: Final = 3
ERROR: Final = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
KEEPER: Final = Path(__file__).with_name("judge_keeper.py")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
MEMORY: Final = "--gpu-memory-utilization"

Note = Callable[[str], None]


class Serve(BaseModel):
    """How the server is started: `COMMAND MODEL --host HOST --port PORT ARGS`."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("vllm", "serve")
    """Program and first arguments; a `vllm` of another environment by its path."""
    args: tuple[str, ...] = ()
    """Further arguments."""
    devices: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "cpu"
    """Its own devices, as `generator.devices`; several are one tensor-parallel group."""
    ready_s: Annotated[FiniteFloat, Field(gt=0)] = 1800.0
    """Longest time from its start to its first answer."""


def _serve(value: object) -> object:
    return Serve() if value is True else None if value is False else value


Served = Annotated[Serve | None, BeforeValidator(_serve)]
"""The option `serve`: true, false, or a mapping of what is to be other than usual."""


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A model and how it is served. Rewards that want the same share one."""

    model: str
    serve: Serve

    def missing(self, reward: str) -> str | None:
        """What is not on this machine, the program or the model, as sentences: a run downloads nothing.

        Raises ConfigError for devices that this process does not see.
        """
        self.environment(os.environ)
        program, weights = self.serve.command[0], Repository(self.model, "model", MODEL).missing(reward)
        absent = (
            f"{reward}: serve needs the program {program!r}, which is not here: install it (pip install vllm), or name "
            "one of another environment, e.g. serve.command=[/opt/vllm/bin/vllm, serve]"
        )
        return "\n".join([*([] if _program(program) else [absent]), *([weights] if weights else [])]) or None

    @property
    def devices(self) -> tuple[str, ...]:
        """`cpu`, or `cuda:3` and its like."""
        return named_devices(self.serve.devices, 1)

    def command(self, port: int) -> list[str]:
        """All that is started."""
        program, *first = self.serve.command
        parallel = ["--tensor-parallel-size", str(len(self.devices))] if len(self.devices) > 1 else []
        address = ["--host", HOST, "--port", str(port)]
        return [_program(program) or program, *first, self.model, *address, *parallel, *self.serve.args]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """This process's, with its own devices alone to be seen, of those that this process sees."""
        numbers = [int(device.removeprefix("cuda:")) for device in self.devices if device != "cpu"]
        seen = [word.strip() for word in environ[VISIBLE].split(",") if word] if VISIBLE in environ else None
        if seen is not None and max(numbers, default=-1) >= len(seen):
            raise ConfigError(f"serve.devices={self.serve.devices}: {VISIBLE}={environ[VISIBLE]} has {len(seen)}")
        own = [str(number) if seen is None else seen[number] for number in numbers]
        return {**environ, VISIBLE: ",".join(own)}


def _named(group: GroupConfig) -> tuple[str, ...]:
    """Devices of all its ranks."""
    return named_devices(group.devices, group.ranks * getattr(group, "replicas", 1))


def check_devices(servers: Mapping[str, ModelServer], config: RunConfig[Any]) -> None:
    """Raises ConfigError for a device that a worker group or another server has too, unless its share is set."""
    groups = {"generator": config.generator, "trainer": config.trainer}
    owners = {d: f"the {name}" for name, g in groups.items() for d in _named(g)}
    if config.scoring.devices:
        owners[config.scoring.devices] = "scoring"
    for server, name in _by_server(servers).items():
        shared = any(word.startswith(MEMORY) for word in server.serve.args)
        for device in server.devices:
            if device != "cpu" and device in owners and not shared:
                raise ConfigError(
                    f"reward.{name}.serve.devices={server.serve.devices}: {owners[device]} has {device} too, and a "
                    f"server takes most of its memory; allowed: another device, or a {MEMORY} among serve.args"
                )
            owners[device] = f"reward {name!r}"


@asynccontextmanager
async def serving(
    terms: Mapping[str, RewardTerm], log_dir: Path | None, note: Note
) -> AsyncIterator[Mapping[str, RewardTerm]]:
    """The terms as workers get them: those that want a server have the URL of one that is up until the block ends.

    Its output goes to `log_dir` (None: it is kept only as long as it runs). Raises RewardError, with the end of its
    log, for one that ends, or does not answer in time, before the block has begun; later its death is noted.
    """
    servers = RewardSet(terms, 1.0).servers()
    async with AsyncExitStack() as stack:
        if servers and log_dir is None:
            log_dir = Path(stack.enter_context(TemporaryDirectory(prefix="digen-judge-")))
        running: dict[ModelServer, Running] = {}
        for server, name in _by_server(servers).items():
            one = running[server] = Running(name, server, log_dir or Path())
            stack.push_async_callback(one.stop)
            one.start()
        for one in running.values():
            note(f"waiting for the server of reward {one.name!r}; it writes to {one.log}")
            await one.ready()
        if running:
            await stack.enter_async_context(_beside(partial(one.keep, note) for one in running.values()))
        urls = {name: running[server].url for name, server in servers.items()}
        yield {
            name: term.model_copy(update={"url": urls[name], "serve": False}) if name in urls else term
            for name, term in terms.items()
        }


class Running:
    """One server's port, process and log. `start` it, wait until it is `ready`, `keep` it, and `stop` it."""

    def __init__(self, name: str, server: ModelServer, log_dir: Path) -> None:
        self.name, self._server = name, server
        self.log = log_dir / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-server.log"
        self._held = held_port()
        self._port: int = self._held.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._ours: socket.socket | None = None

    @property
    def url(self) -> str:
        """Of the API, as the reward's option has it."""
        return f"http://{HOST}:{self._port}/v1"

    def start(self) -> None:
        """Start the process; its output goes to the end of the log."""
        if sys.platform != "linux":  # elsewhere nobody can take a port that is held
            self._held.close()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (what the run's own config names)
                [sys.executable, "-I", str(KEEPER), str(GRACE_S), *self._server.command(self._port)],
                env=self._server.environment(os.environ),
                start_new_session=True,  # Ctrl-C is for the driver
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
            )
        self._ours = ours

    async def ready(self) -> None:
        """Wait until it answers. Raises RewardError when it ends before that, or does not in time."""
        limit_s, (pause_s, longest_s) = self._server.serve.ready_s, PATIENCE_S
        with anyio.move_on_after(limit_s):
            while self._code is None:
                if await anyio.to_thread.run_sync(self._answers, abandon_on_cancel=True):
                    return
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        how = f"did not answer within {limit_s:g} s" if self._code is None else self._how()
        raise RewardError(f"the server of reward {self.name!r} {how}{self._last_lines()}")

    async def keep(self, note: Note) -> None:
        """Start it again when it ends, RESTARTS times, and tell so."""
        for left in reversed(range(RESTARTS + 1)):
            await self._ended()
            then = f"started again ({left} more times at most)" if left else "not started again; its scores fail"
            note(f"the server of reward {self.name!r} {self._how()} and is {then}{self._last_lines()}")
            if left:
                await self.stop(hold=True)
                self.start()

    async def stop(self, *, hold: bool = False) -> None:
        """End it with its children, and give the port back unless it is to be held. A second time does nothing."""
        with anyio.CancelScope(shield=True):
            if self._ours is not None and self._process is not None:
                with suppress(OSError):
                    self._ours.shutdown(socket.SHUT_WR)  # its keeper reads the end of it
                with anyio.move_on_after(2 * GRACE_S):
                    await self._ended()
                self._process.kill()
                self._process.wait()
                anyio.notify_closing(self._ours)
                self._ours.close()
                self._ours = None
        if not hold:
            self._held.close()

    async def _ended(self) -> None:
        """Wait until its keeper has ended, which is when it has."""
        if self._ours is not None and self._process is not None:
            await anyio.wait_readable(self._ours)  # never written to: this is its end
            await anyio.to_thread.run_sync(self._process.wait)

    @property
    def _code(self) -> int | None:
        return self._process.poll() if self._process else None

    def _answers(self) -> bool:
        """Whether there is any answer that a working server gives; 401 is one."""
        with closing(http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_S)) as connection:
            try:
                connection.request("GET", "/v1/models")
                return connection.getresponse().status < http.client.INTERNAL_SERVER_ERROR
            except (OSError, http.client.HTTPException):
                return False

    def _how(self) -> str:
        code = self._code or 0
        with suppress(ValueError):
            return f"was killed by {signal.Signals(code - 128 if code > 128 else -code).name}"
        return f"ended with exit code {code}"

    def _last_lines(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
        # What failed first is not at the end: servers report it from one of their processes to the next.
        first = [line for line in lines[:-LAST_LINES] if ERROR.search(line)][:FIRST_ERRORS]
        said = "".join(f"\n    {line}" for line in (*first, *lines[-LAST_LINES:]))
        return f"; the end of {self.log}:{said}" if said else f"; it wrote nothing to {self.log}"


def held_port() -> socket.socket:
    """A free port of this machine that the kernel gives to nobody else until this socket is closed.

    It does not listen, so a server that sets SO_REUSEADDR (all do, to start again at once) can take the port while it
    is held.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held


@asynccontextmanager
async def _beside(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> AsyncIterator[None]:
    """Run jobs that do not raise beside the block, and end them with it. What the block raises leaves as it is."""
    try:
        async with anyio.create_task_group() as tasks:
            for job in jobs:
                tasks.start_soon(job)
            yield
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return
    raise first from first.__cause__


def _by_server(servers: Mapping[str, ModelServer]) -> dict[ModelServer, str]:
    """Each server once, with the first of its rewards, in their order."""
    found: dict[ModelServer, str] = {}
    for name, server in servers.items():
        found.setdefault(server, name)
    return found


def _program(name: str) -> str | None:
    """Where the program is: beside this interpreter, or on the path."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
