"""What is checked and decided before a worker starts: names, ranks, devices, CPU threads.

Invariant: what this host cannot give is a ConfigError with wanted and available, before anything starts (rule R16).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from digen.engines.base import WorkerSpec
from digen.errors import ConfigError

MAX_RANKS_PER_CORE = 16
"""More processes than this would bring the host down before they bring a result."""

CountCuda = Callable[[Mapping[str, str]], int]
"""How many CUDA devices a process with these further environment variables can use."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of one group run: `devices[r]` is the torch device of rank r, `threads` is per rank."""

    devices: tuple[str, ...]
    threads: int


def place(specs: Sequence[WorkerSpec], count_cuda: CountCuda) -> dict[str, Place]:
    """Places of all groups, by name. ConfigError for what this host lacks; CUDA is asked for only when wanted."""
    check_names(specs)
    cores, total = available_cores(), sum(spec.ranks for spec in specs)
    if total > MAX_RANKS_PER_CORE * cores:
        raise ConfigError(f"{total} ranks are wanted, but {cores} CPU cores can carry {MAX_RANKS_PER_CORE * cores}")
    for spec in specs:
        if spec.threads is not None and not 1 <= spec.threads <= cores:
            raise ConfigError(f"{spec.name}: {spec.threads} threads are wanted, {cores} CPU cores are available")
    places = {}
    for spec in specs:
        named = named_devices(spec.devices, spec.ranks)
        _check_cuda(spec, named, count_cuda)
        in_turn = tuple(named[rank % len(named)] for rank in range(spec.ranks))
        places[spec.name] = Place(in_turn, spec.threads or max(1, cores // total))
    return places


def named_devices(devices: str, ranks: int) -> tuple[str, ...]:
    """The torch devices that `cpu`, `cuda` (one per rank), `cuda:0-3` or `cuda:0,2` names. ConfigError for others."""
    if devices == "cpu":
        return ("cpu",)
    if devices == "cuda":
        return tuple(f"cuda:{rank}" for rank in range(ranks))
    if not re.fullmatch(r"cuda:\d+(-\d+)?(,\d+(-\d+)?)*", devices):
        raise ConfigError(f"devices: got {devices!r}. Allowed: cpu, cuda, cuda:0-3, cuda:0,2")
    indices = [index for part in devices.removeprefix("cuda:").split(",") for index in _span(part)]
    if not indices:
        raise ConfigError(f"devices: got {devices!r}, which names no device; write the smaller number first")
    return tuple(f"cuda:{index}" for index in indices)


def available_cores() -> int:
    """CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_cuda_in_child(env: Mapping[str, str]) -> int:
    """Ask a child, about 3 s long, so that this process stays free of torch. ConfigError when torch fails there."""
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"CUDA devices are wanted, but torch cannot be asked for them: {last}")
    return int(asked.stdout.split()[-1])


def _span(part: str) -> Iterable[int]:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def check_names(specs: Sequence[WorkerSpec]) -> None:
    """Raises ConfigError for a group without ranks, or with a name that no file can have or another group has."""
    names = [spec.name for spec in specs]
    for spec in specs:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.name):
            raise ConfigError(f"group name: got {spec.name!r}. Allowed: letters, digits, '.', '_' and '-'")
        if names.count(spec.name) > 1:
            raise ConfigError(f"group name: {spec.name!r} is given twice")
        if spec.ranks < 1:
            raise ConfigError(f"{spec.name}: a group has at least 1 rank, got {spec.ranks}")


def _check_cuda(spec: WorkerSpec, named: tuple[str, ...], count_cuda: CountCuda) -> None:
    wanted = [device for device in named if device != "cpu"]
    if not wanted:
        return
    available = count_cuda(spec.env)
    if missing := [device for device in wanted if int(device.removeprefix("cuda:")) >= available]:
        raise ConfigError(
            f"{spec.name}: devices {spec.devices!r} for {spec.ranks} rank(s) wants {len(wanted)} CUDA device(s); torch "
            f"finds {available} on this host, so there is no {', '.join(missing)}"
        )
