"""A program that keeps one server for as long as whoever asked for it lives: `judge_keeper.py GRACE_S COMMAND...`.

Its standard input is the asker's end of a socket. However the asker ends, the kernel closes that socket: there is no
death, of the driver or on its way out, after which this program does not learn of it. It is run by its path and imports
nothing of digen, so that it is there within milliseconds. Invariant: when it has ended, the server has, with all
children that stayed in its process group; if it is killed itself, the server is killed with it (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial

NOT_STARTED = 127
"""Exit code for a command that cannot be run, as shells have it."""


def main(grace_s: float, command: list[str]) -> int:
    """Run the command until it ends or nobody asks for it any more. Its exit code; 128 + n if signal n ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # vLLM's processes talk over sockets in a folder, and a server that is ended leaves them there.
    with tempfile.TemporaryDirectory(prefix="digen-server-", ignore_cleanup_errors=True) as sockets:
        return _served(grace_s, command, {"VLLM_RPC_BASE_PATH": sockets, **os.environ})


def _served(grace_s: float, command: list[str], environment: dict[str, str]) -> int:
    try:
        server = subprocess.Popen(  # noqa: S603 (what the run's own config names)
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 (no thread has been started yet)
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror or error}\n")
        return NOT_STARTED
    end = partial(_end, server, grace_s)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end, daemon=True).start())
    threading.Thread(target=_after_asker, args=[end], daemon=True).start()
    code = server.wait()
    _signal(server, signal.SIGKILL)  # what it may have left behind
    return 128 - code if code < 0 else code


def _after_asker(end: partial[None]) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    end()


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, then SIGKILL."""
    _signal(server, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(grace_s)
        return
    _signal(server, signal.SIGKILL)


def _signal(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, number)


def _die_with(parent: int) -> None:
    """In the server, before it is one: have the kernel kill it when its keeper dies."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
