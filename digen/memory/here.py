"""Does a run fit on this host? Asked before anything starts, in a process of its own: the driver is free of torch.

Invariant: a run is refused only if it would not fit though the plan were as wrong as it can be (`ERROR`); what is
close is said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from digen import plugins
from digen.config import RunConfig
from digen.engines.placement import named_devices
from digen.errors import ConfigError
from digen.memory.placement import RESERVE
from digen.memory.ranks import RankMemory
from digen.preflight import cached
from digen.presets import payload, rebuild

ERROR: Final = 0.15
"""How far a plan may be from what is measured (`tests/test_memory_measured.py`)."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What there is to say: whether it stops the run, and the sentences."""

    kind: Literal["fits", "close", "too much"]
    lines: tuple[str, ...] = ()


def check_memory(config: RunConfig[Any]) -> list[str]:
    """Plan the memory of the devices that are used here. Raises ConfigError when a run cannot fit on its GPUs.

    Returns what to tell the user: what is close, or more than this host's memory on a CPU (which may swap).
    """
    groups = [config.trainer] if config.schedule.mode == "colocated" else [config.generator, config.trainer]
    on_cpus = all(group.devices == "cpu" for group in groups)
    if config.engine.name == "ray" and (config.engine.address or not on_cpus):
        return []  # Ray chooses the GPUs, and maybe other hosts
    if on_cpus:
        return _host_memory(config)
    try:
        found = ask(config)
    except ConfigError as error:
        return [str(error)]
    if found.kind == "too much":
        how = "see what would fit: `digen plan` with the same settings, --gpus and --gpu-memory (docs/plan.md)"
        raise ConfigError("\n".join(["the run does not fit into the devices' memory", *found.lines, how]))
    return [f"{line}: that is close" for line in found.lines]


def _host_memory(config: RunConfig[Any]) -> list[str]:
    """On CPUs: whether this host has room for the weights alone, once for each rank that loads all of them."""
    trainer, generator = config.trainer, config.generator
    copies = 1 if trainer.backend == "fsdp" else trainer.ranks
    copies += 0 if config.schedule.mode == "colocated" else generator.ranks * generator.replicas
    path = config.model.path or plugins.attribute("models", config.model.name, "default_path")
    local = Path(path).expanduser() if isinstance(path, str) and path else None
    folder = local if local is None or local.is_dir() else cached(str(path))
    if folder is None:
        return []
    weights = sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))
    free = available_memory()
    if free is None or copies * weights <= free:
        return []
    room = f"{free / 1e9:.1f} GB of memory are free here: use fewer ranks, or GPUs"
    return [f"{copies} ranks load {weights / 1e9:.1f} GB of weights each, {room}"]


def available_memory(file: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of host memory that can be used without swapping; None where nobody says."""
    if not file.is_file():
        return None
    found = [line.split() for line in file.read_text("ascii").splitlines() if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def judge(config: RunConfig[Any], ranks: Sequence[RankMemory], free: Mapping[str, int]) -> Judgement:
    """Compare what ranks need with the free bytes of each device that they are on."""
    kinds, lines = set(), []
    for device, needed, names in _needs(config, ranks):
        if device not in free:
            continue  # the engine says that there is no such device
        have = free[device]
        if needed * (1 - ERROR) > have:
            kinds.add("too much")
        elif needed > have * (1 - RESERVE):
            kinds.add("close")
        else:
            continue
        lines.append(f"{device}: {names} will need {needed / 1e9:.1f} GB, {have / 1e9:.1f} GB are free")
    return Judgement("too much" if "too much" in kinds else "close" if kinds else "fits", tuple(lines))


def _needs(config: RunConfig[Any], ranks: Sequence[RankMemory]) -> Iterator[tuple[str, int, str]]:
    """Device, bytes at the worst moment of one rank while the others rest, and who is there."""
    there: dict[str, Counter[str]] = {}
    by_group = {rank.group: rank for rank in ranks}
    for name, held in by_group.items():
        group = config.trainer if name == "trainer" else config.generator
        for replica in range(held.ranks // group.ranks):
            devices = group.devices if name == "trainer" else config.generator.devices_of(replica)
            named, parallel = named_devices(devices, group.ranks), _parallel(config, name)
            for rank in range(group.ranks):
                for device in named[rank % len(named) :: group.ranks][:parallel]:
                    there.setdefault(device, Counter())[name] += 1
    for device, names in sorted(there.items()):
        if device != "cpu":
            resting = sum(by_group[name].standing * count for name, count in names.items())
            needed = max(resting + by_group[name].peak - by_group[name].standing for name in names)
            yield device, needed, " and ".join(f"{count} x {name}" for name, count in names.items())


def _parallel(config: RunConfig[Any], group: str) -> int:
    """Devices of a rank."""
    return 1 if group == "trainer" else config.generator.devices_per_rank


def ask(config: RunConfig[Any]) -> Judgement:
    """Have a process of its own count, and look at the devices. ConfigError when it cannot."""
    command = [sys.executable, "-c", "from digen.memory.here import answer; answer()"]
    text = json.dumps(payload(config))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603 - our own code
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"memory cannot be planned: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Judgement(found["kind"], tuple(found["lines"]))


def answer() -> None:
    """The other side of `ask`: settings come on stdin, the judgement goes to stdout."""
    import torch

    from digen.memory.planner import plan_memory

    config = rebuild(json.load(sys.stdin))
    free = {f"cuda:{k}": torch.cuda.mem_get_info(k)[0] for k in range(torch.cuda.device_count())}
    made = plan_memory(config)
    found = judge(made.config, made.ranks, free)
    sys.stdout.write(json.dumps({"kind": found.kind, "lines": found.lines}) + "\n")
