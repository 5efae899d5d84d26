"""Plugins: by entry point, by file, by module; every way to be wrong is one sentence."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from digen import plugins
from digen.algos.flowgrpo import FlowGRPO
from digen.config import RunConfig
from digen.errors import ConfigError, PluginError
from digen.presets import resolve


@pytest.fixture
def plugin_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        '"""My rewards."""\n\n\ndef brightness(media, prompts, metadata):\n    """Mean brightness."""\n    return []\n'
    )
    return path


def test_a_built_in_is_found_by_its_entry_point() -> None:
    assert plugins.find("algorithms", "flowgrpo") is FlowGRPO


def test_target_says_where_a_plugin_is() -> None:
    assert plugins.target("algorithms", "flowgrpo") == "digen.algos.flowgrpo:FlowGRPO"


def test_a_file_plugin_loads_once_and_its_target_is_absolute(
    plugin_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plugin_file.parent)
    assert plugins.target("rewards", "mine.py:brightness") == f"{plugin_file}:brightness"
    assert plugins.find("rewards", "mine.py:brightness") is plugins.find("rewards", f"{plugin_file}:brightness")


def test_a_module_plugin_is_found_by_its_dotted_path() -> None:
    assert plugins.find("algorithms", "digen.algos.flowgrpo:FlowGRPO") is FlowGRPO


def test_origin_is_the_inverse_of_load_for_modules_and_files(tmp_path: Path) -> None:
    path = tmp_path / "algo.py"
    path.write_text("from digen.algos.flowgrpo import FlowGRPO\n\n\nclass Mine(FlowGRPO):\n    pass\n")
    mine = plugins.find("algorithms", f"{path}:Mine")
    assert isinstance(mine, type)
    assert plugins.load(plugins.origin(mine)) is mine
    assert plugins.load(plugins.origin(FlowGRPO)) is FlowGRPO


def test_an_unknown_name_is_answered_with_the_nearest_and_all_names() -> None:
    with pytest.raises(PluginError, match=r"algorithm: got 'flowgrop'. Did you mean 'flowgrpo'\? Allowed: .*dancegrpo"):
        plugins.target("algorithms", "flowgrop")


def test_a_plugin_error_is_a_config_error_with_exit_code_2() -> None:
    assert issubclass(PluginError, ConfigError)
    assert PluginError.exit_code == 2


@pytest.mark.parametrize("look", [plugins.target, plugins.find])
def test_a_missing_file_is_named(look, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"file .*nowhere\.py does not exist"):
        look("rewards", f"{tmp_path}/nowhere.py:brightness")


def test_a_missing_attribute_is_answered_with_the_nearest(plugin_file: Path) -> None:
    with pytest.raises(PluginError, match=r"reward in .*mine\.py: got 'brightnes'. Did you mean 'brightness'\?"):
        plugins.target("rewards", f"{plugin_file}:brightnes")


def test_a_missing_module_is_named() -> None:
    with pytest.raises(PluginError, match=r"module digen\.rewards\.nothing does not exist"):
        plugins.target("rewards", "digen.rewards.nothing:Name")


def test_a_syntax_error_gives_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    with pytest.raises(PluginError, match=r"broken\.py:1: invalid syntax"):
        plugins.target("rewards", f"{path}:f")


def test_a_wrong_import_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import not_installed_anywhere\n\n\ndef f():\n    pass\n")
    with pytest.raises(PluginError, match=r"wrong\.py:f cannot be imported: No module named 'not_installed_anywhere'"):
        plugins.find("rewards", f"{path}:f")


def test_a_file_that_failed_to_import_is_tried_again_after_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "fixed.py"
    path.write_text("import not_installed_anywhere\n\n\ndef f():\n    pass\n")
    with pytest.raises(PluginError):
        plugins.find("rewards", f"{path}:f")
    path.write_text("def f():\n    return 1.0\n")
    assert callable(plugins.find("rewards", f"{path}:f"))


def test_a_missing_optional_dependency_names_the_extra_before_any_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "needs.py"
    path.write_text("def f():\n    import rapidocr\n\n    return rapidocr\n")
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "rapidocr", raising=False)
    with pytest.raises(PluginError, match=r"needs rapidocr: pip install 'digen\[ocr\]'"):
        plugins.target("rewards", f"{path}:f")


def test_a_dependency_inside_a_try_can_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tries.py"
    path.write_text("try:\n    import rapidocr\nexcept ImportError:\n    rapidocr = None\n\n\ndef f():\n    pass\n")
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    assert plugins.target("rewards", f"{path}:f").endswith("tries.py:f")


def test_a_name_that_is_assigned_or_imported_counts_as_an_attribute(tmp_path: Path) -> None:
    path = tmp_path / "names.py"
    path.write_text("from math import sqrt\n\nif True:\n    other = sqrt\n")
    for name in ("sqrt", "other"):
        assert plugins.find("rewards", f"{path}:{name}") is plugins.load("math:sqrt")


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_every_entry_point_of_digen_exists_and_says_what_it_is(
    kind: plugins.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of extras that are not installed here too."""
    monkeypatch.setattr(plugins, "_check_extras", lambda *_: None)
    found = plugins.available(kind)
    assert found
    for plugin in found:
        assert plugins.target(kind, plugin.name)
        assert plugins.installed_name(kind, plugins.target(kind, plugin.name)) == plugin.name
        if plugin.source == "digen":
            assert plugin.summary


def test_listing_imports_no_plugin() -> None:
    code = (
        "import sys; from digen import plugins; [plugins.available(k) for k in plugins.KINDS]; "
        "print([m for m in ('torch', 'diffusers', 'numpy', 'digen.models', 'digen.rewards') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_optional_dependency_of_the_project_maps_to_an_extra() -> None:
    extras = plugins._extras(distribution("digen"))
    assert extras["rapidocr"] == "ocr"
    assert extras["vllm_omni"] == "vllm"
    assert "pytest" not in extras


# --- every kind goes through the same door ---

PROMPTS = Path(__file__).parent / "prompts" / "simple_animals.txt"
SETTINGS = ("steps=1", "data.prompts_per_step=2", "schedule.assist=none", f"data.prompts={PROMPTS}")
OWN = {
    "models": ("digen.models.glyph:Glyph", "model.name"),
    "generators": ("digen.backends.generation.diffusers:DiffusersGenerator", "generator.backend"),
    "trainers": ("digen.backends.training.local:LocalTrainer", "trainer.backend"),
    "engines": ("digen.engines.process:ProcessEngine", "engine.name"),
    "transports": ("digen.weights.shared_memory:SharedMemoryTransport", "weights.transport"),
    "policies": ("digen.schedule.bts:Bts", "schedule.tag"),
    "rewards": ("digen.rewards.jpeg:JpegCompressibility", "reward"),
    "algorithms": ("digen.algos.flowgrpo:FlowGRPO", ""),
}


def test_every_kind_is_tried_here() -> None:
    assert set(OWN) == set(plugins.KINDS)


@pytest.mark.parametrize("kind", OWN)
def test_a_plugin_of_any_kind_may_be_a_file_and_a_wrong_one_is_refused_before_anything_is_loaded(
    kind: plugins.Kind, tmp_path: Path
) -> None:
    built_in, key = OWN[kind]
    module, _, name = built_in.partition(":")
    path = tmp_path / "mine.py"
    path.write_text(f"from {module} import {name}\n\n\nclass Mine({name}):\n    pass\n")

    def resolved(word: str) -> RunConfig[Any]:
        setting = f'reward={{"{word}": {{}}}}' if key == "reward" else f"{key}={word}"
        return resolve(word if not key else "flowgrpo", None, None, [*SETTINGS, *([setting] if key else [])], {})

    config = resolved(f"{path}:Mine")
    assert config.data.prompts_per_step == 2
    found = plugins.find(kind, f"{path}:Mine")
    assert isinstance(found, type)
    assert found.__mro__[1].__qualname__ == name
    with pytest.raises(ConfigError, match=r"Did you mean 'Mine'"):
        resolved(f"{path}:Mein")
