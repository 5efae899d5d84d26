"""What trainers and weight transports cannot do, as sentences: no setting may silently mean nothing (rule R16).

Invariant: whatever is said here is said before any model is loaded, and names the key, its value and what it needs. Of
plugins that digen does not come with nothing is known, and nothing refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from digen.config import RunConfig, TrainerConfig

BUILT_IN: Final = ("local", "fsdp", "deepspeed")
READ_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "zero_stage": ("deepspeed",),
    "cpu_offload": ("fsdp", "deepspeed"),
    "shard_ranks": ("fsdp",),
    "gather_dtype": ("fsdp",),
    "sync_gradients": ("fsdp",),
    "generate_with": ("fsdp",),
}
"""Keys of `trainer` that not every one of these trainers reads, and those that do."""


def trainer_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What cannot be had with the trainer backend that is asked for."""
    trainer = config.trainer
    if trainer.backend not in BUILT_IN:
        return
    yield from _unread(trainer)
    if trainer.backend == "local" and trainer.ranks > 1:
        yield f"trainer.backend=local has one rank, got trainer.ranks={trainer.ranks}; use fsdp"
    if trainer.backend == "fsdp":
        yield from _not_with_fsdp(trainer)
    if trainer.backend == "deepspeed":
        yield from _not_with_deepspeed(trainer)


def weights_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What a weight transport cannot do where the workers are."""
    weights, engine = config.weights, config.engine.name
    if weights.transport == "inline" and engine == "process":
        yield "weights.transport=inline needs engine.name=inline, got process; leave it out, or take shared_memory"
    if weights.transport in ("shared_memory", "collective") and engine == "inline":
        yield f"weights.transport={weights.transport} needs engine.name=process, got inline"
    places = {name: getattr(config, name).devices.partition(":")[0] for name in ("generator", "trainer")}
    if weights.transport == "collective" and len(set(places.values())) > 1:
        shown = ", ".join(f"{name}.devices={device}" for name, device in places.items())
        yield f"weights.transport=collective needs generators and trainer on devices of one kind, got {shown}"
    if weights.dtype is not None and config.trainer.lora is not None:
        yield f"weights.dtype={weights.dtype} is for full weights: adapters (trainer.lora) travel as they are"


def _unread(trainer: TrainerConfig) -> Iterator[str]:
    for key, backends in READ_BY.items():
        value = getattr(trainer, key)
        if value != type(trainer).model_fields[key].default and trainer.backend not in backends:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"trainer.{key}={shown} needs trainer.backend={' or '.join(backends)}, got {trainer.backend}"


def _not_with_fsdp(trainer: TrainerConfig) -> Iterator[str]:
    shards, ranks = trainer.shard_ranks, trainer.ranks
    if shards is not None and ranks % shards:
        allowed = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield f"trainer.shard_ranks={shards} must divide trainer.ranks={ranks}; allowed: {allowed}"
    if trainer.gather_dtype is not None and trainer.dtype != trainer.gather_dtype:
        yield f"trainer.gather_dtype={trainer.gather_dtype} needs trainer.dtype=bfloat16, got {trainer.dtype}"
    if trainer.gather_dtype is not None and trainer.generate_with == "copy":
        yield f"trainer.gather_dtype={trainer.gather_dtype} needs trainer.generate_with=sharded or gathered, got copy"


def _not_with_deepspeed(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.dtype == "float64":
        yield "trainer.dtype=float64 is not possible with trainer.backend=deepspeed: its optimizer is float32"
    if trainer.optimizer == "adamw-8bit":
        yield "trainer.optimizer=adamw-8bit needs trainer.backend=local or fsdp, got deepspeed; allowed: adamw, sgd"
