"""DeepSpeed is a place to train, not another way to train: every ZeRO stage does what one plain process does.

The plain process makes samples and trains on them; every other placement gets the same samples and must come to the
same gradients, figures and weights, step by step, also after steps that are not applied. Plain SGD: an optimizer that
divides by its own noise (Adam) would turn rounding into whole steps.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen import credit, plugins
from digen.checkpoint.tensors import Pieces
from digen.config import RunConfig
from digen.engines.base import WorkerContext, WorkerSpec
from digen.engines.store import shared_folder
from digen.errors import ConfigError, PluginError
from digen.observe.files import read_rows, read_spans
from digen.presets import payload, resolve
from digen.run import run
from digen.types import MicroBatch, Prompt, Rollout, ScoredRollout, Stats, StepReport, merge_stats
from digen.weights.fingerprint import glance
from digen.weights.shared_memory import SharedMemoryTransport

WARM = f"engine.name={Path(__file__).parent}/warm.py:WarmEngine"
PROMPTS = (Prompt(3, 'a sign that says "OPEN"'), Prompt(8, 'small red letters "CAT" on a white background'))
DENOMINATOR = 18.0
CLIPPING = 0.02
"""Below the norms of the gradients here, which are from 0.03 to 0.07."""
Tensors = Mapping[str, torch.Tensor]
Call = Callable[..., tuple[Any, ...]]


def small(*overrides: str) -> RunConfig[Any]:
    settings = [
        "steps=3",
        "data.prompts_per_step=2",
        "algorithm.samples_per_prompt=3",  # two ranks: two samples and one
        "sampling.num_steps=4",
        "trainer.batch_size=1",  # three passes a micro-batch, each of all timesteps
        "generator.batch_size=1",
        "trainer.optimizer=sgd",
        "trainer.learning_rate=0.3",
        "trainer.weight_decay=0",
        f"trainer.max_grad_norm={CLIPPING}",
        "schedule.tag=static(1)",
        "observe.tensorboard=false",
        *overrides,
    ]
    return resolve("flowgrpo", "glyph", None, settings, {})


# --- what cannot be had is said before anything is loaded ---


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.zero_stage=2"], r"trainer\.zero_stage=2 needs trainer\.backend=deepspeed, got local"),
        (["trainer.backend=fsdp", "trainer.zero_stage=3"], r"trainer\.backend=deepspeed, got fsdp"),
        (
            ["trainer.cpu_offload=true"],
            r"trainer\.cpu_offload=true needs trainer\.backend=fsdp or deepspeed, got local",
        ),
        (["trainer.backend=deepspeed", "trainer.zero_stage=4"], r"trainer\.zero_stage: got 4.*1, 2, 3"),
        (["trainer.backend=deepspeed", "trainer.dtype=float64"], r"trainer\.dtype=float64 is not possible"),
        (["trainer.backend=deepspeed", "trainer.optimizer=adamw-8bit"], r"adamw-8bit needs .*; allowed: adamw, sgd"),
    ],
)
def test_settings_that_do_not_apply_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(*overrides)


def test_without_the_package_the_extra_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    with pytest.raises(PluginError, match=r"trainer 'deepspeed' needs deepspeed: pip install 'digen\[deepspeed\]'"):
        plugins.target("trainers", "deepspeed")


def test_settings_are_checked_without_importing_deepspeed() -> None:
    assert small("trainer.backend=deepspeed", "trainer.zero_stage=3").trainer.zero_stage == 3
    assert "deepspeed" not in sys.modules


# --- one trainer after the other in the same processes: starting them takes longer than training ---


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
        target, values = plugins.target("trainers", config.trainer.backend), {**payload(config), "reward": {}}
        call: Call = engine.begin(
            WorkerSpec("trainer", target, values, ranks=config.trainer.ranks), f"trainer-{len(made)}"
        )
        call("load")
        return call

    return make


@dataclass(frozen=True)
class Step:
    """One step of the plain process: what it trained on, what came out."""

    scored: list[ScoredRollout]
    gradient_scale: float
    stats: list[Stats]
    gradients: Tensors
    report: StepReport
    weights: Tensors


def make_local(engine: Any, config: RunConfig[Any], name: str) -> Any:
    from digen.backends.training.local import LocalTrainer

    local = LocalTrainer({**payload(config), "reward": {}}, WorkerContext(name, 0, 1, "cpu", engine.store))
    local.load()
    return local


def samples(local: Any, step: int, index: int, group: str) -> ScoredRollout:
    microbatch = MicroBatch(step, index, PROMPTS[index : index + 1], 3, 0)
    rollout = Rollout(microbatch, step, (local.generate(microbatch, step, (0, 1, 2)),), group)
    return credit.credit(rollout, [float((7 * row + step) % 5) for row in range(3)], local.algorithm)


def train_locally(engine: Any, config: RunConfig[Any], name: str) -> list[Step]:
    """Three steps that are applied; after the first, one with a gradient that is not finite, one of dropped groups."""
    local = make_local(engine, config, name)
    bad, nothing = {"advantages": (float("nan"),) * 3}, {"keep": (False,) * 3}
    done = []
    for step, (change, scale) in enumerate([({}, 1.0), (bad, 1.0), (nothing, 1.0), ({}, 0.5), ({}, 2.0)]):
        scored = [replace(samples(local, step, index, name), **change) for index in range(1 if change else 2)]
        stats = [local.accumulate(one, 0, DENOMINATOR, last=one is scored[-1]) for one in scored]
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
        parts = [call("accumulate", one, 0, DENOMINATOR, one is step.scored[-1]) for one in step.scored]
        gradients = call("gradients")
        report = call("optimizer_step", step.gradient_scale)
        assert call("gradients") == ({},) * len(gradients)
        weights = published(call, version, engine)
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


def published(call: Call, version: int, engine: Any) -> Tensors:
    """What the generators get: whole tensors, which are what they were hashed to."""
    first, *others = call("push", version)
    here = WorkerContext("generator", 0, 1, "cpu", engine.store, shared_dir=engine.store.folder)
    transport = SharedMemoryTransport(small(), here)
    entries = transport.read(first).layout.entries
    weights = {entry.name: torch.empty(entry.shape, dtype=entry.type) for entry in entries}
    transport.pull(first, weights)
    transport.proven()
    assert glance(weights, version) == first.fingerprint
    assert others == [None] * len(others)
    engine.store.drop(first.weights)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["false", "true"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_on_every_number_of_ranks_does_what_one_process_does(
    stage: int, ranks: int, offload: str, kind: str, reference: list[Step], begin: Any, engine: Any
) -> None:
    placement = [f"trainer.zero_stage={stage}", f"trainer.ranks={ranks}", f"trainer.cpu_offload={offload}"]
    call = begin(small(*KINDS[kind], "trainer.backend=deepspeed", *placement))
    assert_follows(call, reference, engine)


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
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_training_mean_the_same_also_when_blocks_run_twice(
    name: str, stage: int, begin: Any, engine: Any
) -> None:
    reference = train_locally(engine, small(*OPTIONS[name]), f"local-{name[:5]}-{stage}")
    placement = ["trainer.backend=deepspeed", f"trainer.zero_stage={stage}", "trainer.ranks=2"]
    call = begin(small(*OPTIONS[name], *placement, "trainer.activation_checkpointing=true"))
    assert_follows(call, reference, engine, tolerance=0.05 if "bfloat16" in name else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_saved_weights_are_restored_and_trained_on(stage: int, begin: Any, engine: Any, tmp_path: Path) -> None:
    config = small("trainer.backend=deepspeed", "trainer.ranks=2", f"trainer.zero_stage={stage}")
    local = make_local(engine, small(), f"local-save-{stage}")
    first, call = samples(local, 0, 0, "local"), begin(config)
    call("accumulate", first, 0, 9.0, True)
    call("optimizer_step", 1.0)
    call("save", tmp_path)
    weights, call = published(call, 1, engine), begin(config)
    call("restore", tmp_path)
    restored = published(call, 0, engine)
    assert all(torch.equal(restored[n], w) for n, w in weights.items())
    local.restore(tmp_path)
    for trains in (call, lambda method, *args: getattr(local, method)(*args)):
        trains("accumulate", first, 0, 9.0, True)
        trains("optimizer_step", 1.0)
    after, there = published(call, 1, engine), local.state()
    assert max(float((after[n] - w).abs().max()) for n, w in there.items()) <= 1e-6
    assert max(float((after[n] - w).abs().max()) for n, w in weights.items()) > 1e-5


@pytest.mark.slow
def test_p44_adapters_saved_by_two_ranks_that_have_no_parameter_whole_are_all_there(
    begin: Any, engine: Any, tmp_path: Path
) -> None:
    adapters = [
        "trainer.lora={rank: 4}",
        "trainer.optimizer=adamw",
        "trainer.adam_eps=1e-2",
        "trainer.learning_rate=1e-2",
    ]
    local = make_local(engine, small(*adapters), "local-saving-adapters")
    call = begin(small(*adapters, "trainer.backend=deepspeed", "trainer.ranks=2", "trainer.zero_stage=3"))
    one = samples(local, 0, 0, "local-saving-adapters")
    for trains, name in ((call, "zero"), (lambda method, *args: getattr(local, method)(*args), "local")):
        trains("accumulate", one, 0, 9.0, True)
        trains("optimizer_step", 1.0)
        trains("save", tmp_path / name)
    saved, wanted = (load_file(tmp_path / name / "weights.safetensors") for name in ("zero", "local"))
    assert saved.keys() == wanted.keys()
    assert all(tensor.numel() == wanted[name].numel() > 0 for name, tensor in saved.items())
    assert max(float((tensor - wanted[name]).abs().max()) for name, tensor in saved.items()) <= 1e-6
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name), "what was learned is there"


RESUMED = [
    "algorithm.loss.clip=0.9",  # the same samples in every step: they must count in every one
    "trainer.optimizer=adamw",
    "trainer.adam_eps=1e-2",
    "trainer.learning_rate=1e-2",
    "trainer.ema={decay: 0.5}",
]
PLACED = {
    "the same": ["trainer.ranks=2"],
    "one rank": ["trainer.ranks=1"],
    "another stage": ["trainer.ranks=2", "trainer.zero_stage=1", "trainer.cpu_offload=true"],
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds: weights, average, moments."""
    files = [Pieces([path]) for path in sorted(folder.rglob("*.safetensors"))]
    assert len(files) == 3
    return {f"{k} {name}": file.whole(name) for k, file in enumerate(files) for name in file.shapes}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_who_goes_on_from_a_checkpoint_does_what_would_have_been_done(
    stage: int, begin: Any, engine: Any, tmp_path: Path
) -> None:
    zero = ["trainer.backend=deepspeed", f"trainer.zero_stage={stage}"]
    batch = samples(make_local(engine, small(), f"local-resume-{stage}"), 0, 0, "local")

    def step(trains: Call) -> None:
        trains("accumulate", batch, 0, 9.0, True)
        trains("optimizer_step", 1.0)

    through = begin(small(*RESUMED, *zero, "trainer.ranks=2"))
    for _ in range(2):
        step(through)
    through("save", tmp_path / "two")
    step(through)
    through("save", tmp_path / "three")
    wanted = tensors_of(tmp_path / "three")
    before = tensors_of(tmp_path / "two")
    assert sum(not torch.equal(before[n], w) for n, w in wanted.items()) > len(wanted) / 2

    def check(trains: Call, name: str, tolerance: float) -> None:
        trains("resume", tmp_path / "two", 2)
        step(trains)
        trains("save", tmp_path / name)
        found = tensors_of(tmp_path / name)
        assert found.keys() == wanted.keys()
        # Parameters that no sample reaches have no steps of their own in a plain optimizer.
        names = [n for n in wanted if name != "local" or not n.endswith("/step")]
        assert max(float((found[n] - wanted[n]).abs().max()) for n in names) <= tolerance, name

    for name, placement in PLACED.items():
        check(begin(small(*RESUMED, *zero, *placement)), name, 0 if name == "the same" else 1e-6)
    local = make_local(engine, small(*RESUMED), f"local-resumed-{stage}")
    check(lambda method, *args: (getattr(local, method)(*args),), "local", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_with_unequal_shares_generate_together_what_one_process_generates(
    stage: int, begin: Any, engine: Any
) -> None:
    call = begin(small("trainer.backend=deepspeed", "trainer.ranks=2", f"trainer.zero_stage={stage}"))
    local = make_local(engine, small(), f"local-assist-{stage}")
    microbatch = MicroBatch(0, 0, PROMPTS[:1], 3, 0)
    one, two = call("generate", microbatch, 0, (0, 1, 2))
    whole = engine.store.get(local.generate(microbatch, 0, (0, 1, 2)).trajectory)["latents"]
    assert (one.rows, two.rows) == ((0, 2), (1,))
    for shard in (one, two):
        latents = engine.store.get(shard.trajectory)["latents"][: len(shard.rows)]
        torch.testing.assert_close(latents, whole[list(shard.rows)], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [["trainer.ranks=1"], ["trainer.ranks=2"], ["trainer.cpu_offload=true"]])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_generators_hand_over_are_added(
    stage: int, placement: list[str], begin: Any, engine: Any
) -> None:
    """In the first step the trainer computes some itself and others hand over twice; in the next they compute all."""
    helped = [
        "schedule.tag=none",
        "schedule.assist=both",
        "trainer.learning_rate=10",
        "trainer.max_grad_norm=null",
    ]
    name = f"helped-{stage}-{placement[0]}"
    local, helper = (make_local(engine, small(*helped), f"{name}-{who}") for who in ("local", "helper"))
    call = begin(small(*helped, "trainer.backend=deepspeed", f"trainer.zero_stage={stage}", *placement))
    for step, num_own in enumerate((1, 0)):
        parts = [samples(local, step, index, name) for index in (0, 1, 0)]
        for one in parts[:num_own]:
            for trains in (call, lambda method, *args: getattr(local, method)(*args)):
                trains("accumulate", one, 0, DENOMINATOR, True)  # nobody knows which is the last one
        for k, one in enumerate(parts[num_own:]):
            helper.accumulate(one, 0, DENOMINATOR, last=True)
            handed = engine.store.put(f"{name}/{step}/{k}", helper.gradients())
            helper.model.transformer.zero_grad(set_to_none=True)
            call("add_gradients", handed)
            local.add_gradients(handed)
            engine.store.drop(handed)
        gradients = call("gradients")
        assert max(relative(one, local.gradients()) for one in gradients) <= 1e-5
        call("optimizer_step", 1.0)
        local.optimizer_step(1.0)
        found, wanted = published(call, step + 1, engine), local.state()
        assert max(float((found[n] - w).abs().max()) for n, w in wanted.items()) <= 1e-5


# --- whole runs ---


@pytest.mark.slow
@pytest.mark.parametrize("shared", [["schedule.tag=static(1)"], ["schedule.tag=none", "schedule.assist=both"]])
def test_a_whole_run_on_two_ranks_learns_what_a_local_one_learns(shared: list[str], tmp_path: Path, warm: Any) -> None:
    folders = {}
    placements = {"local": [], "zero": ["trainer.backend=deepspeed", "trainer.zero_stage=3", "trainer.ranks=2"]}
    for name, placement in placements.items():
        folders[name] = tmp_path / name
        more = [WARM, f"run_dir={folders[name]}", "reward={jpeg-compressibility: {}}", "trainer.lora={rank: 4}"]
        run(small(*more, *shared, *placement), console=Console(quiet=True))
    rows = {name: read_rows(folder / "metrics.jsonl") for name, folder in folders.items()}
    assert len(rows["zero"]) == 3
    for a, b in zip(rows["zero"], rows["local"], strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], rel=1e-2)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
        assert a["step_applied"]
    kinds = {span.kind for span in read_spans(folders["zero"] / "events.jsonl") if span.worker == "trainer"}
    assert "assist" in kinds or shared[0] == "schedule.tag=none"


@pytest.mark.slow
def test_the_demo_learns_on_two_ranks_that_have_no_parameter_whole(tmp_path: Path, warm: Any) -> None:
    """Its first eight steps. All 45, evaluated on held-out prompts: docs/learning.md."""
    pytest.importorskip("rapidocr", reason="extra ocr is not installed")
    zero = ["trainer.backend=deepspeed", "trainer.zero_stage=3", "trainer.ranks=2"]
    run(
        resolve("flowgrpo", "glyph", None, [*zero, WARM, "steps=8", f"run_dir={tmp_path}"], {}),
        console=Console(quiet=True),
    )
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert max(row["ratio/max_error"] for row in rows) <= 1e-6
    first, last = (fmean(row["reward/mean"] for row in part) for part in (rows[:3], rows[-3:]))
    assert last - first > 0.06
