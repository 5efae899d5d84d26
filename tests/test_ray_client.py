"""A driver outside the Ray cluster that it uses (`engine.address=ray://HOST:PORT`): a run as on any other engine."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen.observe.files import read_rows
from digen.presets import resolve
from digen.run import run

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SMALL = (
    "data.prompts_per_step=2", "algorithm.samples_per_prompt=4", "sampling.num_steps=4", "generator.replicas=2",
    "trainer.batch_size=1", "generator.batch_size=1", "trainer.optimizer=sgd", "trainer.learning_rate=0.3",
    "trainer.weight_decay=0", "schedule.ordered=true", "schedule.assist=none", "trainer.threads=1",
    "generator.threads=1",
    f'reward={{"{HERE}/recording.py:brightness": {{}}}}', "observe.tensorboard=false",
)  # fmt: skip
GONE_S = 60.0
"""How long a rank may outlive its driver, on a machine that has a lot to do; Ray waits 30 s for one that was killed."""


class Outside(NamedTuple):
    """A cluster that the driver is not in."""

    address: str
    head: psutil.Process

    def ranks(self) -> list[psutil.Process]:
        found = []
        for one in self.head.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                ended = one.status() == psutil.STATUS_ZOMBIE
                found += [one] if one.name().startswith("ray::Rank") and not ended else []
        return found

    def has_none(self) -> bool:
        limit = time.monotonic() + GONE_S
        while self.ranks() and time.monotonic() < limit:
            time.sleep(0.1)
        return not self.ranks()


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temp:  # a short path, for sockets
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port=0", "--num-cpus=4"]
        command += [f"--ray-client-server-port={port}", "--include-dashboard=false", "--disable-usage-stats"]
        env = {**os.environ, "RAY_TMPDIR": temp, "HOME": temp, "PYTHONPATH": str(HERE)}
        head = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + 120
        while not _answers(port):
            assert time.monotonic() < limit, "the cluster does not start"
            time.sleep(0.2)
        yield Outside(f"ray://127.0.0.1:{port}", psutil.Process(head.pid))
        head.terminate()
        head.wait(60)


def _answers(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


def begun(address: str, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "digen", "run", "flowgrpo", "--model", "glyph", "--engine", "ray"]
    command += ["--address", address, f"run_dir={folder}", *SMALL, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_driver_outside_the_cluster_learns_what_one_on_this_machine_learns(outside: Outside, tmp_path: Path) -> None:
    output, _ = (there := begun(outside.address, tmp_path / "ray", "steps=2")).communicate(timeout=400)
    assert there.returncode == 0, output
    assert not [line for line in output.splitlines() if "Error" in line or "error:" in line or "Traceback" in line]
    run(
        resolve("flowgrpo", "glyph", None, [*SMALL, "steps=2", "engine.name=inline", f"run_dir={tmp_path}/inline"], {}),
        console=Console(quiet=True),
    )
    ray, inline = (
        load_file(next(tmp_path.glob(f"{name}/checkpoints/*/weights.safetensors"))) for name in ("ray", "inline")
    )
    assert max(float((ray[name] - inline[name]).abs().max()) for name in inline) <= 1e-6
    assert all(row["weight_delta"] > 1e-3 for row in read_rows(tmp_path / "ray" / "metrics.jsonl"))
    assert all(torch.isfinite(tensor).all() for tensor in ray.values())
    assert outside.has_none(), "ranks are left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_a_driver_outside_the_cluster_however_that_ends(
    number: signal.Signals, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed one is given up when it has not come back for 30 s."""
    monkeypatch.setenv("RAY_ADDRESS", outside.address)
    driver, metrics = begun("auto", tmp_path / "run", "steps=1000"), tmp_path / "run" / "metrics.jsonl"
    try:
        limit = time.monotonic() + 300
        while not metrics.exists() or not list(read_rows(metrics)):
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < limit, "no step within five minutes"
            time.sleep(0.2)
        assert len(outside.ranks()) == 3
        driver.send_signal(number)
        output, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == (130 if number == signal.SIGINT else -number), output
    assert outside.has_none(), "ranks are left"
