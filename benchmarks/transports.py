"""How fast new weights travel, by transport, against a plain memcpy of the same tensors in the same run.

    python benchmarks/transports.py

A trainer and a generator of one thread each, on one host. Every round measures a memcpy in both processes and one whole
sync as the driver sees it: publish, then load, each with its fingerprint. Of all rounds the best counts, for both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from common import Chart, Table, arguments, publish

from digen.engines.base import WorkerContext, WorkerSpec
from digen.engines.inline import InlineEngine
from digen.engines.process import ProcessEngine
from digen.presets import payload, rebuild, resolve
from digen.types import Published
from digen.weights.base import load, make_transport
from digen.weights.base import publish as publish_weights
from digen.weights.fingerprint import fingerprint, line_of

TRANSPORTS = ("inline", "shared_memory", "safetensors", "collective")
WIDTH = 2048
BLOCKS, ROUNDS = 3, 12


def weights(blocks: int, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Of a transformer: attention, feed-forward, biases and norms; 201 MB a block."""
    shapes = {f"attn.{name}": (width, width) for name in ("q", "k", "v", "out")}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    made = {}
    for block in range(blocks):
        for name, shape in shapes.items():
            made[f"{block}.{name}.weight"] = torch.randn(shape)
            made[f"{block}.{name}.bias"] = torch.randn(shape[0])
        made[f"{block}.norm"] = torch.ones(width)
    return made


class Side:
    """A trainer or a generator, without a model."""

    def __init__(self, given: Mapping[str, Any], context: WorkerContext) -> None:
        self.transport = make_transport(rebuild(given["config"]), context)
        self.weights = weights(given["blocks"])
        self.others = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def memcpy(self) -> float:
        began = time.perf_counter()
        for name, tensor in self.weights.items():
            np.copyto(self.others[name].numpy(), tensor.numpy())
        return time.perf_counter() - began

    def push(self, version: int) -> tuple[Published, float]:
        """What is published, and seconds."""
        began = time.perf_counter()
        published = publish_weights(self.transport, version, self.weights)
        return published, time.perf_counter() - began

    def pull(self, published: Published) -> float:
        """Seconds."""
        began = time.perf_counter()
        assert load(self.transport, published, self.weights) == published.fingerprint
        return time.perf_counter() - began

    def settle(self) -> None:
        self.transport.settle()

    def fingerprint(self, line: int | None) -> float:
        """Seconds of a fingerprint alone; None: of one that looks at everything."""
        began = time.perf_counter()
        fingerprint(self.weights, line)
        return time.perf_counter() - began

    def close(self) -> None:
        self.transport.close()


async def measure(name: str, blocks: int, rounds: int, folder: Path) -> dict[str, float]:
    """Best seconds of everything, by its name."""
    engine = InlineEngine() if name == "inline" else ProcessEngine()
    kind = "inline" if name == "inline" else "process"
    settings = ["steps=1", f"engine.name={kind}", f"weights.transport={name}", f"weights.dir={folder}"]
    given = {"config": payload(resolve("flowgrpo", "glyph", None, settings, {})), "blocks": blocks}
    specs = [WorkerSpec(group, f"{Path(__file__)}:Side", given, threads=1) for group in ("trainer", "generator")]
    best: dict[str, float] = {}
    async with engine.open(specs) as groups:
        trainer, generator = groups["trainer"], groups["generator"]
        for version in range(1, rounds + 1):
            memcpy = min((await trainer.call("memcpy"))[0], (await generator.call("memcpy"))[0])
            began = time.perf_counter()
            published, publish_s = (await trainer.call("push", version))[0]
            load_s = (await generator.call("pull", published))[0]
            sync_s = time.perf_counter() - began
            await trainer.call("settle")
            engine.store.drop(published.weights)
            seconds = {"memcpy": memcpy, "publish": publish_s, "load": load_s, "sync": sync_s}
            for what, line in (("fingerprints", line_of(version)), ("whole_fingerprints", None)):
                seconds[what] = sum([(await group.call("fingerprint", line))[0] for group in (trainer, generator)])
            best = {what: min(best.get(what, s), s) for what, s in seconds.items()}
    return best


def table_of(found: Mapping[str, Mapping[str, float]], nbytes: int) -> Table:
    rows = []
    for name, seconds in found.items():
        sync_s, memcpy_s = seconds["sync"], seconds["memcpy"]
        times = [f"{1e3 * seconds[what]:.0f}" for what in ("memcpy", "publish", "load", "sync")]
        speeds = [f"{nbytes / sync_s / 1e9:.1f}", f"{memcpy_s / sync_s:.0%}", f"{seconds['fingerprints'] / sync_s:.1%}"]
        rows.append([name, *times, *speeds, f"{1e3 * seconds['whole_fingerprints']:.0f}"])
    columns = ["transport", "memcpy, ms", "publish, ms", "load, ms", "whole sync, ms", "GB/s", "of memcpy"]
    columns += ["fingerprints / sync", "of all bytes, ms"]
    return Table(f"{nbytes / 1e6:.0f} MB of float32 weights, best of several rounds", columns, rows)


def main() -> None:
    given = arguments(__doc__)
    blocks, rounds = (1, 4) if given.quick else (BLOCKS, ROUNDS)
    nbytes = sum(w.numel() * 4 for w in weights(blocks).values())
    with tempfile.TemporaryDirectory() as folder:
        found = {name: anyio.run(measure, name, blocks, rounds, Path(folder)) for name in TRANSPORTS}
    table = table_of(found, nbytes)
    speeds = {what: [(0.0, nbytes / s[what] / 1e9) for s in found.values()] for what in ("memcpy", "sync")}
    chart = Chart(list(found), speeds, "GB/s: a memcpy, and a whole sync from publish to load", "transport")
    document = {"nbytes": nbytes, "rounds": rounds, "seconds": found}
    publish("transports", given.out, [table], document, chart)


if __name__ == "__main__":
    main()
