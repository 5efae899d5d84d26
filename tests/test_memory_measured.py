"""What is planned is what is measured: real workers of a model of several MB, watched tensor by tensor.

Activations and weights dominate here as they do in large models. A worker counts all that is alive, so the figures are
the same on every machine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from digen import plugins
from digen.config import RunConfig
from digen.engines.base import WorkerContext, WorkerSpec
from digen.engines.store import MemoryStore, shared_folder
from digen.memory.here import ERROR
from digen.memory.planner import plan_memory
from digen.memory.ranks import RankMemory
from digen.models import tiny
from digen.presets import payload, resolve
from digen.types import MicroBatch, Prompt, Rollout, ScoredRollout, Shard

pytestmark = pytest.mark.slow
WORKERS = Path(__file__).with_name("workers_for_memory.py")
NUM_STEPS = 5
"""Of which all but the last are trained."""
LORA, FULL = "trainer.lora={rank: 4, alpha: 8}", "trainer.lora=null"
CHECKPOINTED = "trainer.activation_checkpointing=true"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SD3.5 with 1.3 million parameters in four blocks, and a decoder to match."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    tiny.quieten()
    pipeline = tiny.sd3()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=48,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=96,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.06,
    )
    pipeline.register_modules(transformer=transformer, vae=vae)
    folder = tmp_path_factory.mktemp("memory") / "sd3"
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n")
    return path


def configured(model: Path, prompts: Path, *overrides: str, samples: int = 2) -> RunConfig[Any]:
    settings = [
        f"model.path={model}", "model.height=64", "model.width=64", "model.max_text_tokens=16",
        "model.embedding_cache_gb=0", f"data.prompts={prompts}", "data.prompts_per_step=1",
        f"algorithm.samples_per_prompt={samples}", "algorithm.loss.kl=0", f"sampling.num_steps={NUM_STEPS}",
        "trainer.batch_size=2", "schedule.assist=none", "trainer.tsp=1", *overrides,
    ]  # fmt: skip
    return resolve("flowgrpo", "tiny-sd3", None, settings, {})


def scored(config: RunConfig[Any], store: Any, latent_shape: tuple[int, ...]) -> ScoredRollout:
    """As a generator would have stored it, of random numbers."""
    count, text = config.algorithm.samples_per_prompt, config.model.max_text_tokens + 77
    shape = (count, NUM_STEPS - 1, *latent_shape)
    trajectory = {
        "latents": torch.randn(shape),
        "next_latents": torch.randn(shape),
        "log_probs": torch.zeros(shape[:2]),
        "steps": torch.arange(NUM_STEPS - 1).expand(shape[:2]).contiguous(),
        "sigmas": torch.linspace(1, 0, NUM_STEPS + 1),
        "prompt": torch.zeros(count, dtype=torch.int64),
    }
    for name in ("cond", "negative"):
        trajectory |= {f"{name}.embeds": torch.randn(1, text, 32), f"{name}.pooled": torch.randn(1, 32)}
    ref = store.put("rollout", trajectory)
    microbatch = MicroBatch(0, 0, (Prompt(0, "a cat"),), count, 0)
    rollout = Rollout(microbatch, 0, (Shard(tuple(range(count)), ref, ref),), "generator")
    advantages = tuple((-1.0) ** k for k in range(count))
    return ScoredRollout(rollout, (0.0,) * count, advantages, (True,) * count)


def planned(config: RunConfig[Any], group: str) -> RankMemory:
    return next(rank for rank in plan_memory(config).ranks if rank.group == group)


def compare(plan: RankMemory, measured: dict[str, int], *moments: str) -> None:
    for moment in moments:
        got = measured[moment] - measured["before"]
        assert plan.moments[moment] == pytest.approx(got, rel=ERROR), (moment, dict(plan.parts), dict(plan.moments))


def local(config: RunConfig[Any], kind: str) -> Any:
    store = MemoryStore()
    context = WorkerContext("worker", 0, 1, "cpu", store)
    worker: Any = plugins.load(f"{WORKERS}:{kind}")(  # type: ignore[operator]
        {**payload(config), "reward": {}}, context
    )
    worker.load()
    return worker


LOCAL = (
    (LORA, "trainer.tsp=4"),
    (FULL, "trainer.tsp=4", CHECKPOINTED),
    (FULL,),
    (FULL, "trainer.tsp=4"),
    (LORA, CHECKPOINTED),
)


@pytest.mark.parametrize("overrides", LOCAL)
def test_a_trainer_of_one_rank_takes_what_is_planned(model: Path, prompts: Path, overrides: tuple[str, ...]) -> None:
    config = configured(model, prompts, *overrides)
    worker = local(config, "MeasuringLocal")
    measured = worker.train(scored(config, worker.context.store, worker.model.latent_shape), config.trainer.tsp)
    compare(planned(config, "trainer"), measured, "update", "step")


def test_a_generator_takes_what_is_planned_for_denoising_and_decoding(model: Path, prompts: Path) -> None:
    config = configured(model, prompts, LORA, "generator.batch_size=2")
    worker = local(config, "MeasuringGenerator")
    microbatch = MicroBatch(0, 0, (Prompt(0, "a cat"),), 2, 0)
    worker.generate(microbatch, 0, (0,))  # encodes the prompt
    compare(planned(config, "generator"), worker.sample(microbatch, 0, (0, 1)), "generate")


@pytest.fixture
def engine(warm: Any) -> Iterator[Any]:
    made = warm()
    with shared_folder(made.store.folder):
        yield made


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("MeasuringFsdp", ("trainer.backend=fsdp", LORA)),
        ("MeasuringFsdp", ("trainer.backend=fsdp", FULL, "trainer.tsp=4", CHECKPOINTED)),
        ("MeasuringFsdp", ("trainer.backend=fsdp", FULL, "trainer.sync_gradients=pass")),
        ("MeasuringDeepSpeed", ("trainer.backend=deepspeed", "trainer.zero_stage=3", LORA)),
        (
            "MeasuringDeepSpeed",
            ("trainer.backend=deepspeed", "trainer.zero_stage=3", FULL, "trainer.tsp=4", CHECKPOINTED),
        ),
        ("MeasuringDeepSpeed", ("trainer.backend=deepspeed", "trainer.zero_stage=2", FULL)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:3]),
)
def test_each_of_two_ranks_takes_what_is_planned(
    model: Path, prompts: Path, engine: Any, kind: str, overrides: tuple[str, ...]
) -> None:
    config = configured(model, prompts, "trainer.ranks=2", *overrides, samples=4)
    settings = {**payload(config), "reward": {}}
    ask = engine.begin(WorkerSpec("trainer", f"{WORKERS}:{kind}", settings, ranks=2, threads=1), "trainer")
    ask("load")
    plan = planned(config, "trainer")
    for measured in ask("train", scored(config, engine.store, (4, 8, 8)), config.trainer.tsp):
        compare(plan, measured, "update", "step")
