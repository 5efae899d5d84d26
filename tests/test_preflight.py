"""Missing weights are found before anything starts, and the message is the way to get them."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from digen import plugins
from digen.config import ModelConfig
from digen.errors import ConfigError
from digen.models import tiny
from digen.preflight import check_weights, missing_parts

PARTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "qwen"
    tiny.build("qwen_image", folder)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "qwen"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and nobody to ask."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def downloaded(cache: Path, repository: str, folder: Path) -> Path:
    """As `hf download` leaves it."""
    root = cache / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    return Path(shutil.copytree(folder, root / "snapshots" / "abc"))


def digen(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HOME": str(home)}
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"):
        env.pop(name, None)
    command = [sys.executable, "-m", "digen", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=home)


@pytest.mark.parametrize("model", ["qwen-image", "sd3.5-medium", "flux1-dev", "hunyuan-video"])
def test_a_run_without_weights_ends_at_once_with_the_command_that_gets_them(model: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = digen("run", "flowgrpo", "--model", model, "--run-dir", str(tmp_path / "run"), home=tmp_path)
    assert time.monotonic() - start < 30
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"error: the weights of {model} are not on this machine" in done.stderr
    repository = str(plugins.attribute("models", model, "default_path"))
    assert f"{repository} in {tmp_path}/hub" in done.stderr
    parts = plugins.attribute("models", model, "folders")
    assert isinstance(parts, tuple)
    wanted = " ".join(f"--include '{part}/*'" for part in parts)
    assert f"hf download {repository} --include 'model_index.json' {wanted}\n" in done.stderr
    licence = (
        f"licence     accept it at https://huggingface.co/{repository}, then `hf auth login`: there is no token here"
    )
    assert (licence in done.stderr) == (model in ("sd3.5-medium", "flux1-dev"))
    assert ("licence" in done.stderr) == (licence in done.stderr)
    assert not (tmp_path / "run").exists()


def test_a_token_that_is_here_is_seen(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_something")
    with pytest.raises(
        ConfigError, match=r"accept it at https://huggingface\.co/black-forest-labs/FLUX\.1-dev \(a token"
    ):
        check_weights(ModelConfig(name="flux1-dev"))


def test_drawing_with_a_model_asks_for_its_weights_too(tmp_path: Path) -> None:
    done = digen("sample", "flux1-dev", "--prompt", "a cat", home=tmp_path)
    assert done.returncode == 2
    assert "the weights of flux1-dev are not on this machine" in done.stderr


def test_nothing_is_asked_of_models_that_bring_or_make_their_weights(hub: Path) -> None:
    for name in ("glyph", "tiny-sd3", "tiny-hunyuan-video"):
        check_weights(ModelConfig(name=name))


def test_a_complete_folder_passes_and_each_missing_part_is_named(here: Path) -> None:
    model = ModelConfig(name="qwen-image", path=str(here))
    check_weights(model)
    (here / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (here / "tokenizer").rename(here / "words")
    with pytest.raises(ConfigError, match=r"is not complete; missing or without its weights: tokenizer, vae$"):
        check_weights(model)


def test_an_interrupted_download_is_told_from_a_whole_one(here: Path) -> None:
    folder = here / "transformer"
    one = folder / "diffusion_pytorch_model.safetensors"
    one.rename(folder / "part-1.safetensors")
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}')
    assert missing_parts(here, PARTS) == ["transformer"]
    (folder / "part-2.safetensors").symlink_to(folder / "blob")  # the cache's files are links
    assert missing_parts(here, PARTS) == ["transformer"]
    (folder / "blob").write_bytes(b"")
    assert missing_parts(here, PARTS) == []


def test_what_is_missing_of_a_download_is_named(hub: Path, made: Path) -> None:
    folder = downloaded(hub, "Qwen/Qwen-Image", made)
    check_weights(ModelConfig(name="qwen-image"))
    shutil.rmtree(folder / "text_encoder")
    with pytest.raises(ConfigError, match=r"missing     text_encoder\n"):
        check_weights(ModelConfig(name="qwen-image"))


def test_a_model_in_the_hubs_cache_loads_by_its_id_without_a_network(hub: Path, made: Path) -> None:
    downloaded(hub, "Qwen/Qwen-Image", made)
    family: Any = plugins.find("models", "qwen-image")(ModelConfig(name="qwen-image"))  # type: ignore[operator]
    family.load("cpu", torch.float32, text_encoder=True, decoder=True)
    assert family.encode("a cat")["embeds"].shape[-1] == 32
    bare: Any = plugins.find("models", "qwen-image")(ModelConfig(name="qwen-image"))  # type: ignore[operator]
    shutil.rmtree(hub / "models--Qwen--Qwen-Image" / "snapshots" / "abc" / "text_encoder")
    bare.load("cpu", torch.float32, text_encoder=False, decoder=False)


def test_the_listed_parts_are_those_of_diffusers_pipelines() -> None:
    for plugin in plugins.available("models"):
        if plugin.name == "glyph":
            continue
        family: Any = plugins.find("models", plugin.name)
        pipeline = family.pipeline_class
        needed = set(pipeline._get_signature_keys(pipeline)[0]) - set(pipeline._optional_components)
        assert needed <= set(family.folders) <= needed | {"transformer"}, plugin.name


# --- what is known of a plugin without importing it ---


def test_attributes_of_a_plugin_are_read_from_its_source_as_python_would_find_them() -> None:
    for plugin in plugins.available("models"):
        family: Any = plugins.find("models", plugin.name)
        for key in ("embeds_guidance", "folders", "gated", "default_path"):
            found = plugins.attribute("models", plugin.name, key)
            if (plugin.name, key) == ("glyph", "default_path"):  # made at import, not written down
                assert found is None
            else:
                assert found == getattr(family, key), (plugin.name, key)


def test_an_attribute_of_a_base_class_counts_unless_it_is_set_anew(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from digen.models.flux import Flux\n"
        "class A(Flux):\n    gated = False\n"
        "class B(A):\n    default_path: str\n    gated = open\n"
    )
    assert plugins.attribute("models", f"{path}:A", "gated") is False
    assert plugins.attribute("models", f"{path}:A", "default_path") == "black-forest-labs/FLUX.1-dev"
    assert plugins.attribute("models", f"{path}:B", "default_path") == "black-forest-labs/FLUX.1-dev"
    assert plugins.attribute("models", f"{path}:B", "gated") is None
    assert plugins.attribute("models", f"{path}:B", "nothing") is None
