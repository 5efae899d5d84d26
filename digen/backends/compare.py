"""Do two backends make the same samples? One model, the same weights and noise, through a generator and a trainer.

Invariant: what is compared is what a run would use: the workers themselves, their samplers, their weight transport. A
number beyond its tolerance is a difference that training would feel as an off-policy sample. What has no noise at all
shows the model, log-probs show the steps, and the same after an update shows that new weights arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from digen import credit, plugins
from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.engines.placement import named_devices
from digen.engines.store import MemoryStore
from digen.observe.grid import side_by_side
from digen.presets import payload
from digen.types import MicroBatch, Prompt, Rollout

PROMPTS: Final = (Prompt(0, 'a sign that says "OPEN"'), Prompt(1, "a red cat on a blue chair"))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest absolute differences that count as rounding."""

    latents: float
    pixels: float
    log_prob: float


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "float32": Tolerance(1e-3, 1, 1e-5),
    "bfloat16": Tolerance(0.25, 16, 1e-2),
}
"""By the dtype of the forward pass: two of the same weights with other kernels differ by about a tenth of this."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference in one thing. `weights`: before or after an update; `step`: of denoising, if it is one."""

    weights: str
    what: str
    step: int | None
    found: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.found <= self.allowed  # not of NaN


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences, and where the picture is."""

    generator: str
    model: str
    differences: tuple[Difference, ...]
    picture: Path

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        rows = [{**asdict(each), "ok": each.ok} for each in self.differences]
        where = {"generator": self.generator, "model": self.model, "picture": str(self.picture)}
        return {**where, "ok": self.ok, "differences": rows}


def compare(config: RunConfig[Any], picture: Path) -> Comparison:
    """Sample with the generator and with diffusers, before and after an update, and draw both.

    `config`: a run on one rank each, such as `digen check-backends` makes. Raises what workers raise, such as SyncError
    where weights do not arrive.
    """
    store, tolerance = MemoryStore(), TOLERANCES[config.generator.dtype]
    with ExitStack() as exits:
        generator = _worker("generators", config.generator.backend, "generator-0", config, store, exits)
        trainer = _worker("trainers", config.trainer.backend, "trainer", config, store, exits)
        rounds = [_Round(config, generator, trainer, store, 0, "loaded", tolerance)]
        differences = list(rounds[0].differences())
        trainer.optimizer_step(1.0)
        published = trainer.push(1)
        if generator.pull(published) != published.fingerprint:
            differences.append(Difference("synced", "weights", None, 1, 0))
        rounds.append(_Round(config, generator, trainer, store, 1, "synced", tolerance))
        differences += rounds[1].differences()
        moved = _largest(rounds[0].pictures()[1].float(), rounds[1].pictures()[1].float())
        # Weights that changed nothing would arrive unseen.
        differences.append(Difference("synced", "pixels that the update left alone", None, float(moved == 0), 0))
        pictures = [each.pictures() for each in rounds]
    ours, theirs = (torch.cat([pair[k] for pair in pictures]).numpy() for k in (0, 1))
    captions = [f"{p.text}\n{each.weights} weights" for each in rounds for p in PROMPTS]
    side_by_side(ours, theirs, captions, picture, (config.generator.backend.rpartition(":")[2], "diffusers"))
    return Comparison(config.generator.backend, config.model.name, tuple(differences), picture)


def _worker(
    kind: plugins.Kind, name: str, group: str, config: RunConfig[Any], store: MemoryStore, exits: ExitStack
) -> Any:
    """A loaded worker of one rank in this process, which `exits` closes."""
    made = cast("Callable[..., Any]", plugins.find(kind, name))
    (device, *_) = named_devices(getattr(config, kind.removesuffix("s")).devices, 1)
    worker = made({**payload(config), "reward": {}}, WorkerContext(group, 0, 1, device, store))
    exits.callback(worker.close)
    worker.load()
    return worker


class _Round:
    """Both workers under one version of the weights."""

    def __init__(
        self,
        config: RunConfig[Any],
        generator: Any,
        trainer: Any,
        store: MemoryStore,
        version: int,
        weights: str,
        tolerance: Tolerance,
    ) -> None:
        self.config, self.workers, self.store = config, (generator, trainer), store
        self.version, self.weights, self.tolerance = version, weights, tolerance
        group = config.algorithm.samples_per_prompt
        self.microbatch = MicroBatch(version, 0, PROMPTS, group, config.seed)
        texts, ids = [p.text for p in PROMPTS], [p.id for p in PROMPTS]
        self.silent: list[tuple[Tensor, Tensor]] = []
        for worker in self.workers:
            with worker.on_device():
                latents, media = worker.sampler.evaluate(texts, ids, config.seed)
            self.silent.append((latents.cpu(), media.cpu()))

    def pictures(self) -> tuple[Tensor, Tensor]:
        """Samples without step noise: the generator's, the trainer's."""
        return self.silent[0][1], self.silent[1][1]

    def differences(self) -> Iterator[Difference]:
        """Everything that is compared; the trainer has the gradients of one micro-batch after it."""
        (latents, media), (own, drawn) = self.silent
        yield self._row("final latents", None, _largest(latents, own), self.tolerance.latents)
        yield self._row("pixels", None, _largest(media.float(), drawn.float()), self.tolerance.pixels)
        made = [self._rollout(worker) for worker in self.workers]
        ours, theirs = (self.store.get(each.shards[0].trajectory) for each in made)
        yield self._row("noise levels", None, _largest(ours["sigmas"], theirs["sigmas"]), 0)
        yield self._row("trained steps", None, _largest(ours["steps"].float(), theirs["steps"].float()), 0)
        for column, step in enumerate(theirs["steps"][0].tolist()):
            noisy = _largest(ours["next_latents"][:, column], theirs["next_latents"][:, column])
            yield self._row("noisy latents", step, noisy, self.tolerance.latents)
        yield from self._replayed(made[0])

    def _rollout(self, worker: Any) -> Rollout:
        rows = tuple(range(self.microbatch.num_samples))
        return Rollout(self.microbatch, self.version, (worker.generate(self.microbatch, self.version, rows),), "one")

    def _replayed(self, rollout: Rollout) -> Iterator[Difference]:
        """The generator's log-probs against those that the trainer finds for the same steps."""
        rewards = [float((7 * row) % 5) for row in range(self.microbatch.num_samples)]
        scored = credit.credit(rollout, rewards, self.config.algorithm)
        stats = self.workers[1].accumulate(scored, 1, float(len(rewards)), True)
        for name, stat in stats.items():
            if name.startswith("log_prob_gap/step"):
                step = int(name.removeprefix("log_prob_gap/step"))
                yield self._row("replayed log-prob", step, stat.high, self.tolerance.log_prob)

    def _row(self, what: str, step: int | None, found: float, allowed: float) -> Difference:
        return Difference(self.weights, what, step, found, allowed)


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.cpu() - b.cpu()).abs().max())
