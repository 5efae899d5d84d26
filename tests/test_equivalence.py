"""Schedule, engine, number of workers and trainer change when and where work is done, never what is learned.

Three global steps of the bundled model, in every way in which digen can run them, against the naive run in one process.
Plain SGD: an optimizer that divides by its own noise (Adam) would turn rounding into whole steps.
"""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from digen.observe.files import read_rows, read_spans
from digen.presets import resolve
from digen.run import run
from digen.schedule.share import Share
from digen.schedule.tag import Choice

HERE = Path(__file__).parent
TOLERANCE = 1e-6
"""Relative difference of gradients, by norm: what is left is the rounding of sums that are taken in another order."""

QUICK = {
    "gap": ["schedule.mode=pipelined"],
    "gap, tsp": ["schedule.mode=pipelined", "trainer.tsp=0"],
    "gap, tsp, tag": ["schedule.mode=pipelined", "trainer.tsp=0", "schedule.tag=static(2)"],
    "tcss without staleness": ["schedule.mode=pipelined", "schedule.window=2", "schedule.staleness=0"],
    "colocated": ["schedule.mode=colocated"],
    "two replicas": ["schedule.mode=pipelined", "generator.replicas=2"],
    "micro-batches of 2": ["schedule.mode=pipelined", "schedule.prompts_per_microbatch=2"],
    "micro-batches of 4": ["schedule.prompts_per_microbatch=4"],
}
WARM = f"engine.name={HERE}/warm.py:WarmEngine"
PROCESSES = {
    "processes": ["engine.name=process", "schedule.mode=pipelined"],
    "two replicas and an assisting trainer": [
        WARM,
        "schedule.mode=pipelined",
        "generator.replicas=2",
        "schedule.tag=static(1)",
    ],
    "fsdp on one rank": [WARM, f"trainer.backend={HERE}/recording.py:RecordedFsdp"],
    "fsdp on two ranks": [
        WARM,
        f"trainer.backend={HERE}/recording.py:RecordedFsdp",
        "trainer.ranks=2",
    ],
    "a generator of two ranks": [WARM, "generator.ranks=2", "generator.batch_size=1"],
}


def train(folder: Path, *overrides: str) -> Path:
    settings = [
        "steps=3",
        "data.prompts_per_step=4",
        "algorithm.samples_per_prompt=4",
        "sampling.num_steps=6",
        "engine.name=inline",
        "schedule.mode=naive",
        "trainer.tsp=1",
        f"trainer.backend={HERE}/recording.py:RecordedLocal",
        f"generator.backend={HERE}/recording.py:RecordedGenerator",
        "trainer.optimizer=sgd",
        "trainer.learning_rate=0.3",
        "trainer.weight_decay=0",
        f'reward={{"{HERE}/recording.py:brightness": {{}}}}',
        "observe.tensorboard=false",
        f"run_dir={folder}",
        *overrides,
    ]
    run(resolve("flowgrpo", "glyph", None, settings, {}), console=Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "naive")


@pytest.fixture(scope="module")
def reference_of_single_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks share a group's samples, passes have fewer rows; with one row each, both sides have the same."""
    return train(tmp_path_factory.mktemp("runs") / "rows", "trainer.batch_size=1", "generator.batch_size=1")


def samples(folder: Path) -> list[str]:
    files = (folder / "recorded").glob("samples-*.txt")
    return sorted(line for file in files for line in file.read_text().splitlines())


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    return (difference / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5


def assert_same(folder: Path, reference: Path, tolerance: float = TOLERANCE) -> None:
    assert samples(folder) == samples(reference)
    for step in range(3):
        name = f"recorded/gradient-{step}.safetensors"
        assert relative(load_file(folder / name), load_file(reference / name)) <= tolerance, f"step {step}"
    weights = [load_file(next(f.glob("checkpoints/*/weights.safetensors"))) for f in (folder, reference)]
    assert max(float((weights[0][n] - weights[1][n]).abs().max()) for n in weights[0]) <= 1e-5
    rows = [read_rows(f / "metrics.jsonl") for f in (folder, reference)]
    for a, b in zip(*rows, strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_the_reference_really_learns_something(reference: Path) -> None:
    rows = read_rows(reference / "metrics.jsonl")
    assert all(row["step_applied"] and row["weight_delta"] > 1e-3 for row in rows)
    assert all(row["reward/std"] > 0 for row in rows)
    assert len(samples(reference)) == len({line.split()[-1] for line in samples(reference)}) == 3 * 16


@pytest.mark.parametrize("name", QUICK)
def test_in_one_process_every_schedule_learns_the_same(name: str, reference: Path, tmp_path: Path) -> None:
    assert_same(train(tmp_path / "run", *QUICK[name]), reference)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody takes half of every micro-batch, whatever it costs: pieces everywhere, on every worker that may."""
    monkeypatch.setattr(Share, "generate", lambda _self, _name, bubble, _costs: (bubble.next_rows + 1) // 2)
    monkeypatch.setattr(Share, "choose", lambda _self, bubble, _costs: Choice((bubble.next_rows + 1) // 2))
    monkeypatch.setattr(Share, "update", lambda _self, _name, bubble, _costs: (bubble.next_ready + 1) // 2)


def assert_shared(folder: Path, assist: str, reference: Path) -> None:
    """Same samples and weights as the reference, in pieces, by both sides where they may."""
    assert_same(folder, reference)
    spans = read_spans(folder / "events.jsonl")
    for kinds in ({"generate", "assist"}, {"update", "help"}):
        assert sum(s.kind in kinds for s in spans) > 3 * 4
    kinds = {s.kind for s in spans}
    assert (
        kinds & {"assist", "help"} == {"trainer": {"assist"}, "generator": {"help"}, "both": {"assist", "help"}}[assist]
    )


@pytest.mark.parametrize("assist", ["trainer", "generator", "both"])
def test_sides_that_take_over_each_others_work_piece_by_piece_learn_the_same(
    assist: str, halves: None, reference_of_single_rows: Path, tmp_path: Path
) -> None:
    rows = ["trainer.batch_size=1", "generator.batch_size=1", "generator.replicas=2"]
    folder = train(tmp_path / "run", "schedule.mode=pipelined", "schedule.tag=none", f"schedule.assist={assist}", *rows)
    assert_shared(folder, assist, reference_of_single_rows)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["trainer.lora={rank: 4}"]], ids=["full weights", "adapters"])
def test_pieces_on_a_sharded_trainer_and_a_generator_of_two_ranks_learn_the_same(
    lora: list[str], halves: None, tmp_path: Path, warm: None
) -> None:
    rows = ["trainer.batch_size=1", "generator.batch_size=1", *lora]
    ranks = [*PROCESSES["fsdp on two ranks"], "generator.ranks=2"]
    folder = train(tmp_path / "run", "schedule.mode=pipelined", "schedule.assist=both", *rows, *ranks)
    assert_shared(folder, "both", train(tmp_path / "local", *rows))


def test_the_measured_costs_alone_make_idle_sides_share_and_nothing_else_changes(
    reference: Path, tmp_path: Path
) -> None:
    folder = train(tmp_path / "run", "schedule.mode=pipelined", "schedule.assist=both", "generator.replicas=2")
    assert_same(folder, reference, tolerance=1e-5)
    assert {"assist", "help"} & {s.kind for s in read_spans(folder / "events.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_across_processes_every_placement_learns_the_same(
    name: str, reference: Path, reference_of_single_rows: Path, tmp_path: Path, warm: None
) -> None:
    overrides = PROCESSES[name]
    two_ranks = any("ranks=2" in text for text in overrides)
    rows = ["trainer.batch_size=1", "generator.batch_size=1"] if two_ranks else []
    folder = train(tmp_path / "run", *overrides, *rows)
    assert_same(folder, reference_of_single_rows if two_ranks else reference)


@pytest.mark.slow
def test_adapters_learn_the_same_on_two_sharded_ranks_and_see_the_same_kl(tmp_path: Path, warm: None) -> None:
    adapters = ["trainer.lora={rank: 4}", "trainer.batch_size=1"]
    sharded = [*PROCESSES["fsdp on two ranks"], "schedule.mode=pipelined"]
    assert_same(train(tmp_path / "sharded", *adapters, *sharded), train(tmp_path / "local", *adapters))
    # A KL term compares two nearly equal means, which magnifies rounding: compared as a figure, not to the last digit.
    kl = [
        read_rows(train(tmp_path / name, *adapters, "algorithm.loss.kl=0.1", *more) / "metrics.jsonl")[-1]["kl/mean"]
        for name, more in (("kl-sharded", sharded), ("kl-local", []))
    ]
    assert kl[0] == pytest.approx(kl[1], rel=1e-3)
    assert kl[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [["schedule.mode=pipelined", "schedule.tag=static(1)"], ["schedule.mode=colocated"]])
def test_a_sharded_trainer_generates_the_same_also_when_ranks_have_unequal_shares(
    more: list[str], tmp_path: Path, warm: None
) -> None:
    """Nine samples on two ranks, in passes of two: five and four samples would be three passes and two."""
    odd = ["algorithm.samples_per_prompt=3", "data.prompts_per_step=6", "schedule.prompts_per_microbatch=3"]
    rows = ["trainer.batch_size=1", "generator.batch_size=1"]
    folder = train(tmp_path / "sharded", *odd, *rows, *PROCESSES["fsdp on two ranks"], *more)
    assert_same(folder, train(tmp_path / "local", *odd, *rows))
    made_by = {(s.worker, s.kind) for s in read_spans(folder / "events.jsonl")}
    assert {("trainer", "assist"), ("trainer", "generate")} & made_by


def test_with_staleness_every_trajectory_has_one_version_at_most_one_behind_and_nothing_is_thrown_away(
    tmp_path: Path,
) -> None:
    overrides = ["schedule.mode=pipelined", "schedule.staleness=0.5", "steps=5", "generator.replicas=2"]
    folder = train(tmp_path / "run", *overrides)
    rows = read_rows(folder / "metrics.jsonl")
    assert max(row["stale_share"] for row in rows) == 0.5
    assert all(row["stale_share"] <= 0.5 for row in rows)
    lags = {int(step) - int(version) for step, _, _, version, _ in map(str.split, samples(folder))}
    assert lags == {0, 1}
    spans = read_spans(folder / "events.jsonl")
    made = sorted((s.step, s.index) for s in spans if s.kind in {"generate", "assist"})
    assert made == sorted((s.step, s.index) for s in spans if s.kind == "update")
    assert len(samples(folder)) == 5 * 16
