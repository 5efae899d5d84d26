"""What every torch worker can do: sample and score with the model's own diffusers modules, and take new weights.

Invariant: what `generate` returns depends on weights and identities only; the weights' version is checked, never
assumed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from digen import plugins
from digen.algos.base import Algorithm
from digen.backends import attention
from digen.backends.conditions import Conditions
from digen.backends.offload import Offloaded, give_back
from digen.backends.sampler import Sampler
from digen.config import GroupConfig
from digen.engines.base import WorkerContext
from digen.models.base import LOADING, ModelFamily
from digen.observe.video import draw, video_format
from digen.presets import rebuild
from digen.rewards.base import RewardSet
from digen.types import MicroBatch, Prompt, Published, Ref, Rollout, Scores, Shard, Version
from digen.weights.base import WeightTransport, load, make_transport
from digen.weights.state import load_trainable, read_export, trainable

logger = logging.getLogger(__name__)

NO_VERSION: Version = -1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class TorchWorker(ABC):
    """The model in this process, any family: the base of generators and of trainers, which sample too (TAG)."""

    in_lockstep = False
    """Whether all ranks must make the same forward passes, whatever rows they have (their weights are sharded)."""
    loads_empty = False
    """Whether the transformer is loaded without its weights (`ModelFamily.empty`), which the worker then reads."""
    offloaded: Offloaded | None = None
    """What is on the device during a call alone."""

    def __init__(self, payload: Mapping[str, Any], context: WorkerContext) -> None:
        self.config = rebuild(payload)
        self.context = context
        self.algorithm: Algorithm = self.config.algorithm
        self.version: Version = 0
        self.num_stored = 0
        if self.placement.attention is not None:
            self.check_attention(self.placement.attention)

    def check_attention(self, name: str) -> None:
        """Raises ConfigError for a kernel that this worker cannot have; called before anything is loaded."""
        attention.check(name)

    @property
    @abstractmethod
    def placement(self) -> GroupConfig:
        """The section of the config that speaks of this worker's group."""

    @property
    def scores_here(self) -> bool:
        """Whether this worker is asked to score."""
        return self.config.scoring.devices is None

    @property
    def generates_here(self) -> bool:
        """Whether this worker is asked to generate: else it needs neither text encoder nor decoder."""
        return True

    @property
    def samples_in_lockstep(self) -> bool:
        """The same for the passes of `generate`."""
        return self.in_lockstep

    def encode(self, prompts: Sequence[str]) -> None:
        """Before `load`: have what these prompts are encoded to on the disk, and no text encoder left in memory."""
        if not self.generates_here:
            return
        sampling, model = self.config.sampling, self.new_model()
        guided = max(sampling.guidance, sampling.eval_guidance) > 1 and not model.embeds_guidance
        negative = [sampling.negative_prompt] if guided else []
        Conditions(model, self.context.device, self.kept_dtype).ahead([*negative, *prompts])
        if self.context.device.startswith("cuda"):
            del model
            torch.cuda.empty_cache()

    def load(self) -> None:
        with LOADING:
            self._load_model()
            self._load_rewards()
        self.offload()

    def _load_model(self) -> None:
        self.model = self.new_model()
        self.model.empty = self.loads_empty
        here = self.generates_here
        self.model.load(self.context.device, self.kept_dtype, text_encoder=False, tokenizer=here, decoder=here)
        self.set_attention(self.model.transformer)
        self.make_trainable(self.model)
        self.sampler = Sampler(
            self.model,
            self.algorithm,
            self.config.sampling,
            DTYPES[self.placement.dtype],
            self.placement.batch_size or -(-self.algorithm.samples_per_prompt // self.context.world_size),
            Conditions(self.model, self.context.device, self.kept_dtype),
        )

    def new_model(self) -> ModelFamily:
        """The configured family, nothing of it loaded."""
        return cast("type[ModelFamily]", plugins.find("models", self.config.model.name))(self.config.model)

    @property
    def kept_dtype(self) -> torch.dtype:
        """Full weights are kept in float32 and cast by autocast; a frozen base under adapters may be kept small."""
        dtype = DTYPES[self.placement.dtype]
        return dtype if dtype == torch.float64 or self.config.trainer.lora else torch.float32

    def set_attention(self, transformer: nn.Module) -> None:
        """Have its attention run on the kernel that is asked for."""
        if self.placement.attention is not None:
            attention.use(transformer, self.placement.attention)

    def make_trainable(self, model: ModelFamily) -> None:
        """Of the transformer, what is trained: adapters on its frozen weights, or these."""
        if lora := self.config.trainer.lora:
            add_adapters(model, lora.rank, lora.alpha, lora.target_modules)
        else:
            model.transformer.requires_grad_(True)

    def _load_rewards(self) -> None:
        if self.scores_here:
            threads = self.placement.threads or torch.get_num_threads()
            self.rewards = RewardSet(self.config.reward, self.config.scoring.timeout_s, threads, self.context.device)
            self.rewards.load()

    @property
    def decoder(self) -> nn.Module | None:
        """What makes media of latents; None where none is loaded."""
        return cast("nn.Module | None", self.model.pipeline.components.get("vae"))

    def resting(self) -> Iterable[nn.Module | None]:
        """What is in host memory between the calls that sample."""
        return ()

    def offload(self) -> None:
        """Take that off the device: the last thing when a worker loads."""
        if modules := list(filter(None, self.resting())):
            self.offloaded = Offloaded(modules, self.model.device)
        self.make_room()

    def make_room(self) -> None:
        """Leave the device's free memory to the other group, where they share it."""
        if self.config.generator.offload_between_calls:
            give_back(self.model.device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """What a call that samples runs in: whatever must happen before and after it, on all ranks.

        Raises SyncError when it has run with other weights than the trainer's: nothing leaves it then (rule R15).
        """
        try:
            with self.offloaded.loaded() if self.offloaded else nullcontext():
                yield
        finally:
            self.make_room()
        if "transport" in vars(self):
            self.transport.proven()

    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many prompts are longer than the text encoder's limit."""
        return self.model.num_cut(prompts)

    def generate(self, microbatch: MicroBatch, version: Version, rows: tuple[int, ...]) -> Shard:
        if version != self.version:
            raise RuntimeError(f"asked to generate under version {version} but the weights here are {self.version}")
        mine = rows[self.context.rank :: self.context.world_size]
        share = -(-len(rows) // self.context.world_size)
        extra = (0,) * (share - len(mine)) if self.samples_in_lockstep else ()  # sampled after the own, and left there
        with self.on_device():  # on ranks without rows too: others may wait for their part of the weights
            made = self.sampler.rollout(microbatch, (*mine, *extra)) if mine or extra else None
        if made is None:
            empty = self._store("empty", {})
            return Shard((), empty, empty)
        trajectory, media = made
        return Shard(mine, self._store("trajectory", trajectory), self._store("media", {"media": media}))

    def _store(self, name: str, tensors: Mapping[str, Tensor]) -> Ref:
        self.num_stored += 1
        key = f"{self.context.group}/{self.context.rank}/{self.num_stored}/{name}"
        return self.context.store.put(key, {k: v.detach().cpu().contiguous() for k, v in tensors.items()})

    def score(self, rollout: Rollout) -> Scores:
        microbatch = rollout.microbatch
        rows = microbatch.rows(self.context.rank, self.context.world_size)
        if not rows:
            return Scores(tuple(self.config.reward), (), ())
        media = self._media(rollout, rows)
        prompts = [microbatch.identity(row)[0] for row in rows]
        values = self.rewards.score(media.numpy(), [p.text for p in prompts], [p.metadata for p in prompts])
        return Scores(tuple(values), rows, tuple(zip(*values.values(), strict=True)))

    def _media(self, rollout: Rollout, rows: Sequence[int]) -> Tensor:
        """Media of these rows, in this order, whichever shards they lie in."""
        found = {}
        for shard in rollout.shards:
            if set(shard.rows) & set(rows):
                media = self.context.store.get(shard.media)["media"]
                found.update({row: media[k] for k, row in enumerate(shard.rows)})
        return torch.stack([found[row] for row in rows])

    def draw(self, rollout: Rollout, rewards: tuple[float, ...], path: Path) -> None:
        if self.context.rank != 0:
            return
        microbatch = rollout.microbatch
        rows = range(microbatch.num_samples)
        captions = [f"{microbatch.identity(row)[0].text}\nreward {rewards[row]:.2f}" for row in rows]
        media = self._media(rollout, rows)
        columns, kind = min(8, microbatch.samples_per_prompt), video_format(self.config)
        draw(media.numpy(), captions, path, columns, kind, self.model.frame_rate)

    def pull(self, published: Published) -> str:
        self.version = NO_VERSION  # until all is loaded: of half of it nothing may be generated
        loaded = load(self.transport, published, trainable(self.model.transformer))
        self.version = published.version
        return loaded

    @cached_property
    def transport(self) -> WeightTransport:
        """This worker's side of the way that new weights take."""
        return make_transport(self.config, self.context)

    def close(self) -> None:
        """End what runs beside the calls; the engine does so when it closes."""
        if "transport" in vars(self):
            self.transport.close()

    def restore(self, path: Path) -> None:
        """Load trainable weights that a trainer's `save` wrote."""
        load_trainable(self.model.transformer, load_file(path / "weights.safetensors"))

    def load_weights(self, path: Path, version: Version = 0) -> None:
        """Load trained weights from a checkpoint's file or an exported folder; from now on they are `version` here.

        Raises SyncError when they do not fit.
        """
        module = self.model.transformer
        load_trainable(module, read_export(path, module) if path.is_dir() else load_file(path))
        self.version = version

    def evaluate(self, prompts: tuple[Prompt, ...], seed: int, score: bool) -> tuple[Scores | None, Ref]:
        """One noise-free sample per prompt: its scores, if wanted, and where `media` (K, ...) is."""
        negatives = [p.negative for p in prompts]
        with self.on_device():
            _, media = self.sampler.evaluate([p.text for p in prompts], [p.id for p in prompts], seed, negatives)
        scores = None
        if score:
            values = self.rewards.score(media.cpu().numpy(), [p.text for p in prompts], [p.metadata for p in prompts])
            rows = tuple(range(len(prompts)))
            scores = Scores(tuple(values), rows, tuple(zip(*values.values(), strict=True)))
        return scores, self._store("evaluation", {"media": media})


def add_adapters(model: ModelFamily, rank: int, alpha: float, targets: Sequence[str] | None) -> None:
    """Put LoRA adapters (peft, float32, same random start on every worker) on the model's linear layers.

    Raises ConfigError naming the patterns and some real module names when they match nothing.
    """
    from peft import LoraConfig

    from digen.errors import ConfigError

    patterns = list(targets or model.lora_targets)
    linear = [n for n, m in model.transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    unmatched = [p for p in patterns if not any(n == p or n.endswith(f".{p}") for n in linear)]
    if unmatched:
        raise ConfigError(
            f"trainer.lora.target_modules: {unmatched} match no linear layer of {model.config.name}; "
            f"some that exist: {', '.join(linear[:8])}"
        )
    with torch.random.fork_rng(devices=[]), _without_meta(model.transformer):
        torch.manual_seed(0)
        model.transformer.add_adapter(  # type: ignore[operator]
            LoraConfig(r=rank, lora_alpha=alpha, target_modules=patterns, init_lora_weights="gaussian")
        )
    for parameter in trainable(model.transformer).values():
        parameter.data = parameter.data.float() if parameter.dtype == torch.bfloat16 else parameter.data


@contextmanager
def _without_meta(module: torch.nn.Module) -> Iterator[None]:
    """Linear layers without weights look as if they had some: peft puts adapters where a layer's weight is."""
    layers = [m for m in module.modules() if isinstance(m, torch.nn.Linear) and m.weight.is_meta]
    weights = [layer.weight for layer in layers]
    for layer in layers:
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)
    yield
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = weight
