"""The whole run as one frozen, strict, typed value. Reading and merging files is `digen/presets.py`.

Invariant: importing and validating needs neither torch nor a model; unknown keys are errors; every bound is here, so
that what passes validation can be started. Precedence: default < preset < file < environment < command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from digen.conflicts import impossible
from digen.data.shares import rounded_shares
from digen.engines.placement import named_devices


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values cannot change after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        coerce_numbers_to_str=True,  # `negative_prompt: 7` is a text
        use_attribute_docstrings=True,  # the text under a field is shown with its errors
    )


Positive = Annotated[FiniteFloat, Field(gt=0)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    """What is trained."""

    name: str = "glyph"
    """Model plugin (`digen list`), e.g. `glyph`, `qwen-image`."""
    path: str | None = None
    """Folder in diffusers format, or hub id; None: the plugin's own (bundled files or hub id)."""
    height: Count = 32
    """Pixels."""
    width: Count = 32
    """Pixels."""
    num_frames: Count = 1
    """Frames of a sample, for models of video: a multiple of the decoder's step (4) and one."""
    max_text_tokens: Count = 512
    """Longer prompts are cut by the text encoder, with one warning that says how many."""
    shift: Positive | None = None
    """Noise levels s become shift s / (1 + (shift - 1) s) at every size; None: as the model's own scheduler shifts."""
    embedding_cache_gb: NonNegative = 10.0
    """What text encoders made is kept on disk for all runs, up to so many gigabytes; 0: not at all."""
    vae_tiling: bool = False
    """Decode tile by tile: less memory, and seams blended, so slightly other pixels."""


class SamplingConfig(Section):
    """How samples are made, in rollout and replay alike; `eval_*` only for evaluation and `digen sample`."""

    num_steps: Annotated[int, Field(ge=1)] = 10
    """Denoising steps T of a rollout."""
    guidance: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    """Classifier-free guidance scale in rollout and replay; 1 is off (one forward instead of two)."""
    negative_prompt: str = " "
    """What guidance leads away from."""
    eval_num_steps: Annotated[int, Field(ge=1)] = 10
    """Denoising steps in evaluation, without step noise."""
    eval_guidance: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    """Guidance scale in evaluation."""


class DataConfig(Section):
    """Prompts: .txt, .jsonl, .tsv, .csv, .parquet, .arrow, or a folder of a saved data set (docs/data.md)."""

    prompts: str | Mapping[str, Positive] | None = None
    """Training prompts; several sources as {path: share of every step}; None: the model's bundled ones."""
    heldout: str | None = None
    """Prompts of `digen eval`; None: the model's bundled ones."""
    column: str = "prompt"
    """Column (.jsonl: key) that holds the prompt; `negative_prompt` is its own one's, the others are metadata."""
    prompts_per_step: Count = 12
    """Prompts (groups) of one global step."""
    shuffle: bool = True
    """A new order in every epoch, from the run seed. What does not fill a step sits out that epoch."""


class GroupConfig(Section):
    """Placement of a worker group."""

    ranks: Count = 1
    """Processes of the group."""
    devices: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+(-\d+)?(,\d+(-\d+)?)*)?)$")
    """`cpu`, `cuda`, `cuda:0-3`, `cuda:0,2`."""
    threads: Count | None = None
    """CPU threads of each rank; None: cores divided by all ranks of the run."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of its processes."""
    node: Mapping[str, str] = Field(default_factory=dict)
    """`engine.name=ray`: labels that a node must have to carry its ranks, e.g. {ray.io/accelerator-type: H100}."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the forward pass (autocast for bfloat16); steps, log-probs and losses are float32 always."""
    attention: str | None = None
    """Attention kernel, by the name that diffusers gives it, or `vllm-omni` for its engine; None: the library's own."""
    batch_size: Count | None = None
    """Samples in one forward pass of a rank; None: that rank's samples of one prompt."""


class GeneratorConfig(GroupConfig):
    """Workers that sample and score."""

    backend: str = "diffusers"
    """Generator plugin (`digen list`)."""
    replicas: Count = 1
    """Generator groups that work on their own micro-batches; each has `ranks` ranks."""
    min_replicas: Count | None = None
    """Elastic: so many are enough to begin and to go on with; others may come late, leave, come back. None: all."""
    tensor_parallel: Count | None = None
    """`vllm-omni`: devices (`cpu`: processes) that a rank's engine divides the model over; None: its share of them."""
    offload_between_calls: bool = False
    """Keep the model in host memory, and on the device during a call alone: for a device that the trainer uses too."""

    def devices_of(self, replica: int) -> str:
        """`devices` of one replica: its part of them in order, or one of them where there is less than one for each.

        Raises ConfigError where `devices` names none.
        """
        if self.devices == "cpu" or self.replicas == 1:
            return self.devices
        named = named_devices(self.devices, self.ranks * self.replicas)
        each = len(named) // self.replicas
        part = named[replica * each : (replica + 1) * each] or (named[replica % len(named)],)
        return "cuda:" + ",".join(device.removeprefix("cuda:") for device in part)

    @property
    def devices_per_rank(self) -> int:
        """Over how many the model of a rank is divided. Raises ConfigError where `devices` names none."""
        if self.tensor_parallel is not None or self.backend != "vllm-omni":
            return self.tensor_parallel or 1
        named = 1 if self.devices in ("cpu", "cuda") else len(named_devices(self.devices_of(0), self.ranks))
        return max(1, named // self.ranks)


class LoraConfig(Section):
    """Low-rank adapters (peft) on the model's attention projections."""

    rank: Count = 32
    """Rank of the adapters."""
    alpha: Positive = 64.0
    """Their scale is alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """None: what the model names."""


class EmaConfig(Section):
    """Exponential moving average of the trained weights."""

    decay: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.999
    """Share of itself that the average keeps at each step."""
    warmup_steps: Count = 10
    """At step t it keeps (1 + t) / (warmup_steps + t) while that is less: a young average follows. 1: no warm-up."""


class TrainerConfig(GroupConfig):
    """Workers that compute gradients; they can generate too (TAG)."""

    backend: str = "local"
    """Trainer plugin (`digen list`)."""
    zero_stage: Literal[1, 2, 3] | None = None
    """What DeepSpeed divides over ranks: 1 optimizer state, 2 gradients too, 3 parameters too; None: 2."""
    shard_ranks: Count | None = None
    """`fsdp`: parameters are divided over so many ranks, of which all others hold copies (hybrid); None: over all."""
    cpu_offload: bool = False
    """Keep what a rank has of optimizer state, and with `fsdp` and ZeRO 3 of parameters, in host memory."""
    gather_dtype: Literal["bfloat16"] | None = None
    """`fsdp`: gather and use parameters in bfloat16, of which each rank keeps its part in float32; None: as kept."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the model's blocks, and run these once more in the backward pass."""
    sync_gradients: Literal["step", "pass"] = "step"
    """`fsdp`: sum gradients over ranks once a step (each rank holds whole ones until then), or in every pass."""
    generate_with: Literal["sharded", "gathered", "copy"] = "sharded"
    """`fsdp`: a generating trainer gathers each block when it runs it, all of them once a call, or keeps a whole copy
    in host memory."""
    lora: LoraConfig | None = None
    """None: full weights."""
    learning_rate: Positive = 3e-4
    """The highest; `lr_schedule` and `warmup_steps` say when."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling towards 0 at the run's last step, along a line or half a cosine."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises, in equal parts, to `learning_rate`."""
    optimizer: Literal["adamw", "adamw-8bit", "sgd"] = "adamw"
    """adamw-8bit: moments in 8 bits (bitsandbytes; `fsdp`: torchao); sgd: without momentum, to compare runs exactly."""
    adam_eps: Positive = 1e-8
    """Mean-reduced log-probs make tiny gradients: for full weights 1e-10 or less is usual."""
    adam_betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the first and second moment."""
    weight_decay: NonNegative = 1e-4
    """Decoupled, as in AdamW."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; null: not at all."""
    ema: EmaConfig | None = None
    """Average of the trained weights over steps, for `digen eval`, `sample` and `export`; training never reads it."""
    updates_per_rollout: Count = 1
    """Optimizer steps U under one generation version: so many global steps in a row are sampled with the same weights,
    and from the second on the ratio is not 1. Each is a global step, with `data.prompts_per_step` prompts."""
    tsp: Annotated[int, Field(ge=0)] | Literal["auto"] = 1
    """Timesteps stacked into one forward pass (TSP); 0: all trained ones; auto: as many as fit into free memory."""
    max_bad_steps: Count = 3
    """Stop after so many steps in a row with a non-finite gradient (which is never applied)."""
    log_prob_gap: Positive = 1e-3
    """Largest |replayed - rollout log-prob| of an on-policy sample that counts as sound."""
    on_log_prob_gap: Literal["warn", "stop"] = "warn"
    """What a larger gap does."""

    @property
    def needs_package(self) -> str | None:
        """What must be installed for `optimizer`; bitsandbytes cannot step sharded tensors, torchao compiles first."""
        if self.optimizer != "adamw-8bit":
            return None
        return "torchao" if self.backend == "fsdp" else "bitsandbytes"


class ScheduleConfig(Section):
    """Who does what when. None of these settings changes what is learned, but `staleness` (TCSS)."""

    mode: Literal["colocated", "naive", "pipelined"] = "pipelined"
    """colocated: the trainer does all; naive: updates wait for the step's last score; pipelined: GAP."""
    prompts_per_microbatch: Count = 1
    """Whole groups in the unit of the pipeline; the last one of a step may be smaller."""
    tag: str = "none"
    """Trainer-assisted generation: `none`, `static(n)`, `bts`, your own (`path.py:Name`); none where colocated."""
    assist: Literal["none", "trainer", "generator", "both"] = "none"
    """Which side, when idle, takes over part of the other's work, sample by sample: the trainer generates, generators
    accumulate gradients, or both. Where the trainer may, `tag` (about whole micro-batches) is not asked."""
    staleness: Share = 0.0
    """Largest share of a step's micro-batches made under the previous version (TCSS); 0 is fully synchronous."""
    window: Annotated[int, Field(ge=1, le=2)] = 2
    """Weight versions that may be in use at once (W of Algorithm 1); 1 forbids staleness."""
    max_in_flight: Count | None = None
    """Generation calls under way at once (C_gen of Algorithm 1); None: as many as there are workers."""
    ordered: bool = False
    """Train micro-batches strictly by index: the same rounding in every run, at the price of waiting for the next."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a failed generate or score call is repeated. An update never is (rule R18)."""

    @property
    def assists(self) -> bool:
        """Whether `assist` decides when the trainer generates, and not `tag`."""
        return self.assist in ("trainer", "both")

    @property
    def trainer_generates(self) -> bool:
        """Whether the trainer may be asked to generate, besides in colocated mode."""
        return self.tag != "none" or self.assists

    @property
    def generators_help(self) -> bool:
        """Whether generators may be asked to accumulate gradients."""
        return self.assist in ("generator", "both")


class ScoringConfig(Section):
    """How rewards become one, and what happens when one fails (rule R17: it is never counted as 0)."""

    combine: Literal["rewards", "advantages", "gdpo"] = "rewards"
    """What is weighted and summed: raw rewards, or each reward's own advantages; gdpo: the latter, and their sum is
    divided by its std over the step."""
    on_failure: Literal["drop", "stop"] = "drop"
    """drop: the whole group leaves the step, counted in the metrics; stop: the run ends."""
    timeout_s: Positive = 600.0
    """Longest time for one reward call over a micro-batch's samples."""
    devices: str | None = Field(None, pattern=r"^(cpu|cuda:\d+)$")
    """Where a worker of its own scores, beside generation: for rewards that take long or wait; None: generators do."""


class RewardTerm(BaseModel):
    """One reward and its weight in the sum; further keys are the reward's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    weight: FiniteFloat = 1.0
    """Factor in the sum of rewards; negative to lower this reward; 0 to watch it in the metrics only."""
    required: bool = True
    """Whether a group leaves when this reward fails in it; false: it is then judged by its other rewards."""
    plugin: str | None = None
    """Reward plugin that this entry uses, so that one can be used twice; None: the entry's own name."""


class EngineConfig(Section):
    name: str = "process"
    """Where workers run: `inline` (threads of this process), `process` (one OS process per rank), `ray` (the same, on
    many machines)."""
    address: str | None = None
    """`ray`: `auto` or `host:port` of a running cluster, `ray://host:port` from outside it; None: one of its own."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often a worker group that died or hangs is started again between the ends of two steps; a trainer, with the
    whole run from its newest checkpoint, between two checkpoints. Then the run goes on without it, or ends."""
    hang_s: Positive = 900.0
    """A call hangs that takes longer than this and than 10 times what its kind typically takes; 10 times this where
    that is not known yet. It is taken for the death of its group (threads, of engine `inline`, are waited for)."""


class WeightsConfig(Section):
    """How new weights travel from the trainer to the generators."""

    transport: str | None = None
    """Transport plugin (`digen list`); None: `shared_memory` with `engine.name=process`, else `inline`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What full weights are cast to on their way; None: they travel as they are trained. Adapters always do."""
    dir: Path | None = None
    """`safetensors`: a folder that all workers see; each run uses one of its own in there. None: the run's folder."""
    timeout_s: Positive = 300.0
    """Longest wait for the other side, after which the run ends."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Save what `digen run --resume` needs every so many steps (a multiple of `updates_per_rollout`); 0: at the end."""
    keep: Count | None = None
    """Delete all but the newest so many checkpoints; None: no checkpoint is deleted."""
    best: str | None = None
    """Keep the checkpoint with the largest value of this metric too, e.g. `reward/mean`, of the step before it."""
    init_from: Path | None = None
    """Folder of a run whose trained weights this one starts from (`--init-from`); a resumed run does not read it."""


class ObserveConfig(Section):
    grid_every: Annotated[int, Field(ge=0)] = 10
    """Write a PNG of samples every so many steps; 0: never."""
    video: Literal["auto", "mp4", "gif"] = "auto"
    """How samples that are videos are written besides; auto: mp4 where PyAV is installed (extra `video`), else gif."""
    tensorboard: bool = True
    """Write TensorBoard events too (extra `tracking`)."""


A = TypeVar("A", bound=Section)


class RunConfig(Section, Generic[A]):
    """Everything that decides a run. `RunConfig[FlowGRPO]` is the type that a file is validated against."""

    algorithm: A
    """The algorithm's own keys."""
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    data: DataConfig = DataConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    reward: Mapping[str, RewardTerm] = Field(default_factory=lambda: {"ocr": RewardTerm()})
    """Reward plugin (or `path.py:name`) -> weight and options."""
    eval_reward: Mapping[str, RewardTerm] = Field(default_factory=dict)
    """Rewards that only `digen eval` computes, to see what training for the others does to them."""
    scoring: ScoringConfig = ScoringConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    steps: Count | None = None
    """Global steps (optimizer steps); None: as many as `epochs` gives. A multiple of `updates_per_rollout`."""
    epochs: Count | None = None
    """Passes over the prompts; None: no limit but `steps`. The smaller limit counts."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything drawn: noise, prompt order, trained steps."""
    run_dir: Path | None = None
    """None: `runs/<time>-<algorithm>-<model>`."""

    @model_validator(mode="after")
    def _possible(self) -> RunConfig[A]:
        problems = impossible(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


NOISE_FLOOR = 1e-4
"""Log-probs of one sample from two bfloat16 forwards differ by about this much."""


def doubts(config: RunConfig[Any]) -> list[str]:
    """What can be had but is rarely wanted, as sentences for a person to read when the run starts."""
    found = []
    schedule, sources = config.schedule, config.data.prompts
    if isinstance(sources, Mapping) and (text := rounded_shares(sources, config.data.prompts_per_step)):
        found.append(text)
    if config.generator.offload_between_calls and config.generator.devices == "cpu":
        found.append("generator.offload_between_calls=true frees nothing with generator.devices=cpu: it is host memory")
    if schedule.assist in ("trainer", "both") and schedule.tag != "none":
        found.append(f"schedule.assist={schedule.assist} decides when the trainer generates, not tag={schedule.tag}")
    clip = getattr(config.algorithm.loss, "clip", None)
    if config.trainer.dtype == "bfloat16" and clip is not None and clip < NOISE_FLOOR:
        found.append(
            f"algorithm.loss.clip={clip:g} is below the noise of bfloat16 log-probs ({NOISE_FLOOR:g}): samples are "
            "clipped at random; widen it, use float32, or set algorithm.old_log_prob=replay"
        )
    return found
