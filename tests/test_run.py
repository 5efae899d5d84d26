"""Whole runs of the real bundled model in this process: what they write, what they refuse, how they end."""

import io
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from digen import presets
from digen.cli import app
from digen.errors import ConfigError, DivergedError
from digen.evaluate import evaluate, sample
from digen.observe.files import read_rows, read_spans
from digen.run import run

HERE = Path(__file__).parent
SMALL = (
    "engine.name=inline",
    "steps=2",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=4",
    "sampling.eval_num_steps=4",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
)


def start(folder: Path, *overrides: str, algorithm: str = "flowgrpo", console: Console | None = None) -> Any:
    config = presets.resolve(algorithm, "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    return run(config, console=console or Console(quiet=True))


def test_a_run_leaves_config_metrics_spans_samples_weights_and_a_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = start(folder, "observe.grid_every=1", "observe.tensorboard=true", "checkpoint.every=1")
    assert presets.load(folder / "config.yaml").steps == 2
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert {"reward/mean", "ratio/max_error", "grad_norm", "busy/generator", "log_prob_gap/step0"} <= rows[0].keys()
    kinds = {span.kind for span in read_spans(folder / "events.jsonl")}
    assert kinds - {"assist", "help", "reduce"} == {"load", "generate", "score", "update", "sync", "pull", "save"}
    grids = sorted(path.name for path in (folder / "samples").iterdir())
    assert grids == ["step_000000.png", "step_000001.png"]
    with Image.open(folder / "samples" / grids[0]) as grid:
        assert grid.width > 300
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    weights = load_file(folder / "checkpoints" / checkpoints[-1] / "weights.safetensors")
    assert sum(w.numel() for w in weights.values()) > 1e5
    assert list((folder / "tensorboard").iterdir())
    document = summary.as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["num_steps"] == 2
    assert document["run_dir"] == str(folder)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        start(tmp_path / name, f"seed={seed}", "schedule.ordered=true")  # else sums are taken in any order
        (path,) = (tmp_path / name / "checkpoints").glob("*/weights.safetensors")
        weights.append(path.read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("flowgrpo", ["trainer.lora={rank: 4, alpha: 8}", "algorithm.loss.kl=0.01"]),
        ("flowgrpo", ["algorithm.loss.kl=0.01", "sampling.guidance=3.0", "algorithm.noise.type=cps"]),
        ("flowgrpo", ["algorithm.advantage.scale=batch", "algorithm.loss.advantage_clip=null"]),
        ("flowgrpo", ["algorithm.best_of_n={best: 1, worst: 1}", "algorithm.steps.type=all-but-last"]),
        ("flowgrpo", ["trainer.dtype=bfloat16", "generator.dtype=bfloat16", "algorithm.old_log_prob=replay"]),
        ("dancegrpo", ["algorithm.same_initial_noise=true", "schedule.staleness=0.5", "schedule.tag=static(1)"]),
        ("dancegrpo", ["schedule.mode=colocated", "trainer.batch_size=3"]),
        (f"{HERE.parent}/examples/my_algorithm.py:MyAlgorithm", ["algorithm.steps.high=3", "algorithm.steps.size=2"]),
    ],
)
def test_what_can_be_combined_runs_and_learns(algorithm: str, overrides: list[str], tmp_path: Path) -> None:
    start(tmp_path / "run", *overrides, algorithm=algorithm)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    assert all(row["step_applied"] and row["weight_delta"] > 0 for row in rows)


BOOLEANS = [
    "data.shuffle",
    "observe.tensorboard",
    "schedule.ordered",
    "algorithm.same_initial_noise",
    "model.vae_tiling",
    "trainer.activation_checkpointing",
    "generator.offload_between_calls",
]


@pytest.mark.parametrize("value", ["off", "on"])
@pytest.mark.parametrize("key", BOOLEANS)
def test_every_boolean_option_runs_switched_off_and_on(key: str, value: str, tmp_path: Path) -> None:
    start(tmp_path / "run", "steps=1", f"{key}={value}")
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 1


def test_no_boolean_option_is_missing_from_the_list_above() -> None:
    from digen import schema
    from digen.algos.flowgrpo import FlowGRPO
    from digen.config import RunConfig

    known = schema.keys(RunConfig[FlowGRPO])
    found = {".".join(path) for path, field in known.items() if field.annotation is bool}
    elsewhere = {"algorithm.steps.per_sample", "trainer.cpu_offload"}  # the latter in test_deepspeed.py
    elsewhere |= {"reward.<name>.required", "eval_reward.<name>.required"}  # test_reward_run.py runs both
    assert found - elsewhere == set(BOOLEANS)


def test_a_diverging_run_stops_applies_nothing_non_finite_and_keeps_a_good_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wild = ["trainer.optimizer=sgd", "trainer.learning_rate=1e30", "trainer.max_bad_steps=2", "steps=9"]
    with pytest.raises(DivergedError, match=r"max_bad_steps=2"):
        start(folder, *wild, "checkpoint.every=1")
    rows = read_rows(folder / "metrics.jsonl")
    assert len(rows) < 9
    assert rows[0]["step_applied"]
    assert [row["step_applied"] for row in rows[-2:]] == [0, 0]
    newest = max((folder / "checkpoints").glob("*/weights.safetensors"))
    assert all(bool(w.isfinite().all()) for w in load_file(newest).values())


def test_long_prompts_give_one_note_with_the_number_and_the_limit_and_stay_whole(tmp_path: Path) -> None:
    terminal = io.StringIO()
    prompts = HERE / "prompts" / "edge" / "long_line.txt"
    start(
        tmp_path / "run",
        f"data.prompts={prompts}",
        "steps=1",
        "model.max_text_tokens=32",
        console=Console(file=terminal),
    )
    notes = [line for line in terminal.getvalue().splitlines() if "are cut by the text encoder" in line]
    assert len(notes) == 1
    assert "1 of 2 prompts have over 32 tokens" in notes[0]


def test_a_clip_range_below_the_noise_of_bfloat16_is_doubted(tmp_path: Path) -> None:
    terminal = io.StringIO()
    narrow = ["trainer.dtype=bfloat16", "algorithm.loss.clip=1e-5"]
    start(tmp_path / "run", *narrow, "steps=1", console=Console(file=terminal))
    assert "algorithm.loss.clip=1e-05 is below the noise" in terminal.getvalue()


def test_eval_compares_base_and_trained_on_the_same_noise(tmp_path: Path) -> None:
    folder, heldout = tmp_path / "run", tmp_path / "heldout.txt"
    heldout.write_text('a sign that says "ONE"\na sign that says "TWO"\na sign that says "SIX"\n')
    start(folder, f"data.heldout={heldout}", "trainer.learning_rate=1e-2")
    report = evaluate(folder, console=Console(quiet=True)).as_dict()
    assert report["num_prompts"] == 3
    assert report["base_reward"] != report["trained_reward"]
    assert report["gain"] == pytest.approx(report["trained_reward"] - report["base_reward"])
    assert json.loads((folder / "eval.json").read_text()) == report
    with Image.open(report["picture"]) as picture:
        assert picture.width > 200
    again = evaluate(folder, console=Console(quiet=True)).as_dict()
    assert again == report


def test_eval_of_a_run_that_learned_nothing_gains_nothing(tmp_path: Path) -> None:
    start(tmp_path / "run", "trainer.learning_rate=1e-30", "steps=1")
    report = evaluate(tmp_path / "run", console=Console(quiet=True))
    assert report.base_reward == pytest.approx(report.trained_reward, abs=1e-6)


@pytest.mark.slow
def test_single_samples_come_from_a_model_and_from_a_run(tmp_path: Path) -> None:
    start(tmp_path / "run", "trainer.learning_rate=1e-1", "steps=1")
    pictures = [
        sample(source, ['a sign that says "OPEN"'], tmp_path / out, seed=3, num_steps=4)[0].read_bytes()
        for source, out in (("glyph", "a"), ("glyph", "b"), (str(tmp_path / "run"), "c"))
    ]
    assert pictures[0] == pictures[1]
    assert pictures[0] != pictures[2]


def test_a_folder_that_is_no_run_and_a_run_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        evaluate(tmp_path, console=Console(quiet=True))
    start(tmp_path / "run", "steps=1")
    for path in (tmp_path / "run" / "checkpoints").glob("*/weights.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        evaluate(tmp_path / "run", console=Console(quiet=True))
    with pytest.raises(ConfigError, match="already holds a run"):
        start(tmp_path / "run")


@pytest.mark.slow
def test_p02_one_update_per_rollout_has_ratio_one_and_of_two_the_second_has_not_and_is_clipped(tmp_path: Path) -> None:
    more = ["data.prompts_per_step=4", "trainer.learning_rate=1e-3", "algorithm.loss.clip=1e-4"]
    start(tmp_path / "one", *more, "steps=3")
    start(tmp_path / "two", *more, "steps=6", "trainer.updates_per_rollout=2")
    one, two = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert (len(one), len(two)) == (3, 6)
    assert all(row["weight_delta"] > 0 and row["stale_share"] == 0 for row in [*one, *two])
    for row in [*one, *two[::2]]:
        assert max(row["ratio/max_error"], row["ratio/high"] - 1, 1 - row["ratio/low"]) <= 1e-6
        assert row["clip_fraction/mean"] == 0
    for row in two[1::2]:
        assert "ratio/max_error" not in row  # nothing of it is on-policy
        assert row["ratio/high"] - row["ratio/low"] > 1e-5
        assert row["clip_fraction/mean"] > 0
    spans = read_spans(tmp_path / "two" / "events.jsonl")
    assert all(s.version == s.step - s.step % 2 for s in spans if s.kind in {"generate", "assist"})
    assert [s.version for s in spans if s.kind == "pull"] == [2, 4]


def test_the_metrics_tell_an_on_policy_run_whose_ratio_is_one_from_one_with_stale_samples(tmp_path: Path) -> None:
    more = ["steps=4", "data.prompts_per_step=4", "trainer.learning_rate=1e-3", "algorithm.loss.clip=1e-4"]
    start(tmp_path / "fresh", *more)
    start(tmp_path / "stale", *more, "schedule.staleness=0.5", "generator.replicas=2")
    fresh, stale = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("fresh", "stale"))
    assert all(row["weight_delta"] > 0 for row in [*fresh, *stale])
    assert all(max(row["ratio/max_error"], row["ratio/high"] - 1, 1 - row["ratio/low"]) <= 1e-6 for row in fresh)
    assert all(row["clip_fraction/mean"] == 0 for row in fresh)
    behind = [row for row in stale if row["stale_share"] > 0]
    assert behind
    assert all(row["ratio/max_error"] <= 1e-6 for row in stale)  # of the samples that are on-policy
    assert all(row["ratio/high"] - row["ratio/low"] > 1e-5 for row in behind)
    assert max(row["clip_fraction/mean"] for row in behind) > 0


def test_p47_a_whole_run_of_the_bundled_model_asks_nobody_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: object, *_: object) -> None:
        assert self.family == socket.AF_UNIX, f"asked {address}"

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: pytest.fail(f"looked for {host}"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    start(tmp_path / "run", "steps=1")
    evaluate(tmp_path / "run", console=Console(quiet=True))


def test_p47_a_wrong_folder_and_a_missing_package_are_said_at_once_and_end_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys, time; begin = time.process_time()\n"
        "from digen.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, time.process_time() - begin < 2, 'torch' in sys.modules)"
    )
    words = ["run", "flowgrpo", "--model", "qwen-image", "model.path=./no_such_dir", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "True", "False"]
    assert "no_such_dir does not exist" in done.stderr
    assert not (tmp_path / "run").exists()
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)  # another test's
    monkeypatch.setattr("digen.plugins.find_spec", lambda _: None)
    missing = CliRunner().invoke(app, ["run", "flowgrpo", "--trainer", "deepspeed", "--run-dir", str(tmp_path / "run")])
    assert missing.exit_code == 2
    assert "pip install 'digen[deepspeed]'" in missing.stderr
