"""FSDP is a place to train, not another way to train: every way to divide a model does what one plain process does.

The plain process makes samples and trains on them; every other placement gets the same samples and must come to the
same gradients, figures and weights, step by step, also after steps that are not applied. Plain SGD: an optimizer that
divides by its own noise (Adam) would turn rounding into whole steps. Messages are counted as they are sent.
"""

import gc
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from rich.console import Console
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from digen import credit, plugins
from digen.checkpoint.tensors import Pieces
from digen.config import RunConfig
from digen.engines.base import TensorStore, WorkerContext, WorkerSpec
from digen.engines.process import ProcessEngine
from digen.engines.store import MemoryStore, shared_folder
from digen.errors import ConfigError
from digen.models.glyph import Glyph
from digen.observe.files import read_rows, read_spans
from digen.presets import payload, resolve
from digen.run import run
from digen.types import MicroBatch, Prompt, Rollout, ScoredRollout, Stats, StepReport, merge_stats
from digen.weights.state import trainable

HERE = Path(__file__)
PROMPTS = (Prompt(3, 'a sign that says "OPEN"'), Prompt(8, 'small red letters "CAT" on a white background'))
DENOMINATOR = 18.0
CLIPPING = 0.02
"""Below the norms of the gradients here, which are from 0.03 to 0.07."""
Tensors = Mapping[str, torch.Tensor]
Call = Callable[..., tuple[Any, ...]]


def small(*overrides: str, model: str = "glyph") -> RunConfig[Any]:
    settings = [
        "steps=3",
        "data.prompts_per_step=2",
        "algorithm.samples_per_prompt=3",  # two ranks: two samples and one
        "sampling.num_steps=4",
        "trainer.batch_size=1",  # several backward passes a micro-batch
        "generator.batch_size=1",
        "trainer.optimizer=sgd",
        "trainer.learning_rate=0.3",
        "trainer.weight_decay=0",
        f"trainer.max_grad_norm={CLIPPING}",
        "schedule.tag=static(1)",
        "schedule.assist=none",
        "algorithm.advantage.scale=group",
        "algorithm.steps.type=all-but-last",
        "observe.tensorboard=false",
        *overrides,
    ]
    return resolve("flowgrpo", model, None, settings, {})


# --- what cannot be had is said before anything is loaded ---


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.shard_ranks=2"], r"trainer\.shard_ranks=2 needs trainer\.backend=fsdp, got local"),
        (["trainer.sync_gradients=pass"], r"trainer\.sync_gradients=pass needs trainer\.backend=fsdp, got local"),
        (
            ["trainer.backend=deepspeed", "trainer.generate_with=copy"],
            r"generate_with=copy needs .*fsdp, got deepspeed",
        ),
        (["trainer.backend=deepspeed", "trainer.gather_dtype=bfloat16"], r"gather_dtype=bfloat16 needs .*fsdp"),
        (
            ["trainer.cpu_offload=true"],
            r"trainer\.cpu_offload=true needs trainer\.backend=fsdp or deepspeed, got local",
        ),
        (["trainer.backend=fsdp", "trainer.zero_stage=3"], r"zero_stage=3 needs trainer\.backend=deepspeed, got fsdp"),
        (
            ["trainer.backend=fsdp", "trainer.ranks=4", "trainer.shard_ranks=3"],
            r"trainer\.shard_ranks=3 must divide trainer\.ranks=4; allowed: 1, 2, 4",
        ),
        (
            ["trainer.backend=fsdp", "trainer.gather_dtype=bfloat16"],
            r"gather_dtype=bfloat16 needs trainer\.dtype=bfloat16, got float32",
        ),
        (
            [
                "trainer.backend=fsdp",
                "trainer.dtype=bfloat16",
                "trainer.gather_dtype=bfloat16",
                "trainer.generate_with=copy",
            ],
            r"gather_dtype=bfloat16 needs trainer\.generate_with=sharded or gathered, got copy",
        ),
        (
            ["trainer.backend=fsdp", "trainer.generate_with=magic"],
            r"generate_with: got .magic.*copy, gathered, sharded",
        ),
    ],
)
def test_settings_that_a_backend_does_not_have_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(*overrides)


# --- a model without weights is the model ---


MODELS = ["glyph", "tiny-qwen-image", "tiny-flux", "tiny-sd3", "tiny-wan", "tiny-hunyuan-video", "tiny-z-image"]


def family(name: str) -> Any:
    return plugins.find("models", name)(small(model=name).model)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_skeleton_is_what_from_pretrained_makes_but_for_the_weights(name: str, dtype: torch.dtype) -> None:
    from digen.models.skeleton import skeleton, weight_files

    model = family(name)
    whole = model.transformer_class.from_pretrained(model.path, subfolder="transformer", torch_dtype=dtype)
    empty = skeleton(model.transformer_class, model.path, "transformer", dtype)
    described = [{n: (t.shape, t.dtype) for n, t in m.named_parameters()} for m in (whole, empty)]
    assert described[0] == described[1]
    assert all(p.is_meta for p in empty.parameters())
    buffers = [dict(m.named_buffers()) for m in (whole, empty)]
    assert buffers[0].keys() == buffers[1].keys()
    stored = Pieces(weight_files(model.path, "transformer"))
    for n, buffer in buffers[1].items():
        assert buffer.dtype == buffers[0][n].dtype
        assert n in stored.shapes or torch.equal(buffer, buffers[0][n])
    assert all(torch.equal(stored.whole(n).to(p.dtype), p) for n, p in whole.named_parameters())


@pytest.mark.parametrize("name", ["glyph", "tiny-wan"])
def test_adapters_on_a_skeleton_start_as_they_do_on_the_model(name: str) -> None:
    from digen.backends.worker import add_adapters

    made = []
    for empty in (False, True):
        model = family(name)
        model.empty = empty
        model.load("cpu", torch.bfloat16, text_encoder=False, decoder=False)
        add_adapters(model, 4, 8.0, None)
        made.append(trainable(model.transformer))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][n], p) and p.dtype == torch.float32 for n, p in made[1].items())
    assert any(p.any() for p in made[1].values())


# --- blocks that run twice ---


@pytest.mark.parametrize("lora", [[], ["trainer.lora={rank: 4}"]], ids=["full", "adapters"])
def test_blocks_that_run_twice_keep_less_and_give_the_same_gradients_to_the_bit(lora: list[str]) -> None:
    gradients, kept = [], []
    for twice in ("false", "true"):
        config = small(*lora, "algorithm.loss.kl=0.1", f"trainer.activation_checkpointing={twice}")
        local = make_local(MemoryStore(), config, "local")
        batch, sizes = samples(local, 0, 0, "local"), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.nbytes) or x, lambda x: x):
            local.accumulate(batch, 0, DENOMINATOR, last=True)
        gradients.append(local.gradients())
        kept.append(sum(sizes))
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())
    assert kept[1] < 0.3 * kept[0]


def test_a_model_that_cannot_run_its_blocks_twice_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Glyph.transformer_class, "_supports_gradient_checkpointing", False)
    monkeypatch.setattr(Glyph, "load", None)
    with pytest.raises(ConfigError, match="activation_checkpointing=true: QwenImageTransformer2DModel has no such"):
        make_local(MemoryStore(), small("trainer.activation_checkpointing=true"), "local")


# --- one trainer after the other in the same processes: starting them takes longer than training ---


class Ranks:
    """A rank that is one trainer, and can be asked what it has and sends."""

    def __init__(self, values: Any, context: WorkerContext) -> None:
        self.values, self.context = {**values, "reward": {}}, context

    def load(self, values: Any = None) -> None:
        self.trainer = None
        values = {**values, "reward": {}} if values else self.values
        kind: Any = plugins.find("trainers", values["trainer"]["backend"])
        self.trainer = kind(values, self.context)
        self.trainer.load()

    def ask(self, method: str, *args: Any) -> Any:
        return getattr(self.trainer, method)(*args)

    def count(self, calls: list[tuple[Any, ...]]) -> dict[str, int]:
        """How often which collective is called by these calls of the trainer."""
        with Counted() as counted:
            for method, *args in calls:
                self.ask(method, *args)
        return dict(counted.counts)

    def peak(self, calls: list[tuple[Any, ...]]) -> int:
        """Most bytes of memory that these calls have on top of what there is."""
        with Watched() as watched:
            for method, *args in calls:
                self.ask(method, *args)
        return watched.peak

    def peak_of_loading(self, values: Any) -> int:
        self.trainer = None
        gc.collect()
        with Watched() as watched:
            self.load(values)
        return watched.peak

    def units(self) -> list[list[str]]:
        """The parameters of each unit that is gathered as one, and that are trained."""
        from torch.distributed.fsdp import FSDPModule

        root = self.trainer.model.transformer
        units = [m for m in root.modules() if isinstance(m, FSDPModule)]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        names = {id(p): n for n, p in trainable(root).items()}
        return [[names[id(p.sharded_param)] for p in g.fsdp_params if id(p.sharded_param) in names] for g in groups]

    def held(self) -> tuple[int, int]:
        """Parameters that are registered here, and of how many in all."""
        parameters = list(self.trainer.model.transformer.parameters())
        here = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        return sum(p.numel() for p in here), sum(p.numel() for p in parameters)

    def loaded(self) -> dict[str, bool]:
        parts = self.trainer.model.pipeline.components
        return {name: parts[name] is not None for name in ("text_encoder", "tokenizer", "vae")}


class Counted(TorchDispatchMode):
    """Counts what is asked of the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back in plain tensors
        namespace, _, name = func.name().partition("::")
        if "c10d" in namespace and "wait" not in name:
            self.counts[name.strip("_")] += 1
        return func(*args, **(kwargs or {}))


class Watched:
    """The most memory that the process had for itself meanwhile (not what it mapped of files)."""

    def __enter__(self) -> Self:
        self.start = self.now()
        self.most, self.stop = self.start, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.peak = self.most - self.start

    def watch(self) -> None:
        while not self.stop.wait(0.002):
            self.most = max(self.most, self.now())

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@pytest.fixture(scope="module")
def engine(warm: Any) -> Iterator[Any]:
    """Processes, and where their tensors are."""
    engine = warm()
    with shared_folder(engine.store.folder):
        yield engine


@pytest.fixture(scope="module")
def begin(engine: Any) -> Callable[[RunConfig[Any]], Call]:
    """Make a trainer as a config says; what is returned asks all its ranks."""
    made: list[RunConfig[Any]] = []

    def make(config: RunConfig[Any]) -> Call:
        made.append(config)
        spec = WorkerSpec("trainer", f"{HERE}:Ranks", payload(config), ranks=config.trainer.ranks)
        call = asking(engine.begin(spec, f"trainer-{len(made)}"))
        call("load")
        return call

    return make


def asking(ranks: Call) -> Call:
    """Their own methods, and those of their trainers."""
    return lambda method, *args: ranks(method, *args) if hasattr(Ranks, method) else ranks("ask", method, *args)


@dataclass(frozen=True)
class Step:
    """One step of the plain process: what it trained on, what came out."""

    scored: list[ScoredRollout]
    gradient_scale: float
    stats: list[Stats]
    gradients: Tensors
    report: StepReport
    weights: Tensors


def make_local(store: TensorStore, config: RunConfig[Any], name: str) -> Any:
    from digen.backends.training.local import LocalTrainer

    local = LocalTrainer({**payload(config), "reward": {}}, WorkerContext(name, 0, 1, "cpu", store))
    local.load()
    return local


def asked(worker: Any) -> Call:
    """A worker of this process, asked as those of others are."""
    return lambda method, *args: (getattr(worker, method)(*args),)


def samples(local: Any, step: int, index: int, group: str) -> ScoredRollout:
    microbatch = MicroBatch(step, index, PROMPTS[index : index + 1], 3, 0)
    rollout = Rollout(microbatch, step, (local.generate(microbatch, step, (0, 1, 2)),), group)
    return credit.credit(rollout, [float((7 * row + step) % 5) for row in range(3)], local.algorithm)


def train_locally(engine: Any, config: RunConfig[Any], name: str) -> list[Step]:
    """Three steps that are applied; after the first, one with a gradient that is not finite, one of dropped groups."""
    local = make_local(engine.store, config, name)
    bad, nothing = {"advantages": (float("nan"),) * 3}, {"keep": (False,) * 3}
    done = []
    for step, (change, scale) in enumerate([({}, 1.0), (bad, 1.0), (nothing, 1.0), ({}, 0.5), ({}, 2.0)]):
        scored = [replace(samples(local, step, index, name), **change) for index in range(2)]
        stats = [local.accumulate(one, 0, DENOMINATOR, last=k == 1) for k, one in enumerate(scored)]
        gradients, report = local.gradients(), local.optimizer_step(scale)
        weights = {n: w.clone() for n, w in local.state().items()}
        done.append(Step(scored, scale, stats, gradients, report, weights))
    assert [step.report.applied for step in done] == [True, False, False, True, True]
    return done


KINDS = {"full": ["algorithm.loss.kl=0.1"], "adapters": ["algorithm.loss.kl=0.1", "trainer.lora={rank: 4}"]}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(engine: Any, begin: object, kind: str) -> list[Step]:
    return train_locally(engine, small(*KINDS[kind]), f"local-{kind}")


def relative(a: Tensors, b: Tensors) -> float:
    """Relative difference by norm; a parameter that no sample reaches has no gradient there and zero here."""
    zero = torch.zeros(())
    pairs = [(a.get(n, zero).double(), b.get(n, zero).double()) for n in a.keys() | b.keys()]
    difference = sum(float((x - y).square().sum()) for x, y in pairs)
    return (difference / sum(float(y.square().sum()) for _, y in pairs)) ** 0.5


def assert_follows(call: Call, reference: list[Step], engine: Any, tolerance: float = 1e-5) -> None:
    before: Tensors = {}
    for version, step in enumerate(reference, 1):
        parts = [call("accumulate", one, 0, DENOMINATOR, k == 1) for k, one in enumerate(step.scored)]
        gradients = call("gradients")
        report = call("optimizer_step", step.gradient_scale)
        assert call("gradients") == ({},) * len(gradients)
        weights = weights_of(call)
        assert len(set(map(repr, report))) == 1, "all ranks report the same"
        assert (report[0].applied, report[0].finite) == (step.report.applied, step.report.finite)
        if step.report.applied:
            assert max(relative(one, step.gradients) for one in gradients) <= tolerance, f"step {version}"
            assert_same_figures([merge_stats(*one) for one in parts], step.stats, tolerance)
            assert report[0].grad_norm == pytest.approx(step.report.grad_norm, rel=tolerance)
            assert report[0].weight_delta == pytest.approx(step.report.weight_delta, rel=10 * tolerance)
        else:
            assert report[0].weight_delta == 0
            assert all(torch.equal(weights[n], before[n]) for n in weights)
        assert max(float((weights[n] - w).abs().max()) for n, w in step.weights.items()) <= tolerance
        before = weights


def assert_same_figures(here: list[dict[str, Any]], there: list[Stats], tolerance: float) -> None:
    """Loss, ratio and KL of every micro-batch. A KL compares two nearly equal means, which magnifies rounding."""
    for a, b in zip(here, there, strict=True):
        assert a.keys() == b.keys()
        assert all(a[name].count == b[name].count for name in b), "rows that only keep ranks in step do not count"
        assert a["loss"].mean == pytest.approx(b["loss"].mean, abs=10 * tolerance)
        assert a["ratio"].mean == pytest.approx(b["ratio"].mean, abs=tolerance)
        if "kl" in b:
            assert a["kl"].mean == pytest.approx(b["kl"].mean, rel=1e-3, abs=1e-9)


def weights_of(call: Call) -> Tensors:
    """What the generators get, whole; on no rank but the first."""
    first, *others = call("state")
    assert others == [{}] * len(others)
    return {n: w.clone() for n, w in first.items()}


ONE, TWO, FOUR = (["trainer.backend=fsdp", f"trainer.ranks={n}"] for n in (1, 2, 4))
OFFLOAD, HYBRID, PASS = "trainer.cpu_offload=true", "trainer.shard_ranks={}", "trainer.sync_gradients=pass"
TWICE = "trainer.activation_checkpointing=true"
PLACES = {
    "1 rank": ONE,
    "1 rank, offload": [*ONE, OFFLOAD],
    "2 ranks": TWO,
    "2 ranks, offload": [*TWO, OFFLOAD],
    "2 ranks, blocks run twice": [*TWO, TWICE],
    "2 ranks, summed in every pass": [*TWO, PASS],
    "2 ranks, all of it": [*TWO, OFFLOAD, TWICE, PASS],
    "2 copies of 1 rank": [*TWO, HYBRID.format(1)],
    "2 copies of 1 rank, offload, summed in every pass": [*TWO, HYBRID.format(1), OFFLOAD, PASS],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_every_placement_does_what_one_process_does(
    name: str, kind: str, reference: list[Step], begin: Any, engine: Any
) -> None:
    assert_follows(begin(small(*KINDS[kind], *PLACES[name])), reference, engine)


@pytest.mark.slow
def test_four_ranks_in_two_rows_do_what_one_process_does(
    kind: str, reference: list[Step], begin: Any, engine: Any
) -> None:
    more = [] if kind == "full" else [PASS, OFFLOAD, TWICE]
    assert_follows(begin(small(*KINDS[kind], *FOUR, HYBRID.format(2), *more)), reference, engine)


OPTIONS = {
    "guidance: two forward passes before one backward": ["algorithm.loss.kl=0.1", "sampling.guidance=3"],
    "bfloat16 over adapters": ["trainer.lora={rank: 4}", "trainer.dtype=bfloat16"],
    "adamw": [
        "algorithm.loss.kl=0.1",
        "trainer.optimizer=adamw",
        "trainer.learning_rate=1e-2",
        "trainer.adam_eps=1e-2",
        "trainer.max_grad_norm=null",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_training_mean_the_same(name: str, begin: Any, engine: Any) -> None:
    reference = train_locally(engine, small(*OPTIONS[name]), f"local-{name[:5]}")
    call = begin(small(*OPTIONS[name], *TWO, TWICE, PASS))
    assert_follows(call, reference, engine, tolerance=0.05 if "bfloat16" in name else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["trainer.lora={rank: 4}"]], ids=["full", "adapters"])
def test_parameters_gathered_in_bfloat16_train_as_autocast_does_and_are_kept_in_float32(
    lora: list[str], begin: Any, engine: Any
) -> None:
    half = ["trainer.dtype=bfloat16", *lora]
    reference = train_locally(engine, small(*half), f"local-half-{len(lora)}")
    call = begin(small(*half, *TWO, "trainer.gather_dtype=bfloat16"))
    assert_follows(call, reference, engine, tolerance=0.05)
    assert {w.dtype for w in weights_of(call).values()} == {torch.float32}
    call("accumulate", reference[0].scored[0], 0, DENOMINATOR, True)
    assert {g.dtype for g in call("gradients")[0].values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny-")])
def test_every_family_is_divided_block_by_block_and_trains_the_same(name: str, begin: Any, engine: Any) -> None:
    for lora in ([], ["trainer.lora={rank: 4}"]):
        settings = [*lora, "algorithm.loss.kl=0.1", "reward={jpeg-compressibility: {}}"]
        reference = train_locally(engine, small(*settings, model=name), f"local-{name}-{len(lora)}")
        call = begin(small(*settings, *TWO, OFFLOAD, TWICE, model=name))
        assert_follows(call, reference, engine)
        here, whole = call("held")[0]
        assert here < 0.6 * whole
        assert len(call("units")[0]) > 2


class WholeGlyph(Glyph):
    """A family of somebody who does not know that a transformer may be loaded without its weights."""

    def load(self, *args: Any, **kwargs: Any) -> None:
        self.empty = False
        super().load(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [OFFLOAD]], ids=["", "offload"])
def test_a_model_that_is_loaded_whole_is_divided_too(more: list[str], begin: Any, engine: Any) -> None:
    prompts = f"data.prompts={Path(family('glyph').path) / 'prompts' / 'train.txt'}"
    settings, model = ["algorithm.loss.kl=0.1", prompts], f"{HERE}:WholeGlyph"
    reference = train_locally(engine, small(*settings, model=model), f"local-whole-{len(more)}")
    call = begin(small(*settings, *TWO, *more, model=model))
    assert_follows(call, reference, engine)


# --- gradients that come from elsewhere; checkpoints ---


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [OFFLOAD], [HYBRID.format(1)], [PASS]], ids=["", "offload", "copies", "pass"])
def test_gradients_that_generators_hand_over_are_added_also_after_the_trainer_has_generated(
    more: list[str], begin: Any, engine: Any
) -> None:
    """In the first step the trainer computes some itself and others hand over twice; in the next they compute all."""
    helped = ["schedule.tag=none", "schedule.assist=both", "algorithm.loss.clip=0.9"]
    call = begin(small(*helped, *TWO, *more))
    names = [f"{role}-{'-'.join(more)}" for role in ("local", "helper")]
    local, helper = (make_local(engine.store, small(*helped), name) for name in names)
    for step in range(2):
        scored = [samples(local, step, index, names[0]) for index in range(2)]
        if step == 0:
            for trains in (call, asked(local)):
                trains("accumulate", scored[0], 1, DENOMINATOR, True)
        made = assert_generates_as(local, call, step, engine)
        assert max(made) <= 1e-5
        for k, one in enumerate(scored):
            helper.version = step
            helper.accumulate(one, 1, DENOMINATOR, last=True)
            handed = engine.store.put(f"{names[1]}/{step}/{k}", helper.gradients())
            helper.model.transformer.zero_grad(set_to_none=True)
            call("add_gradients", handed)
            local.add_gradients(handed)
            engine.store.drop(handed)
        assert max(relative(one, local.gradients()) for one in call("gradients")) <= 1e-5
        call("optimizer_step", 1.0)
        local.optimizer_step(1.0)
        found, wanted = weights_of(call), local.state()
        assert max(float((found[n] - w).abs().max()) for n, w in wanted.items()) <= 1e-5
    assert max(assert_generates_as(local, call, 2, engine)) <= 1e-5


def assert_generates_as(local: Any, call: Call, version: int, engine: Any) -> list[float]:
    """Largest difference of each rank's latents from those that one process makes under the same weights."""
    microbatch = MicroBatch(version, 0, PROMPTS[:1], 3, 0)
    shards = call("generate", microbatch, version, (0, 1, 2))
    whole = engine.store.get(local.generate(microbatch, version, (0, 1, 2)).trajectory)["latents"]
    assert [shard.rows for shard in shards] == ([(0, 2), (1,)] if len(shards) == 2 else [(0, 1, 2)])
    made = [engine.store.get(shard.trajectory)["latents"][: len(shard.rows)] for shard in shards]
    return [float((a - whole[list(shard.rows)]).abs().max()) for a, shard in zip(made, shards, strict=True)]


RESUMED = [
    "algorithm.loss.clip=0.9",  # the same samples in every step: they must count in every one
    "trainer.optimizer=adamw",
    "trainer.adam_eps=1e-2",
    "trainer.learning_rate=1e-2",
    "trainer.ema={decay: 0.5}",
]
PLACED = {
    "offload": [*TWO, OFFLOAD],
    "copies": [*TWO, HYBRID.format(1), OFFLOAD],
    "two ranks": TWO,
    "one rank": ONE,
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds: weights, average, moments."""
    files = sorted(folder.rglob("*.safetensors"))
    moments = Pieces([path for path in files if path.name.startswith("optimizer")])
    others = [Pieces([path]) for path in files if not path.name.startswith("optimizer")]
    assert len(others) == 2
    return {f"{k} {name}": file.whole(name) for k, file in enumerate([moments, *others]) for name in file.shapes}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["offload", "copies"])
def test_who_goes_on_from_a_checkpoint_does_what_would_have_been_done(
    writer: str, begin: Any, engine: Any, tmp_path: Path
) -> None:
    batch = samples(make_local(engine.store, small(), f"local-resume-{writer}"), 0, 0, "local")

    def step(trains: Call) -> None:
        trains("accumulate", batch, 0, 9.0, True)
        trains("optimizer_step", 1.0)

    through = begin(small(*RESUMED, *PLACED[writer]))
    for _ in range(2):
        step(through)
    through("save", tmp_path / "two")
    step(through)
    through("save", tmp_path / "three")
    wanted, before = tensors_of(tmp_path / "three"), tensors_of(tmp_path / "two")
    assert sum(not torch.equal(before[n], w) for n, w in wanted.items()) > len(wanted) / 2

    def check(trains: Call, name: str, tolerance: float) -> None:
        trains("resume", tmp_path / "two", 2)
        step(trains)
        trains("save", tmp_path / name)
        found = tensors_of(tmp_path / name)
        assert found.keys() == wanted.keys()
        assert max(float((found[n] - w).abs().max()) for n, w in wanted.items()) <= tolerance, name

    for name, placement in PLACED.items():
        check(begin(small(*RESUMED, *placement)), name, 0 if name == writer else 1e-6)
    local = make_local(engine.store, small(*RESUMED), f"local-resumed-{writer}")
    check(asked(local), "local", 1e-6)


# --- a trainer that generates (TAG) ---


WAYS = ["sharded", "gathered", "copy"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["trainer.lora={rank: 4}"]], ids=["full", "adapters"])
def test_a_sharded_trainer_generates_in_three_ways_the_same_samples_to_the_bit_under_every_version(
    lora: list[str], begin: Any, engine: Any
) -> None:
    settings = [*lora, "trainer.learning_rate=3"]
    made: dict[str, list[torch.Tensor]] = {}
    for way in WAYS:
        call = begin(small(*settings, *TWO, f"trainer.generate_with={way}"))
        local = make_local(engine.store, small(*settings), f"local-{way}-{len(lora)}")
        batch = samples(local, 0, 0, f"local-{way}")
        assert call("held")[0][0] < 0.6 * call("held")[0][1]
        for version in range(2):
            assert max(assert_generates_as(local, call, version, engine)) <= 1e-5
            assert call("held")[0][0] < 0.6 * call("held")[0][1], "nothing stays whole after a call"
            shards = call("generate", MicroBatch(0, 0, PROMPTS[:1], 3, 0), version, (0, 1, 2))
            latents = [engine.store.get(shard.trajectory)["latents"] for shard in shards]
            made.setdefault(way, []).extend(x[: len(s.rows)] for x, s in zip(latents, shards, strict=True))
            for trains in (call, asked(local)):
                trains("accumulate", batch, 0, DENOMINATOR, True)
                trains("optimizer_step", 1.0)
    for way in WAYS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made["sharded"], made[way], strict=True))
    assert not torch.equal(made["copy"][0], made["copy"][2]), "the second version is another one"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["trainer.lora={rank: 4}"]], ids=["full", "adapters"])
def test_gathered_in_bfloat16_samples_are_the_same_whether_once_a_call_or_in_every_pass(
    lora: list[str], begin: Any, engine: Any
) -> None:
    made = []
    for way in WAYS[:2]:
        half = ["trainer.dtype=bfloat16", "trainer.gather_dtype=bfloat16", f"trainer.generate_with={way}"]
        call = begin(small(*lora, *TWO, *half))
        shards = call("generate", MicroBatch(0, 0, PROMPTS[:1], 4, 0), 0, (0, 1, 2, 3))
        made.append([engine.store.get(shard.trajectory)["latents"] for shard in shards])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.slow
def test_how_often_a_generating_trainer_gathers_its_weights_depends_on_the_way_alone(begin: Any) -> None:
    microbatch = MicroBatch(0, 0, PROMPTS[:1], 4, 0)
    found = {}
    for way in WAYS:
        call = begin(small(*TWO, f"trainer.generate_with={way}"))
        units = len(call("units")[0])
        calls = [("generate", microbatch, 0, (0, 1, 2, 3))]
        first, second = (call("count", calls)[0] for _ in range(2))
        found[way] = first, second, units
    passes = 2 * 4  # two samples of each rank, one at a time; four denoising steps
    first, second, units = found["sharded"]
    assert first == second == {"allgather_base": passes * units}
    first, second, units = found["gathered"]
    assert first == second == {"allgather_base": units}
    first, second, _ = found["copy"]
    assert sum(first.values()) > 0, "the copy takes the weights of a new version"
    assert second == {}


@pytest.mark.slow
@pytest.mark.parametrize(("tag", "loaded"), [("none", False), ("static(1)", True)])
def test_who_never_generates_loads_no_decoder_and_nobody_a_text_encoder_before_it_must(
    tag: str, loaded: bool, begin: Any
) -> None:
    call = begin(small(*TWO, f"schedule.tag={tag}"))
    assert call("loaded") == ({"text_encoder": False, "tokenizer": loaded, "vae": loaded},) * 2


# --- what is sent, and what it takes ---


FOUR_STEPS = ["sampling.num_steps=5", "algorithm.loss.kl=0"]


def four_steps(engine: Any, name: str, *settings: str) -> list[ScoredRollout]:
    """Two micro-batches of two samples with four trained timesteps each: a sample for each of two ranks."""
    local = make_local(engine.store, small(*FOUR_STEPS, *settings), f"four-{name}")
    found = []
    for index in range(2):
        microbatch = MicroBatch(0, index, PROMPTS[index : index + 1], 2, 0)
        rollout = Rollout(microbatch, 0, (local.generate(microbatch, 0, (0, 1)),), "local")
        found.append(credit.credit(rollout, [0.0, 1.0], local.algorithm))
    return found


def a_step(scored: list[ScoredRollout], width: int) -> list[tuple[Any, ...]]:
    updates = [("accumulate", one, width, DENOMINATOR, k == len(scored) - 1) for k, one in enumerate(scored)]
    return [*updates, ("optimizer_step", 1.0)]


COUNTED = {
    "full weights": ([], 2),
    "full weights, blocks run twice": ([TWICE], 2),
    "full weights, offload": ([OFFLOAD], 2),
    "adapters": (["trainer.lora={rank: 4}"], 2),
    "adapters, in float64": (["trainer.lora={rank: 4}", "trainer.dtype=float64"], 2),
    "full weights, KL to the base": (["algorithm.loss.kl=0.1"], 3),
    "full weights, summed in every pass": ([PASS], 2),
}


def norm(gradient: Tensors) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5


def norm_of_samples(call: Call, scored: list[ScoredRollout]) -> float:
    """Norms of the samples' own gradients, added up. A step's gradient is what they leave of each other (advantages
    are above and below 0), and float32 rounds each of them, by 9e-7 of its norm with adapters (5e-7 without). Against
    float64, width 1 is off by 1.3e-6 of the step's gradient, wider passes by 1.2e-6, and by 1e-6 from each other."""
    alone = [replace(one, keep=keep) for one in scored for keep in ((True, False), (False, True))]
    found = []
    for one in alone:
        call("accumulate", one, 0, DENOMINATOR, True)
        found.append(norm(call("gradients")[0]))
        call("optimizer_step", 0.0)
    return sum(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_stacking_timesteps_divides_the_number_of_gathers_and_gradients_are_summed_once_a_step(
    name: str, begin: Any, engine: Any
) -> None:
    settings, per_pass = COUNTED[name]
    scored = four_steps(engine, name)
    call = begin(small(*FOUR_STEPS, *settings, *TWO))
    units = call("units")[0]
    trained = [names for names in units if names]
    assert len({n for names in units for n in names}) == sum(map(len, units)), "each parameter is in one unit"
    gathers, gradients = {}, {}
    for width in (1, 2, 4, 0):
        counts = call("count", a_step(scored, width)[:-1])[0]
        passes = len(scored) * -(-4 // (width or 4))
        gathers[width] = counts.pop("allgather_base")
        assert gathers[width] == passes * per_pass * len(units)
        summed = passes if PASS in settings else 1
        assert counts == {"reduce_scatter_base": summed * len(trained)}
        gradients[width] = call("gradients")[0]
        step = call("count", [("optimizer_step", 0.0)])[0]  # no step: weights stay as they are
        assert not any("gather" in name or "scatter" in name for name in step)
    assert [gathers[1] / gathers[width] for width in (1, 2, 4, 0)] == [1, 2, 4, 4]
    assert any(g.any() for g in gradients[1].values())
    added = norm_of_samples(call, scored) if name == "adapters" else norm(gradients[1])
    off = max(relative(gradients[width], gradients[1]) for width in (2, 4, 0)) * norm(gradients[1])
    assert off <= (1e-12 if "float64" in name else 1e-6) * added
    assert off <= 1e-6


@pytest.fixture(scope="module")
def two_fresh() -> Iterator[tuple[ProcessEngine, Call]]:
    """Two ranks that have loaded a small model, and give memory back as soon as a tensor is gone."""
    engine, env = ProcessEngine(), {"MALLOC_MMAP_THRESHOLD_": "65536"}
    spec = WorkerSpec("ranks", f"{HERE}:Ranks", payload(small(*TWO)), ranks=2, threads=1, env=env)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine.open([spec])) as groups:
        call = asking(partial(portal.call, groups["ranks"].call))
        call("load")
        yield engine, call


@pytest.mark.slow
def test_wider_passes_take_more_memory_and_blocks_that_run_twice_less(two_fresh: tuple[ProcessEngine, Call]) -> None:
    """With 576 image tokens what a pass keeps is far more than the 1.1 M parameters of the model."""
    engine, call = two_fresh
    larger = ["model.height=96", "model.width=96"]
    scored, peaks = four_steps(engine, "memory", *larger), {}
    for twice in ("false", "true"):
        call("load", payload(small(*FOUR_STEPS, *larger, *TWO, f"trainer.activation_checkpointing={twice}")))
        call("peak", a_step(scored, 4))  # what the first step makes and keeps
        peaks[twice] = {width: max(call("peak", a_step(scored, width))) / 1e6 for width in (1, 2, 4)}
    once, again = peaks["false"], peaks["true"]
    assert 1.5 * once[1] < once[2] < 0.7 * once[4]
    assert all(again[width] < 0.6 * once[width] for width in (1, 2, 4))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a model of 604 MB of float32 weights, and their size in bytes."""
    from diffusers import QwenImageTransformer2DModel

    glyph, folder = Path(family("glyph").path), tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(glyph, folder, ignore=shutil.ignore_patterns("transformer", "prompts", "*.py", "__pycache__"))
    config = json.loads((glyph / "transformer" / "config.json").read_text())
    sizes = {"num_layers": 4, "num_attention_heads": 16, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
    known = {k: v for k, v in config.items() if not k.startswith("_")}
    with torch.device("meta"):
        shape = QwenImageTransformer2DModel(**{**known, **sizes}).state_dict()
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps({**config, **sizes}))
    weights = {n: torch.rand(t.shape).sub_(0.5).mul_(0.02) for n, t in shape.items()}
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder, sum(t.nbytes for t in weights.values())


@pytest.mark.slow
def test_no_rank_ever_has_more_than_its_part_of_a_model_that_it_loads(
    large: tuple[Path, int], two_fresh: tuple[ProcessEngine, Call]
) -> None:
    (folder, size), (_, call) = large, two_fresh
    assert size > 600e6
    settings = ["schedule.tag=none", f"model.path={folder}"]
    peaks = call("peak_of_loading", payload(small(*settings, "algorithm.loss.kl=0", *TWO)))
    assert max(peaks) < 0.6 * size, "half of it, and one tensor on the way"
    here, whole = call("held")[0]
    assert here <= 0.51 * whole
    peaks = call("peak_of_loading", payload(small(*settings, "algorithm.loss.kl=0.1")))  # the KL's base is a copy
    assert min(peaks) > 0.9 * size, "the measure sees a copy"


# --- whole runs ---


WARM = f"engine.name={HERE.parent}/warm.py:WarmEngine"


@pytest.mark.slow
def test_a_resumed_run_with_offload_and_copies_ends_as_one_that_was_never_left(tmp_path: Path, warm: None) -> None:
    places = [WARM, *TWO, OFFLOAD, HYBRID.format(1), TWICE, "trainer.generate_with=copy"]
    more = ["reward={jpeg-compressibility: {}}", "schedule.ordered=true", "checkpoint.every=1", *places]

    def train(name: str, steps: int, resume: list[str] | None = None) -> Path:
        run(small(*more, f"run_dir={tmp_path / name}", f"steps={steps}"), console=Console(quiet=True), resume=resume)
        return tmp_path / name

    straight = train("straight", 3)
    train("left", 2)
    left = train("left", 3, resume=[])
    states = [
        {path.name: Pieces([path]) for path in (folder / "checkpoints" / "step_000003").glob("*.safetensors")}
        for folder in (straight, left)
    ]
    assert states[0].keys() == states[1].keys()
    for name, pieces in states[0].items():
        assert all(torch.equal(pieces.whole(n), states[1][name].whole(n)) for n in pieces.shapes)
    assert {s.kind for s in read_spans(straight / "events.jsonl") if s.worker == "trainer"} >= {"assist", "update"}


@pytest.mark.slow
def test_runs_whose_trainer_generates_in_different_ways_learn_the_same(tmp_path: Path, warm: None) -> None:
    rows = {}
    for way in WAYS:
        folder = tmp_path / way
        settings = [WARM, *TWO, f"trainer.generate_with={way}", "schedule.ordered=true", f"run_dir={folder}"]
        run(small(*settings, "reward={jpeg-compressibility: {}}"), console=Console(quiet=True))
        rows[way] = read_rows(folder / "metrics.jsonl")
        assert any(s.kind == "assist" for s in read_spans(folder / "events.jsonl"))
    for way in WAYS[1:]:
        for a, b in zip(rows[way], rows["sharded"], strict=True):
            assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=1e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
