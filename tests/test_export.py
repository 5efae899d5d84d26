"""Exports are read by a process that knows diffusers alone, and by digen; live and averaged weights are told apart."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from digen import plugins, presets
from digen.backends import noise
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.cli import app
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import ConfigError, SyncError
from digen.evaluate import evaluate, sample
from digen.export import LORA_FILE, Export, export
from digen.trained import EMA, find
from digen.weights.state import trainable

TEXTS = ['a sign that says "OPEN"', 'small red letters "CAT" on a white background']
NUM_STEPS = 4
KINDS = ("lora", "transformer")
LABELS = ("live", "ema")

ELSEWHERE = """
import json, sys
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file

base, texts, num_steps, folder, exports = json.loads(sys.argv[1])
initial = load_file(f"{folder}/initial.safetensors")["x"]
found = {}
for name, (kind, path) in exports.items():
    options = {} if kind == "lora" else {"transformer": QwenImageTransformer2DModel.from_pretrained(path)}
    pipe = QwenImagePipeline.from_pretrained(base, **options)
    pipe.set_progress_bar_config(disable=True)
    if kind == "lora":
        pipe.load_lora_weights(path)
    call = dict(prompt=texts, true_cfg_scale=1.0, height=32, width=32, num_inference_steps=num_steps)
    found[name] = pipe(**call, latents=initial.clone(), output_type="latent").images
assert not [name for name in sys.modules if name.startswith("digen")]
save_file(found, f"{folder}/elsewhere.safetensors")
"""


def worker(kind: type, config: Any) -> Any:
    loaded = kind({**presets.payload(config), "reward": {}}, WorkerContext("worker", 0, 1, "cpu", MemoryStore()))
    loaded.load()
    return loaded


def make_run(folder: Path, *overrides: str) -> Path:
    """The folder of a run of two steps on made-up gradients, large enough to be seen."""
    settings = [
        "steps=2",
        "seed=11",
        f"sampling.eval_num_steps={NUM_STEPS}",
        "trainer.learning_rate=3e-3",
        "engine.name=inline",
        "reward={jpeg-incompressibility: {}}",
        f"data.heldout={folder.parent / 'heldout.txt'}",
        *overrides,
    ]
    (folder.parent / "heldout.txt").write_text("\n".join(TEXTS))
    config = presets.resolve("flowgrpo", "glyph", None, settings, {})
    trainer = worker(LocalTrainer, config)
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        for p in trainable(trainer.model.transformer).values():
            p.grad = torch.randn(p.shape, generator=generator)
        trainer.optimizer_step(1.0)
        trainer.save(folder / "checkpoints" / f"step_{seed:06d}")
    (folder / "config.yaml").write_text(presets.dump(config))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of adapters and one of full weights, both with an average."""
    folder = tmp_path_factory.mktemp("runs")
    average = "trainer.ema={decay: 0.9, warmup_steps: 3}"
    return {
        "lora": make_run(folder / "lora", average, "trainer.lora={rank: 4, alpha: 16}"),
        "transformer": make_run(folder / "full", average),
    }


@pytest.fixture(scope="module")
def exports(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    for kind in KINDS:
        for label in LABELS:
            done = export(runs[kind], folder / f"{kind}-{label}", label)  # type: ignore[arg-type]
            assert (done.format, done.weights, done.version) == (kind, label, 2)
            made[f"{kind}-{label}"] = done.path
    return made


@pytest.fixture(scope="module")
def elsewhere(exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Final latents of every export, as a plain pipeline in a process of its own makes them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    model = worker(DiffusersGenerator, presets.for_model("glyph")).model
    initial = noise.draw(4, noise.EVALUATION, [(0, 0), (1, 0)], noise.INITIAL, model.latent_shape)
    save_file({"x": initial}, folder / "initial.safetensors")
    base = str(plugins.folder("models", "glyph"))
    named = {name: (name.partition("-")[0], str(path)) for name, path in exports.items()}
    call = [sys.executable, "-c", ELSEWHERE, json.dumps([base, TEXTS, NUM_STEPS, str(folder), named])]
    subprocess.run(call, check=True, capture_output=True, cwd=folder, env={**os.environ, "PYTHONPATH": ""})
    return load_file(folder / "elsewhere.safetensors")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("kind", KINDS)
def test_p37_a_process_that_knows_diffusers_alone_draws_what_digen_draws(
    kind: str, label: Any, runs: dict[str, Path], exports: dict[str, Path], elsewhere: dict[str, torch.Tensor]
) -> None:
    trained = find(runs[kind], label)
    generator = worker(DiffusersGenerator, trained.config)
    untrained, _ = generator.sampler.evaluate(TEXTS, [0, 1], seed=4)
    for path in (trained.path, exports[f"{kind}-{label}"]):  # digen reads its checkpoint and its export alike
        generator.load_weights(path)
        latents, _ = generator.sampler.evaluate(TEXTS, [0, 1], seed=4)
        torch.testing.assert_close(elsewhere[f"{kind}-{label}"], latents, rtol=0, atol=1e-5)
    assert (latents - untrained).abs().max() > 1e-2


def test_p37_adapters_count_alpha_over_rank_here_and_in_the_export(
    runs: dict[str, Path], exports: dict[str, Path]
) -> None:
    """Rank 4 and alpha 16: W + (16 / 4) B A, in digen's own model and as peft merges what was exported."""
    from diffusers import QwenImagePipeline

    trained = find(runs["lora"], "live")
    model = worker(DiffusersGenerator, trained.config)
    model.load_weights(trained.path)
    pipe = QwenImagePipeline.from_pretrained(plugins.folder("models", "glyph"))
    base = {name: w.clone() for name, w in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(exports["lora-live"])
    pipe.fuse_lora()
    saved, layers = load_file(trained.path), model.model.transformer.named_modules()
    adapted = {name: layer for name, layer in layers if hasattr(layer, "lora_A")}
    assert len(saved) == 2 * len(adapted) > 0
    for name, layer in adapted.items():
        a, b = (saved[f"{name}.lora_{side}.default.weight"].double() for side in "AB")
        merged = base[f"{name}.weight"].double() + 16 / 4 * (b @ a)
        assert (merged - base[f"{name}.weight"].double()).abs().max() > 1e-4
        x = torch.eye(merged.shape[1])
        out = layer(x) - (0 if layer.base_layer.bias is None else layer.base_layer.bias)
        torch.testing.assert_close(out.T.double(), merged, rtol=0, atol=1e-6)
        fused = pipe.transformer.get_submodule(name).base_layer.weight
        torch.testing.assert_close(fused.double(), merged, rtol=0, atol=1e-6)


def test_p82_live_and_averaged_weights_differ_and_are_labelled(
    exports: dict[str, Path], elsewhere: dict[str, torch.Tensor]
) -> None:
    for kind in KINDS:
        assert (elsewhere[f"{kind}-live"] - elsewhere[f"{kind}-ema"]).abs().max() > 1e-3
        for label, words in (("live", "as the last step left them"), ("ema", "exponential moving average")):
            folder = exports[f"{kind}-{label}"]
            about = json.loads((folder / "digen.json").read_text())
            assert (about["weights"], about["format"], about["version"]) == (label, kind, 2)
            assert words in (folder / "README.md").read_text()


def test_the_model_card_says_what_was_trained_how_and_on_what(exports: dict[str, Path]) -> None:
    text = (exports["lora-ema"] / "README.md").read_text()
    for fact in ("glyph", "flowgrpo", "jpeg-incompressibility x 1", "rank 4, alpha 16", "| optimizer steps | 2 |"):
        assert fact in text
    for fact in ("| seed | 11 |", "those bundled with the model, 12 a step", "digen 0.1", "load_lora_weights"):
        assert fact in text
    assert "QwenImageTransformer2DModel.from_pretrained" in (exports["transformer-live"] / "README.md").read_text()
    assert str(plugins.folder("models", "glyph")) not in text  # a folder of the machine that made it


@pytest.mark.parametrize("name", ["lora-live", "transformer-live"])
def test_the_code_in_the_model_card_runs(name: str, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    code = (exports[name] / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(exports[name])
    found: dict[str, Any] = {}
    exec(code, found)
    assert type(found["pipe"].transformer).__name__ == "QwenImageTransformer2DModel"


def test_eval_and_sample_of_a_run_take_the_average_and_of_an_export_what_it_holds(
    runs: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    def picture(source: Path, label: Any = None) -> bytes:
        return sample(str(source), TEXTS[:1], tmp_path / "out", seed=3, weights=label)[0].read_bytes()

    run = runs["lora"]
    assert picture(run) == picture(run, "ema") == picture(exports["lora-ema"])
    assert picture(exports["lora-live"]) == picture(run, "live") != picture(run)
    quiet = Console(quiet=True)
    of_run, of_export = evaluate(run, console=quiet).as_dict(), evaluate(exports["lora-ema"], console=quiet).as_dict()
    assert (of_run["weights"], of_run["checkpoint"]) == ("ema", str(run / "checkpoints" / "step_000002"))
    assert (of_export["weights"], of_export["checkpoint"]) == ("ema", str(exports["lora-ema"]))
    for name in ("base_reward", "trained_reward", "num_prompts"):
        assert of_run[name] == of_export[name]
    assert evaluate(run, "live", console=quiet).trained_reward != of_run["trained_reward"]
    assert json.loads((exports["lora-ema"] / "eval.json").read_text()) == of_export


def test_on_the_command_line_any_checkpoint_can_be_exported(runs: dict[str, Path], tmp_path: Path) -> None:
    to = tmp_path / "new" / "export"
    options = ["--to", str(to), "--weights", "live", "--checkpoint", "1", "--json"]
    result = CliRunner().invoke(app, ["export", str(runs["lora"]), *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "path": str(to),
        "format": "lora",
        "weights": "live",
        "version": 1,
        "checkpoint": str(runs["lora"] / "checkpoints" / "step_000001"),
    }
    assert sorted(path.name for path in to.iterdir()) == ["README.md", "digen.json", LORA_FILE]
    assert [path.name for path in to.parent.iterdir()] == ["export"]


def test_the_keys_of_the_json_document_are_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text("utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("| `digen export"))
    keys = Export(Path(), "lora", "live", 0, Path()).as_dict()
    assert not [key for key in keys if f"`{key}`" not in line]


# --- what is refused ---


def test_what_is_not_there_is_named_with_what_is(
    runs: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    shutil.copytree(runs["lora"], run)
    with pytest.raises(ConfigError, match=r"--checkpoint: got 7\..*Allowed: 1, 2"):
        export(run, to, version=7)
    with pytest.raises(ConfigError, match="is an export already"):
        export(exports["lora-ema"], to)
    with pytest.raises(ConfigError, match=r"--weights=live: .* was exported with --weights=ema"):
        find(exports["lora-ema"], "live")
    with pytest.raises(ConfigError, match=r"--weights=ema: glyph is no folder"):
        sample("glyph", TEXTS, to, weights="ema")
    for path in run.glob(f"checkpoints/*/{EMA}"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"no ema/weights\.safetensors.*trainer\.ema.*allowed: --weights live"):
        export(run, to, "ema")
    assert find(run).weights == "live"
    for path in run.glob("checkpoints/*/weights.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        export(run, to)
    assert not to.exists()


def test_a_label_that_does_not_exist_is_refused_with_those_that_do(runs: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["sample", str(runs["lora"]), "--prompt", "a", "--weights", "emma"])
    assert result.exit_code == 2
    assert "--weights: got 'emma'. Did you mean 'ema'? Allowed: ema, live." in result.output


def test_a_folder_with_something_in_it_is_left_as_it_is_and_an_empty_one_is_used(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export(runs["lora"], to)
    assert [path.name for path in tmp_path.rglob("*")] == ["to", "mine.txt"]
    (to / "mine.txt").unlink()
    export(runs["lora"], to)
    assert (to / LORA_FILE).is_file()


def test_adapters_that_bind_to_nothing_are_an_error_where_they_are_written_and_where_they_are_read(
    runs: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(runs["lora"], run)
    file = run / "checkpoints" / "step_000002" / EMA
    for tensors in ({n.replace("to_q", "to_z"): t for n, t in load_file(file).items()}, {"x": torch.zeros(1)}):
        save_file(tensors, file)
        with pytest.raises(SyncError, match="missing"):
            export(run, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shutil.copytree(exports["lora-ema"], other)
    renamed = {n.replace("transformer.", "unet."): t for n, t in load_file(other / LORA_FILE).items()}
    save_file(renamed, other / LORA_FILE)
    generator = worker(DiffusersGenerator, find(other).config)
    with pytest.raises(SyncError, match="missing"):
        generator.load_weights(other)
    (other / LORA_FILE).unlink()
    with pytest.raises(SyncError, match="missing"):
        generator.load_weights(other)


def test_an_export_of_another_version_of_digen_is_refused_in_a_sentence(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(exports["lora-ema"], other)
    about = json.loads((other / "digen.json").read_text())
    about["config"]["trainer"]["of_the_future"] = 1
    (other / "digen.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"digen\.json cannot be read by this version"):
        find(other)
    (other / "digen.json").write_text("{")
    with pytest.raises(ConfigError, match=r"digen\.json cannot be read by this version"):
        find(other)
