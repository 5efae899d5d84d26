"""How fast new weights travel, by transport, against a plain memcpy of the same tensors in the same run.

    python benchmarks/transports.py

A trainer and a generator of one thread each, on one host. Every round measures a memcpy in both processes and one whole
sync as the driver sees it: publish, then load, each with its glance; then, alone, glances and whole fingerprints, which
both sides otherwise take beside other work (proofs). Of all rounds the best counts, for each. Once with the weights of
a large transformer, once with those of a thousand small adapters.
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
from digen.weights.fingerprint import fingerprint, glance

TRANSPORTS = ("inline", "shared_memory", "safetensors", "collective")
WIDTH = 2048
BLOCKS, ADAPTERS, ROUNDS = 3, 1000, 12


def weights(blocks: int, adapters: int, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Of a transformer: attention, feed-forward, biases and norms, 201 MB a block; adapters of 400 kB."""
    shapes = {f"attn.{name}": (width, width) for name in ("q", "k", "v", "out")}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    made = {f"{k}.lora_A.weight": torch.randn(49, 2048) for k in range(adapters)}
    for block in range(blocks):
        for name, shape in shapes.items():
            made[f"{block}.{name}.weight"] = torch.randn(shape)
            made[f"{block}.{name}.bias"] = torch.randn(shape[0])
        made[f"{block}.norm"] = torch.ones(width)
    return made


class Side:
    """A trainer or a generator, without a model."""

    def __init__(self, given: Mapping[str, Any], context: WorkerContext) -> None:
        self.transport, self.device = make_transport(rebuild(given["config"]), context), torch.device(context.device)
        made = weights(given["blocks"], given["adapters"], given.get("width", WIDTH))
        self.weights = {name: tensor.to(self.device) for name, tensor in made.items()}
        self.others = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def memcpy(self) -> float:
        began = time.perf_counter()
        for name, tensor in self.weights.items():
            if self.device.type == "cpu":
                np.copyto(self.others[name].numpy(), tensor.numpy())
            else:
                self.others[name].copy_(tensor)
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
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

    def proven(self) -> None:
        self.transport.proven()

    def glance(self, version: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        glance(self.weights, version)
        return time.perf_counter() - began

    def fingerprint(self, _: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        fingerprint(self.weights)
        return time.perf_counter() - began

    def close(self) -> None:
        self.transport.close()


async def measure(
    name: str, sizes: Mapping[str, int], rounds: int, folder: Path, devices: tuple[str, str] = ("cpu", "cpu")
) -> dict[str, float]:
    """Best seconds of everything, by its name. `devices`: of the trainer and of the generator."""
    engine = InlineEngine() if name == "inline" else ProcessEngine()
    kind = "inline" if name == "inline" else "process"
    settings = ["steps=1", f"engine.name={kind}", f"weights.transport={name}", f"weights.dir={folder}"]
    placed = dict(zip(("trainer", "generator"), devices, strict=True))
    settings += [f"{group}.devices={device}" for group, device in placed.items()]
    given = {"config": payload(resolve("flowgrpo", "glyph", None, settings, {})), **sizes}
    target = f"{Path(__file__)}:Side"
    specs = [WorkerSpec(group, target, given, threads=1, devices=device) for group, device in placed.items()]
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
            await generator.call("proven")
            engine.store.drop(published.weights)
            seconds = {"memcpy": memcpy, "publish": publish_s, "load": load_s, "sync": sync_s}
            for what, method in (("fingerprints", "glance"), ("whole_fingerprints", "fingerprint")):
                seconds[what] = sum([(await group.call(method, version))[0] for group in (trainer, generator)])
            best = {what: min(best.get(what, s), s) for what, s in seconds.items()}
    return best


def table_of(found: Mapping[str, Mapping[str, float]], nbytes: int, what_of: str) -> Table:
    rows = []
    for name, seconds in found.items():
        sync_s, memcpy_s = seconds["sync"], seconds["memcpy"]
        times = [f"{1e3 * seconds[what]:.0f}" for what in ("memcpy", "publish", "load", "sync")]
        speeds = [f"{nbytes / sync_s / 1e9:.1f}", f"{memcpy_s / sync_s:.0%}", f"{seconds['fingerprints'] / sync_s:.1%}"]
        rows.append([name, *times, *speeds, f"{1e3 * seconds['whole_fingerprints']:.0f}"])
    columns = ["transport", "memcpy, ms", "publish, ms", "load, ms", "whole sync, ms", "GB/s", "of memcpy"]
    columns += ["glances / sync", "proofs, ms"]
    return Table(f"{nbytes / 1e6:.0f} MB of float32 weights {what_of}, best of several rounds", columns, rows)


def main() -> None:
    given = arguments(__doc__)
    blocks, adapters, rounds = (1, 400, 4) if given.quick else (BLOCKS, ADAPTERS, ROUNDS)
    tables: list[Table] = []
    documents: list[Any] = []
    for of, sizes in (("of a transformer", (blocks, 0)), (f"in {adapters} adapters", (0, adapters))):
        nbytes = sum(w.numel() * 4 for w in weights(*sizes).values())
        with tempfile.TemporaryDirectory() as folder:
            asked = ({"blocks": sizes[0], "adapters": sizes[1]}, rounds, Path(folder))
            found = {name: anyio.run(measure, name, *asked) for name in TRANSPORTS}
        tables.append(table_of(found, nbytes, of))
        documents.append({"nbytes": nbytes, "rounds": rounds, "seconds": found})
    first, *more = documents
    speeds = {
        what: [(0.0, first["nbytes"] / s[what] / 1e9) for s in first["seconds"].values()] for what in ("memcpy", "sync")
    }
    chart = Chart(list(TRANSPORTS), speeds, "GB/s: a memcpy, and a whole sync from publish to load", "transport")
    publish("transports", given.out, tables, {**first, "more": more}, chart)


if __name__ == "__main__":
    main()
