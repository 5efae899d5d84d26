"""What cannot be had together, as sentences: no setting may silently mean nothing (rule R16).

Invariant: whatever is said here is said before any model is loaded, and names the key, its value and what it needs. Of
plugins that digen does not come with nothing is known, and nothing refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from digen.engines.placement import named_devices
from digen.errors import ConfigError

if TYPE_CHECKING:
    from digen.config import RunConfig, ScheduleConfig, TrainerConfig

SECRET: Final = re.compile(r"(?i)(^|_)(TOKENS?|SECRETS?|PASSWORD|PASSWD|(API|ACCESS|PRIVATE)_?KEY|CREDENTIALS?)(_|$)")
"""Names of environment variables that are not for others to see."""
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


VLLM_FAMILIES: Final = (
    "qwen-image", "tiny-qwen-image", "glyph", "flux1-dev", "tiny-flux", "sd3.5-medium", "sd3.5-large", "tiny-sd3",
    "wan2.1-1.3b", "wan2.1-14b", "tiny-wan",
)  # fmt: skip
"""digen's models that the generator `vllm-omni` can sample."""


OWN_ATTENTION: Final = ("sd3.5-medium", "sd3.5-large", "tiny-sd3")
"""digen's models whose attention diffusers runs on one kernel alone."""


def impossible(config: RunConfig[Any]) -> list[str]:
    """What cannot be had together, as sentences that name keys and values."""
    wrong, updates = [], config.trainer.updates_per_rollout
    if config.steps is None and config.epochs is None:
        wrong.append("one of steps and epochs must be set")
    if config.schedule.staleness > 0 and config.schedule.window < 2:
        wrong.append(
            f"schedule.staleness={config.schedule.staleness} needs schedule.window=2, got {config.schedule.window}"
        )
    if config.schedule.staleness > 0 and config.schedule.mode != "pipelined":
        wrong.append(
            f"schedule.staleness={config.schedule.staleness} needs schedule.mode=pipelined, got {config.schedule.mode}"
        )
    for key, off_policy in (
        (f"schedule.staleness={config.schedule.staleness}", config.schedule.staleness > 0),
        (f"trainer.updates_per_rollout={updates}", updates > 1),
    ):
        if off_policy and getattr(config.algorithm, "old_log_prob", "") == "replay":
            wrong.append(
                f"{key} needs algorithm.old_log_prob=rollout, got replay: "
                "the trainer no longer has the weights that made an older sample"
            )
    if config.steps is not None and config.steps % updates:
        wrong.append(f"steps={config.steps} must be a multiple of trainer.updates_per_rollout={updates}")
    if config.checkpoint.every % updates:
        wrong.append(
            f"checkpoint.every={config.checkpoint.every} must be a multiple of trainer.updates_per_rollout={updates}: "
            "only between rollouts do generators and trainer have the same weights"
        )
    wrong += _impossible_assist(config.schedule)
    wrong += _impossible_scoring(config)
    wrong += [*trainer_conflicts(config), *weights_conflicts(config), *algorithm_conflicts(config)]
    wrong += reward_conflicts(config)
    wrong += _secrets(config)
    wrong += [*vllm_conflicts(config), *attention_conflicts(config)]
    wrong += [*engine_conflicts(config), *elastic_conflicts(config)]
    if config.trainer.optimizer == "adamw-8bit" and config.trainer.dtype == "float64":
        wrong.append("trainer.optimizer=adamw-8bit needs trainer.dtype=float32 or bfloat16, got float64")
    if config.engine.name == "inline" and max(config.trainer.ranks, config.generator.ranks) > 1:
        wrong.append("engine.name=inline runs one rank per group (no process group inside one process); use process")
    return wrong


def _secrets(config: RunConfig[Any]) -> Iterator[str]:
    """Settings are written to files, and to the checkpoints that are passed on."""
    for group in ("generator", "trainer"):
        for name in filter(SECRET.search, getattr(config, group).env):
            yield f"{group}.env.{name} looks like a secret, and would be written down; set it where digen is started"


def _impossible_assist(schedule: ScheduleConfig) -> list[str]:
    assist, wrong = schedule.assist, []
    if assist != "none" and schedule.mode != "pipelined":
        wrong.append(f"schedule.assist={assist} needs schedule.mode=pipelined, got {schedule.mode}")
    if schedule.generators_help and schedule.ordered:
        wrong.append(f"schedule.ordered=true needs one worker that accumulates gradients, got schedule.assist={assist}")
    return wrong


def _impossible_scoring(config: RunConfig[Any]) -> list[str]:
    schedule, devices = config.schedule, config.scoring.devices
    if devices is None or schedule.tag == "none" or schedule.tag.startswith("static") or schedule.assists:
        return []
    given = f"schedule.tag={schedule.tag} counts on scores from the generators, got scoring.devices={devices}"
    return [f"{given}; use schedule.assist"]


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


def attention_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What an attention kernel cannot do; whether it is there, the worker that needs it sees."""
    for name in ("generator", "trainer"):
        kernel = getattr(config, name).attention
        trains = name == "trainer" or config.schedule.generators_help
        if kernel is None or getattr(config, name).backend == "vllm-omni":
            continue
        if config.model.name in OWN_ATTENTION:
            yield f"{name}.attention={kernel}: model.name={config.model.name} has attention of its own; leave it out"
        if trains and kernel.lstrip("_").startswith("sage"):
            yield f"{name}.attention={kernel} has no backward pass, which gradients need; try native"


def algorithm_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What an algorithm cannot have of the other sections."""
    yield from _parted_pairs(config)
    yield from _not_with_another_start(config)
    yield from _not_with_an_old_policy(config)


def _parted_pairs(config: RunConfig[Any]) -> Iterator[str]:
    """What a loss that compares samples cannot do with: passes that part them."""
    loss = config.algorithm.loss
    together = loss.rows_together
    for name in ("trainer", "generator") if config.schedule.generators_help else ("trainer",):
        size = getattr(config, name).batch_size
        if size is not None and size % together:
            reason = f"algorithm.loss.type={loss.type} compares pairs"
            yield f"{name}.batch_size={size} must be a multiple of {together}: {reason}"
    if together > 1 and config.scoring.combine != "rewards":
        combine = config.scoring.combine
        yield f"scoring.combine={combine}: a best and a worst sample have one reward each; allowed: rewards"


def _not_with_another_start(config: RunConfig[Any]) -> Iterator[str]:
    """What cannot be had where losses compare with the weights of another run, which the trainer alone has."""
    if config.checkpoint.init_from is None or not config.algorithm.loss.needs_reference:
        return
    what = f"checkpoint.init_from with algorithm.loss.type={config.algorithm.loss.type}, which compares with the base,"
    if config.schedule.generators_help:
        yield f"schedule.assist={config.schedule.assist}: {what} needs a base on generators too; allowed: none, trainer"
    if config.trainer.backend == "deepspeed" and config.trainer.zero_stage == 3:
        yield f"trainer.zero_stage=3: {what} needs trainer.zero_stage=1 or 2, or trainer.backend=fsdp"


def _not_with_an_old_policy(config: RunConfig[Any]) -> Iterator[str]:
    """What cannot be had where generators are given other weights than the trained ones."""
    schedule, trainer = config.schedule, config.trainer
    if not config.algorithm.has_old_policy:
        return
    if schedule.generators_help:
        yield (
            f"schedule.assist={schedule.assist} lets generators compute gradients, of the trained weights, but with "
            "algorithm.old_policy they have others; allowed: none, trainer"
        )
    samples = schedule.mode == "colocated" or schedule.trainer_generates
    if trainer.backend == "deepspeed" and trainer.zero_stage == 3 and samples:
        yield (
            "trainer.zero_stage=3 cannot sample with other weights than those it trains, as algorithm.old_policy asks; "
            "allowed: zero_stage 1 or 2, trainer.backend=fsdp, or a trainer that does not generate"
        )


def weights_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What a weight transport cannot do where the workers are."""
    weights, engine = config.weights, config.engine.name
    if weights.transport == "inline" and engine == "process":
        yield "weights.transport=inline needs engine.name=inline, got process; leave it out, or take shared_memory"
    if weights.transport in ("shared_memory", "collective") and engine in ("inline", "ray"):
        yield f"weights.transport={weights.transport} needs engine.name=process, got {engine}"
    places = {name: getattr(config, name).devices.partition(":")[0] for name in ("generator", "trainer")}
    if weights.transport == "collective" and len(set(places.values())) > 1:
        shown = ", ".join(f"{name}.devices={device}" for name, device in places.items())
        yield f"weights.transport=collective needs generators and trainer on devices of one kind, got {shown}"
    elif weights.transport == "collective" and (twice := _taken_twice(config)):
        yield (
            f"weights.transport=collective: {', '.join(twice)} would carry more than one worker, and NCCL wants a GPU "
            "for each; allowed: other devices, shared_memory, safetensors"
        )
    if weights.dtype is not None and config.trainer.lora is not None:
        yield f"weights.dtype={weights.dtype} is for full weights: adapters (trainer.lora) travel as they are"


def _taken_twice(config: RunConfig[Any]) -> list[str]:
    """GPUs of more than one rank, as far as names tell; they do not where processes see different ones."""
    generator, trainer = config.generator, config.trainer
    if any("CUDA_VISIBLE_DEVICES" in group.env for group in (generator, trainer)):
        return []
    shares = [(trainer.devices, trainer.ranks)]
    if config.schedule.mode != "colocated":
        shares += [(generator.devices_of(k), generator.ranks) for k in range(generator.replicas)]
    taken: Counter[str] = Counter()
    with suppress(ConfigError):  # said when they are placed
        for devices, ranks in shares:
            named = named_devices(devices, ranks)
            taken.update(named[rank % len(named)] for rank in range(ranks))
    return sorted(device for device, times in taken.items() if times > 1 and device != "cpu")


def engine_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What only the engine `ray` knows, and what it does not."""
    engine = config.engine
    if engine.name in ("inline", "process") and engine.address is not None:
        yield f"engine.address={engine.address} needs engine.name=ray, got {engine.name}"
    for name in ("generator", "trainer"):
        group = getattr(config, name)
        if engine.name in ("inline", "process") and group.node:
            yield f"{name}.node needs engine.name=ray, got {engine.name}: it has one node"
        if engine.name == "ray" and group.devices not in ("cpu", "cuda"):
            yield f"{name}.devices={group.devices}: with engine.name=ray, Ray chooses the GPUs; allowed: cpu, cuda"


def elastic_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What generators that come and go cannot be had with."""
    least, replicas = config.generator.min_replicas, config.generator.replicas
    if least is None:
        return
    if least > replicas:
        yield f"generator.min_replicas={least} is more than there are: generator.replicas={replicas}"
    if config.schedule.mode == "colocated":
        yield f"generator.min_replicas={least} needs generators, got schedule.mode=colocated"
    if config.weights.transport == "collective":
        allowed = "allowed: inline, shared_memory, safetensors"
        yield f"generator.min_replicas={least}: who comes late cannot join weights.transport=collective; {allowed}"


def vllm_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """What the generator `vllm-omni` cannot do. Of models that digen does not come with nothing is known."""
    generator, model = config.generator, config.model.name
    if generator.backend != "vllm-omni":
        if generator.backend == "diffusers" and generator.tensor_parallel is not None:
            parallel = generator.tensor_parallel
            yield f"generator.tensor_parallel={parallel} needs generator.backend=vllm-omni, got diffusers"
        return
    asked = f"generator.backend=vllm-omni cannot sample model.name={model}"
    if model not in VLLM_FAMILIES and ":" not in model:
        reason = "no pipeline of its own in the engine" if "hunyuan" in model else "not adapted to the engine"
        allowed = ", ".join(VLLM_FAMILIES)
        yield f"{asked}: {reason}; allowed: {allowed}, or --generator diffusers, which samples every family"
    if config.engine.name == "inline":
        yield "generator.backend=vllm-omni needs engine.name=process, got inline: a process can hold one engine"
    if config.weights.transport == "collective":
        allowed = "shared_memory, safetensors"
        yield f"weights.transport=collective cannot be had with generator.backend=vllm-omni; allowed: {allowed}"
    yield from _undivided(config)
    if generator.dtype == "float64":
        yield "generator.dtype=float64 cannot be had with generator.backend=vllm-omni; allowed: float32, bfloat16"


def _undivided(config: RunConfig[Any]) -> Iterator[str]:
    """Devices that cannot be divided among the engines of `vllm-omni`, of which each rank has one."""
    generator = config.generator
    devices, parallel = generator.devices, generator.tensor_parallel
    ranks = generator.ranks * generator.replicas
    if (parallel or 1) > 1 and config.engine.name == "ray":
        yield f"generator.tensor_parallel={parallel} needs engine.name=process, got ray: it gives each rank one GPU"
    elif (parallel or 1) > 1 and devices == "cuda":
        named = f"cuda:0-{ranks * (parallel or 1) - 1}"
        yield f"generator.tensor_parallel={parallel} needs devices by name, got cuda; allowed: e.g. {named}"
    elif devices.startswith("cuda:"):
        with suppress(ConfigError):  # said when they are placed
            found = len(named_devices(devices, ranks))
            each = parallel or max(1, found // ranks)
            if found != ranks * each and (found > ranks or each > 1):
                yield (
                    f"generator.devices={devices} are {found} devices, which {ranks} engines of {each} each cannot "
                    f"share; allowed: {ranks * each} devices, or others of generator.ranks, generator.replicas and "
                    "generator.tensor_parallel"
                )


def reward_conflicts(config: RunConfig[Any]) -> Iterator[str]:
    """Ways to combine rewards that cannot be had with the algorithm, and names that mean two things."""
    for name in sorted(config.reward.keys() & config.eval_reward.keys()):
        yield f"eval_reward.{name}: a reward of this name is trained on; allowed: another name, with plugin={name}"
    combine, algorithm = config.scoring.combine, config.algorithm
    if combine == "rewards":
        return
    if algorithm.advantage.needs_gradient_scale:
        scale = getattr(algorithm.advantage, "scale", "batch")
        yield f"scoring.combine={combine} needs algorithm.advantage.scale=group, got {scale}"
    if combine == "gdpo" and not hasattr(algorithm.advantage, "scale"):
        yield f"scoring.combine=gdpo needs algorithm.advantage.type=group, got {algorithm.advantage.type}"
    if combine == "gdpo" and getattr(algorithm.advantage, "std", "") == "none":
        yield "scoring.combine=gdpo divides by stds; algorithm.advantage.std=none; allowed: biased, unbiased"
    if combine == "gdpo" and not algorithm.loss.is_proportional:
        yield (
            "scoring.combine=gdpo divides by a std that is known when the step's gradient is whole, and scales that: "
            "exact only for a loss proportional to the advantage; set algorithm.loss.advantage_clip=null and "
            "algorithm.loss.kl=0, or scoring.combine=advantages"
        )


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
