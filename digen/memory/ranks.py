"""What each rank of a run holds, by kind and at its worst moment, as the backends keep it. Pure: sizes in, bytes out.

Invariant: every number follows from what `digen/backends/` does with a tensor of that size: what is divided over ranks,
what is whole, in which dtype, and what is there at the same time. Memory of libraries (CUDA's context, NCCL's and
gloo's buffers, fragments) is not in it. Paper sections 3.2.2 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from digen.config import GroupConfig, RunConfig
from digen.memory.sizes import Sizes, Weight
from digen.schedule.tsp import MARGIN, widest

_BLOCK = 256
"""Elements of a block of 8-bit moments, which has a scale in float32; smaller tensors than 16 of them stay float32."""
DEEPSPEED_LIVE = 1_000_000_000
"""ZeRO 3: parameters that stay gathered at most, as its settings have it if nobody says otherwise."""
DEEPSPEED_BUCKET = 50_000_000
"""Elements of its buffer of gradients (`digen/backends/training/deepspeed.py`: BUCKET)."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank of a group."""

    group: str
    ranks: int
    """Of the whole run that are like it."""
    parts: Mapping[str, int]
    """What there is, by kind; not all at the same time."""
    moments: Mapping[str, int]
    """All that there is at once while it does something, on its device."""
    standing: int
    """What is on its device between calls, before a step's gradients."""
    host: int = 0
    """In host memory."""
    width: int = 0
    """Timesteps of a pass; 0 for those that train nothing."""

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    @property
    def when(self) -> str:
        """What it does when it has most."""
        return max(self.moments, key=lambda name: self.moments[name])

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "group": self.group,
            "ranks": self.ranks,
            "bytes": dict(self.parts),
            "moments": dict(self.moments),
            "peak": self.peak,
            "host": self.host,
            "tsp": self.width,
        }


def generator_memory(config: RunConfig[Any], sizes: Sizes) -> RankMemory:
    """A generator's rank on one of its devices: the whole model, or its part where the engine divides it."""
    group, weights = config.generator, sizes.weights
    kept = ceil((weights.nbytes + weights.buffers) / group.devices_per_rank)
    sampling = _sampling(config, group, sizes)
    parts = {"parameters": kept, "decoder": sizes.decoder, "text encoders": sizes.encoders, **sampling}
    standing = kept + sizes.decoder
    moments = {"encode": sizes.encoders, "generate": standing + sum(sampling.values())}
    width = 0
    if config.schedule.generators_help:
        width, trained = _width(config, group, None, 0), sum(w.nbytes for w in weights.trained)
        parts |= {"base copy": _base(config, kept), "gradients": trained}
        parts |= _training(config, group, sizes, width)
        moments["update"] = standing + sum(parts[k] for k in ("base copy", "gradients", "activations", "trajectories"))
    offloaded = standing if group.offload_between_calls else 0
    number = group.ranks * group.replicas
    return RankMemory("generator", number, parts, moments, standing - offloaded, offloaded, width)


def trainer_memory(config: RunConfig[Any], sizes: Sizes, memory: float | None = None) -> RankMemory:
    """A trainer's rank; `memory` of its device decides the width of `trainer.tsp=auto`."""
    group, held = config.trainer, _Divided(config, sizes)
    generates = config.schedule.mode == "colocated" or config.schedule.trainer_generates
    decoder = sizes.decoder if generates else 0
    parts = {"parameters": held.parameters, "base copy": held.base, "optimizer": held.optimizer, "copies": held.copies}
    standing = sum(parts.values())
    parts |= {"gradients": held.gradients, "gathered": held.gathered}
    fixed = standing + held.gradients + held.gathered
    width = _width(config, group, None if memory is None else memory - fixed, _per_step(config, group, sizes))
    parts |= _training(config, group, sizes, width)
    moments = {
        "load": held.loading + decoder,
        "update": fixed + parts["activations"] + parts["trajectories"],
        "step": standing + held.summed + held.stepping,
        "publish": standing + held.publishing,
    }
    if generates:
        sampling = _sampling(config, group, sizes)
        parts |= {"decoder": decoder, "text encoders": sizes.encoders, "generation": sum(sampling.values())}
        parts |= {"generation copy": held.copy}
        moments["encode"] = sizes.encoders
        moments["generate"] = standing + decoder + held.gradients + held.generating + sum(sampling.values())
    return RankMemory("trainer", group.ranks, parts, moments, standing, held.host, width)


# What is divided ------------------------------------------------------------------------------------------------------


class _Divided:
    """What a trainer's rank has of weights and what goes with them, by backend."""

    def __init__(self, config: RunConfig[Any], sizes: Sizes) -> None:
        trainer, weights = config.trainer, sizes.weights
        self.config, self.weights, self.trainer = config, weights, trainer
        self.deepspeed, self.fsdp = trainer.backend == "deepspeed", trainer.backend == "fsdp"
        self.stage = trainer.zero_stage or 2
        self.whole = weights.nbytes + weights.buffers
        self.trained = sum(w.nbytes for w in weights.trained)
        self.own = sum(self._part(w) for w in weights.trained)
        """Of trained weights what this rank steps."""
        self.offload = trainer.cpu_offload
        self.parts_offloaded = self.offload and (self.fsdp or (self.deepspeed and self.stage == 3))

    def _part(self, weight: Weight) -> int:
        """Of a weight that is divided: whole rows with FSDP, elements with DeepSpeed."""
        ranks = self.trainer.shard_ranks or self.trainer.ranks
        if self.fsdp:
            rows = weight.shape[0] if weight.shape else 1
            return ceil(rows / ranks) * prod(weight.shape[1:]) * weight.itemsize
        return ceil(weight.numel / ranks) * weight.itemsize

    @property
    def _kept(self) -> int:
        """Of all weights, wherever it is: what divides parameters keeps a part of each."""
        if self.fsdp or (self.deepspeed and self.stage == 3):
            return sum(self._part(w) for w in self.weights.all) + self.weights.buffers
        return self.whole

    @property
    def parameters(self) -> int:
        """DeepSpeed steps a second copy of the rank's part."""
        kept = self.weights.buffers if self.parts_offloaded else self._kept
        return kept + (self.own if self.deepspeed and not self.offload else 0)

    @property
    def base(self) -> int:
        return _base(self.config, self._kept if not self.parts_offloaded else self.weights.buffers)

    @property
    def _moments(self) -> int:
        numbers = [self._part(w) // w.itemsize for w in self.weights.trained]
        match self.trainer.optimizer:
            case "sgd":
                return 0
            case "adamw-8bit":
                return sum(2 * (n + 4 * ceil(n / _BLOCK)) if n >= 16 * _BLOCK else 8 * n for n in numbers)
        return 2 * self.own

    @property
    def optimizer(self) -> int:
        return 0 if self.offload else self._moments

    @property
    def _copies(self) -> int:
        """Of the trained weights: their average, the old policy, where `--init-from` began."""
        algorithm, started = self.config.algorithm, self.config.checkpoint.init_from is not None
        start = started and algorithm.loss.needs_reference and self.trainer.lora is not None
        return self.own * [self.trainer.ema is not None, algorithm.has_old_policy, start].count(True)

    @property
    def copies(self) -> int:
        return 0 if self.offload else self._copies

    @property
    def gradients(self) -> int:
        """Of trained weights, until the step: whole ones where they are summed over ranks once a step."""
        if self.deepspeed:
            bucket = 4 * min(self.trained // 4, DEEPSPEED_BUCKET)
            kept = self.trained if self.stage == 1 else self.own * (not self.offload)
            return kept + bucket
        if self.fsdp and self.trainer.sync_gradients == "pass":
            return self.own * (not self.offload)
        return self.trained

    @property
    def summed(self) -> int:
        """Of the gradients, when the step begins and all are summed; ZeRO 3 has its buffers still, and a flat copy."""
        if self.deepspeed and self.stage == 3 and not self.offload:
            return self.gradients + self.own
        return self.own * (not self.offload) if self.fsdp or self.deepspeed else self.gradients

    @property
    def gathered(self) -> int:
        """Parameters on their way in a pass: what is outside of blocks, a block and the next one."""
        width = 2 if self.trainer.gather_dtype else None
        if self.fsdp:
            units = [sum(w.numel * (width or w.itemsize) for w in unit) for unit in self.weights.units]
            return units[-1] + 2 * max(units[:-1], default=0)
        if self.deepspeed and self.stage == 3:
            share = min(1.0, DEEPSPEED_LIVE / sum(w.numel for w in self.weights.all))
            return int(share * self.weights.nbytes)
        return 0

    @property
    def loading(self) -> int:
        """FSDP's ranks read their parts alone; the others load the model and, for a KL term, copy it."""
        return self.parameters + self.base if self.fsdp else self.whole + _base(self.config, self.whole)

    @property
    def stepping(self) -> int:
        """The weights before the step, and how far they went; DeepSpeed squares that too."""
        return 0 if self.offload else self.own * (3 if self.deepspeed else 2)

    @property
    def publishing(self) -> int:
        """Whole weights on their way to generators, on rank 0."""
        if self.fsdp:
            return max((w.nbytes for w in self.weights.trained), default=0)
        if self.deepspeed and self.stage == 3:
            return self.trained
        return self.trained if self.config.weights.transport == "collective" else 0

    @property
    def copy(self) -> int:
        return self.whole if self.fsdp and self.trainer.generate_with == "copy" else 0

    @property
    def generating(self) -> int:
        """What weights need on top while samples are made here."""
        if not self.fsdp:
            return self.gathered
        width = 2 if self.trainer.gather_dtype else None
        whole = sum(w.numel * (width or w.itemsize) for w in self.weights.all)
        return {"sharded": self.gathered, "gathered": whole, "copy": self.copy}[self.trainer.generate_with]

    @property
    def host(self) -> int:
        parts = self._kept + _base(self.config, self._kept) if self.parts_offloaded else 0
        stepped = self._moments + self._copies + 2 * self.own
        return parts + (stepped if self.offload else 0) + self.copy


def _base(config: RunConfig[Any], kept: int) -> int:
    """A frozen copy of full weights, for a KL to where training began; adapters are switched off instead."""
    return kept if config.algorithm.loss.needs_reference and config.trainer.lora is None else 0


# What a pass needs ----------------------------------------------------------------------------------------------------


def _trained_steps(config: RunConfig[Any]) -> int:
    count: int = config.algorithm.steps.num_trained(config.sampling.num_steps)
    return count


def _rows(per_prompt: int, config: RunConfig[Any], group: GroupConfig) -> int:
    """A rank's samples of a micro-batch."""
    return ceil(per_prompt * config.schedule.prompts_per_microbatch / group.ranks)


def _batch(per_prompt: int, config: RunConfig[Any], group: GroupConfig) -> int:
    """Samples of a pass."""
    return min(group.batch_size or ceil(per_prompt / group.ranks), _rows(per_prompt, config, group))


def _activations(config: RunConfig[Any], group: GroupConfig, sizes: Sizes, width: int) -> int:
    rows = _batch(config.algorithm.kept_per_prompt(), config, group) * width
    return sizes.pass_bytes(rows, trained=True, checkpointed=config.trainer.activation_checkpointing)


def _per_step(config: RunConfig[Any], group: GroupConfig, sizes: Sizes) -> int:
    """What a further timestep of a pass needs."""
    return _activations(config, group, sizes, 2) - _activations(config, group, sizes, 1)


def _width(config: RunConfig[Any], group: GroupConfig, free: float | None, per_step: int) -> int:
    """Timesteps of a pass. `auto`: all where the device is a CPU, else what fits; 1 where nobody says what is free."""
    all_steps, wanted = _trained_steps(config), config.trainer.tsp
    if wanted != "auto":
        return min(wanted or all_steps, all_steps)
    if group.devices == "cpu":
        return all_steps
    return 1 if free is None else min(widest((1 - MARGIN) * free, per_step, 1), all_steps)


def _training(config: RunConfig[Any], group: GroupConfig, sizes: Sizes, width: int) -> dict[str, int]:
    """Of an update: what autograd keeps, and the samples of the micro-batch that it is about."""
    rows = _rows(config.algorithm.kept_per_prompt(), config, group)
    prompts = config.schedule.prompts_per_microbatch
    samples = rows * _trained_steps(config) * sizes.num_latents * sizes.latents
    batch = _batch(config.algorithm.kept_per_prompt(), config, group)
    pass_rows = batch * width * (sizes.num_latents * sizes.latents + sizes.conditioning)
    return {
        "activations": _activations(config, group, sizes, width),
        "trajectories": samples + prompts * sizes.conditioning + pass_rows,
    }


def _sampling(config: RunConfig[Any], group: GroupConfig, sizes: Sizes) -> dict[str, int]:
    """Of a generate call: the larger of a denoising step and the decoder; what is kept of samples; conditionings.

    What is kept is there twice while it is put together; conditionings by prompt and by sample.
    """
    per_prompt = config.algorithm.samples_per_prompt
    rows, batch = _rows(per_prompt, config, group), _batch(per_prompt, config, group)
    prompts = config.schedule.prompts_per_microbatch
    kept = _trained_steps(config) * sizes.num_latents * sizes.latents + sizes.media
    return {
        "sampling": max(sizes.pass_bytes(batch, trained=False), sizes.decode_bytes(batch)),
        "samples": 2 * rows * kept + (prompts + batch) * sizes.conditioning,
    }


def rollouts(config: RunConfig[Any], sizes: Sizes) -> int:
    """Bytes in the host's shared memory of one step's samples, until it is over."""
    prompts: int = config.data.prompts_per_step
    per_prompt: int = config.algorithm.samples_per_prompt
    kept = _trained_steps(config) * sizes.num_latents * sizes.latents + sizes.media
    return prompts * (per_prompt * kept + sizes.conditioning)
