"""What `gpu_kit.py` measures: each section works on one device, cpu or cuda, with the same code.

Invariant: a section that could not do something says so (`Found.problems`) and goes on; nothing is measured before the
device has ended what it was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import torch
from ablation import lost
from checkpoints import build
from common import MODES, Table, steady, waited
from gpu_scale import FAMILIES, TINY, Family, Scale
from real import Workers
from transports import measure, table_of, weights

from digen import gather
from digen.backends import noise
from digen.backends.training.local import LocalTrainer
from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.engines.process import ProcessEngine
from digen.engines.store import MemoryStore
from digen.presets import payload, resolve, step_prompts
from digen.run import specs
from digen.types import MicroBatch, Prompt, ScoredRollout, Stats

TEXTS = ("a cat", 'a sign that says "OPEN", next to nothing at all')
GUIDANCES = (1.0, 4.0)
LATENTS, PIXELS, RATIO, GAP = 1e-4, 1, 1e-5, 1e-3
"""Limits: of latents relative to the largest, of pixels in 1/255, of |ratio - 1| in float32, of the log-prob gap in
bfloat16 (`trainer.log_prob_gap`)."""
TAG_MODES = ("gap", "bts", "shared")
GB = 1e9


@dataclass(slots=True)
class Found:
    """What a section has so far."""

    tables: list[Table] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None
    """Called when there is more of it."""

    def table(self, title: str, columns: Sequence[str]) -> list[list[str]]:
        """A new table's rows, to be filled."""
        rows: list[list[str]] = []
        self.tables.append(Table(title, columns, rows))
        return rows


@dataclass(frozen=True, slots=True)
class Kit:
    """Where a section works, and until when."""

    folder: Path
    """Of the checkpoints, one folder for each recipe."""
    scale: Scale
    device: str
    deadline: float
    """On the monotonic clock."""

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def config(self, family: Family, *settings: str, side: int | None = None) -> RunConfig[Any]:
        """A run of the family's recipe with its checkpoint on this device."""
        scale, side = self.scale, side or self.scale.side
        own = [
            f"steps={scale.steps}", f"model.path={self.folder / family.recipe}", f"model.height={side}",
            f"model.width={side}", f"model.max_text_tokens={scale.tokens}", "model.embedding_cache_gb=0",
            f"sampling.num_steps={scale.num_steps}", f"sampling.eval_num_steps={scale.num_steps}",
            "sampling.guidance=1", "data.prompts_per_step=2", f"algorithm.samples_per_prompt={scale.samples}",
            "algorithm.noise={type: flow-sde, level: 0.7}", "algorithm.steps={type: all-but-last}",
            "algorithm.loss={type: clipped, clip: 1e-4, kl: 0}", "trainer.lora={rank: 32, alpha: 64}",
            "reward={jpeg-compressibility: {}}",
            *(f"{group}.devices={self.device}" for group in ("generator", "trainer")),
            *(f"{group}.batch_size={scale.update_batch}" for group in ("generator", "trainer")),
        ]  # fmt: skip
        return resolve("flowgrpo", family.model, None, [*own, *settings], {})

    def trainer(self, family: Family, *settings: str) -> LocalTrainer:
        """A trainer in this process, loaded."""
        config = self.config(family, "schedule.mode=colocated", *settings)
        worker = LocalTrainer(payload(config), WorkerContext("trainer", 0, 1, self.device, MemoryStore()))
        worker.load()
        return worker

    def microbatch(self, num_samples: int, texts: Sequence[str] = TEXTS[:1]) -> MicroBatch:
        prompts = tuple(Prompt(k, text) for k, text in enumerate(texts))
        return MicroBatch(0, 0, prompts, num_samples, 0)

    def finish(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> tuple[float, float | None]:
        """Seconds, and the peak of memory in GB while it ran; None: not known of a CPU."""
        self.finish()
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        work()
        self.finish()
        seconds = time.perf_counter() - began
        return seconds, torch.cuda.max_memory_allocated() / GB if self.device != "cpu" else None


def sections() -> dict[str, Callable[[Kit, Found], None]]:
    return {"build": checkpoints, "correctness": correctness, "speed": speed, "tag": two_processes, "sync": transports}


def each_family(kit: Kit, found: Found, what: Callable[[Kit, Family], Any]) -> Iterator[tuple[Family, Any]]:
    """One family after the other; what goes wrong with one is a problem of that one."""
    for family in FAMILIES:
        if kit.left_s() <= 0:
            found.problems.append(f"{family.recipe}: no time was left")
            continue
        try:
            result = what(kit, family)
        except Exception as error:  # noqa: BLE001 - reported, and the exit code says so
            found.problems.append(f"{family.recipe}: {type(error).__name__}: {error}")
        else:
            yield family, result
        found.save()
        if kit.device != "cpu":
            torch.cuda.empty_cache()


def checkpoints(kit: Kit, found: Found) -> None:
    """Random weights in files of bfloat16, as published models have them (float32 where the device is a CPU)."""
    dtype = torch.float32 if kit.device == "cpu" else torch.bfloat16

    def one(kit: Kit, family: Family) -> tuple[int, float]:
        began = time.perf_counter()
        count = build(family.recipe, kit.scale.sizes[family.recipe], kit.folder / family.recipe, kit.device, dtype)
        return count, time.perf_counter() - began

    rows = found.table("Random weights", ["family", "million parameters", "s"])
    for family, (count, seconds) in each_family(kit, found, one):
        found.results[family.recipe] = {"parameters": count, "seconds": seconds}
        rows.append([family.recipe, f"{count / 1e6:.1f}", f"{seconds:.1f}"])


# Correctness ----------------------------------------------------------------------------------------------------------


def correctness(kit: Kit, found: Found) -> None:
    """Against diffusers' own pipeline, and against itself: the ratio before the first update."""
    rows = found.table("Correctness", ["family", "check", "found", "limit"])
    for family, checks in each_family(kit, found, checks_of):
        found.results[family.recipe] = [
            {"check": name, "value": value, "limit": limit} for name, value, limit in checks
        ]
        for name, value, limit in checks:
            rows.append([family.recipe, name, f"{value:.1e}", f"{limit:.0e}"])
            if not value <= limit:  # NaN too
                found.problems.append(f"{family.recipe}: {name} is {value:.1e}, limit {limit:.0e}")


Check = tuple[str, float, float]


def checks_of(kit: Kit, family: Family) -> list[Check]:
    exact, small = kit.trainer(family, f"trainer.batch_size={len(TEXTS)}"), "trainer.dtype=bfloat16"
    checks = [check for guidance in GUIDANCES for check in parity(kit, family, exact, guidance)]
    for width in (1, 0):
        stats = updated(exact, kit.microbatch(kit.scale.samples), width)
        checks.append((f"ratio from 1, float32, tsp={width}", stats["ratio_error"].high, RATIO))
    del exact
    rounded = kit.trainer(family, small)
    for width in (1, 0):
        stats = updated(rounded, kit.microbatch(kit.scale.samples), width)
        checks.append((f"log-prob gap, bfloat16, tsp={width}", stats["log_prob_gap"].high, GAP))
    del rounded
    replayed = kit.trainer(family, small, "algorithm.old_log_prob=replay")
    stats = updated(replayed, kit.microbatch(kit.scale.samples), 0)
    return [*checks, ("ratio from 1, bfloat16, replay", stats["ratio_error"].high, 0.0)]


@torch.no_grad()
def parity(kit: Kit, family: Family, worker: LocalTrainer, guidance: float) -> list[Check]:
    """Samples without noise in float32 against diffusers' pipeline from the same files and the same first latents."""
    sampling = worker.sampler.sampling.model_copy(update={"eval_guidance": guidance, "negative_prompt": "blurry"})
    sampler = replace(worker.sampler, sampling=sampling)
    latents, media = sampler.evaluate(TEXTS, range(len(TEXTS)), 4)
    pipe: Any = worker.model.pipeline_class.from_pretrained(kit.folder / family.recipe, dtype=torch.float32)
    pipe.to(kit.device)
    pipe.set_progress_bar_config(disable=True)
    identities = [(k, 0) for k in range(len(TEXTS))]
    first = noise.draw(4, noise.EVALUATION, identities, noise.INITIAL, worker.model.latent_shape)
    call = {
        "prompt": list(TEXTS), "height": kit.scale.side, "width": kit.scale.side, family.guidance: guidance,
        "num_inference_steps": kit.scale.num_steps, "max_sequence_length": kit.scale.tokens,
        "latents": first.to(kit.device), **({"negative_prompt": ["blurry"] * len(TEXTS)} if guidance > 1 else {}),
    }  # fmt: skip
    expected = pipe(**call, output_type="latent").images
    pixels = torch.from_numpy(pipe(**call, output_type="np").images).mul(255).round()
    apart = float((latents - expected).abs().max() / expected.abs().max())
    off = float((media.cpu().float() - pixels).abs().max())
    return [
        (f"latents, guidance {guidance:g}", apart, LATENTS),
        (f"pixels, guidance {guidance:g}", off, PIXELS),
    ]


def scored(worker: LocalTrainer, microbatch: MicroBatch) -> ScoredRollout:
    """Samples of the micro-batch, with advantages that add up to nothing."""
    rows = tuple(range(microbatch.num_samples))
    shard = worker.generate(microbatch, worker.version, rows)
    rollout = gather.rollout(microbatch, worker.version, rows, [shard], "trainer")
    advantages = tuple(1.0 if row % 2 else -1.0 for row in rows)
    return ScoredRollout(rollout, advantages, advantages, (True,) * len(rows))


def updated(worker: LocalTrainer, microbatch: MicroBatch, width: int) -> Stats:
    """What an update of these samples reports."""
    return worker.accumulate(scored(worker, microbatch), width, float(microbatch.num_samples), True)


# Speed and memory -----------------------------------------------------------------------------------------------------


def speed(kit: Kit, found: Found) -> None:
    """Generating against updating, and TSP: seconds and memory."""
    samples, columns = kit.scale.samples, ["s of a sample", "peak GB"]
    generating = found.table(f"Generating {samples} samples, bfloat16", ["family", "batch", *columns])
    updating = found.table(f"Updating with {samples}, {kit.scale.update_batch} a pass", ["family", "tsp", *columns])
    for family, (generated, updates) in each_family(kit, found, speeds_of):
        found.results[family.recipe] = {"generate": generated, "update": updates}
        generating += [[family.recipe, *cells(one)] for one in generated]
        updating += [[family.recipe, *cells(one)] for one in updates]


Measured = Mapping[str, Any]


def cells(one: Measured) -> list[str]:
    seconds, peak = one["seconds"], one["peak_gb"]
    return [
        one["what"],
        "out of memory" if seconds is None else f"{seconds:.4f}",
        "" if peak is None else f"{peak:.2f}",
    ]


def speeds_of(kit: Kit, family: Family) -> tuple[list[Measured], list[Measured]]:
    worker, samples = kit.trainer(family, "trainer.dtype=bfloat16"), kit.scale.samples
    microbatch, whole = kit.microbatch(samples), worker.sampler
    generated = []
    for size in kit.scale.batches:
        worker.sampler = replace(whole, batch_size=size)
        scored(worker, kit.microbatch(size))  # kernels are chosen, memory is taken
        generated.append(one_of(kit, f"{size}", samples, lambda: scored(worker, microbatch)))
    batch = scored(worker, microbatch)

    def update(width: int) -> None:
        worker.accumulate(batch, width, float(samples), True)
        worker.optimizer.zero_grad()

    update(kit.scale.widths[0])
    updates = [one_of(kit, f"{width or 'all'}", samples, lambda w=width: update(w)) for width in kit.scale.widths]
    worker.checkpoint_activations()
    updates.append(one_of(kit, "all, checkpointed", samples, lambda: update(0)))
    return generated, updates


def one_of(kit: Kit, what: str, samples: int, work: Callable[[], Any]) -> Measured:
    """Seconds for a sample and peak memory; None where memory did not suffice or no time was left."""
    if kit.left_s() <= 0:
        return {"what": f"{what} (no time left)", "seconds": None, "peak_gb": None}
    try:
        seconds, peak = kit.timed(work)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"what": what, "seconds": None, "peak_gb": None}
    return {"what": what, "seconds": seconds / samples, "peak_gb": peak}


# Two processes on one device ------------------------------------------------------------------------------------------


def two_processes(kit: Kit, found: Found) -> None:
    """A generator and a trainer that share the device, with and without help of the trainer and of the generator."""
    columns = ["family", "mode", "step s", "busy generator / trainer", "waits"]
    rows = found.table("Two processes on one device", columns)
    for family, modes in each_family(kit, found, lambda kit, family: anyio.run(modes_of, kit, family)):
        found.results[family.recipe] = modes
        for mode, one in modes.items():
            busy = " / ".join(f"{share:.0%}" for share in one["busy"].values())
            rows.append([family.recipe, mode, f"{one['step_s']:.2f}", busy, lost(one)])


async def modes_of(kit: Kit, family: Family) -> dict[str, Any]:
    small = ["generator.dtype=bfloat16", "trainer.dtype=bfloat16", "trainer.tsp=4"]
    groups_of = ["data.prompts_per_step=4", f"algorithm.samples_per_prompt={max(2, kit.scale.samples // 4)}"]
    base = ["algorithm.steps={type: random-fraction, fraction: 0.4}", *groups_of, *small]
    side = max(TINY.side, kit.scale.side // 2)
    engine, modes = ProcessEngine(), {}
    every = kit.config(family, *base, "schedule.assist=both", "schedule.tag=bts", side=side)
    async with engine.open(specs(every, kit.folder)) as groups:
        workers = Workers(engine, groups)
        await workers.begin([prompt.text for prompt in step_prompts(every).prompts[:4]])
        for mode in (TAG_MODES[-1], *TAG_MODES):  # the first one finds out what everything costs
            if kit.left_s() <= 0:
                break
            schedule = [
                f"schedule.{key}={value}" for key, value in {"tag": "none", "assist": "none", **MODES[mode]}.items()
            ]
            seen = await workers.run(kit.config(family, *base, *schedule, side=side))
            settled = steady(seen, 1)
            modes[mode] = {"step_s": settled.step_s, "busy": dict(settled.busy), "waits": waited(seen, 1)}
    return modes


# Weights on their way -------------------------------------------------------------------------------------------------


def transports(kit: Kit, found: Found) -> None:
    """Every transport, from the trainer's device to a generator's."""
    scale, seconds = kit.scale, {}
    sizes = {"blocks": scale.blocks, "adapters": 0, "width": scale.width}
    other = kit.device if kit.device == "cpu" or torch.cuda.device_count() < 2 else "cuda:1"
    for name in scale.transports:
        if name == "collective" and kit.device == other != "cpu":
            found.results["collective"] = "left out: NCCL wants a GPU for each process"
            continue
        devices = (kit.device, kit.device if name == "inline" else other)
        try:
            seconds[name] = anyio.run(measure, name, sizes, scale.rounds, kit.folder, devices)
        except Exception as error:  # noqa: BLE001 - reported, and the exit code says so
            found.problems.append(f"{name}: {type(error).__name__}: {error}")
    found.results["seconds"] = seconds
    nbytes = sum(w.numel() * 4 for w in weights(**sizes).values())
    found.tables.append(table_of(seconds, nbytes, f"of {scale.blocks} blocks"))


@contextmanager
def on(device: str) -> Iterator[None]:
    """This thread's CUDA device."""
    if device == "cpu":
        yield
    else:
        with torch.cuda.device(device):
            yield
