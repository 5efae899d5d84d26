"""Packages of plugins: `digen new`, and the one in `examples/`, installed by pip and run as their users would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digen import plugins
from digen.cli import app
from digen.errors import ConfigError
from digen.new import create

EXAMPLE = Path(__file__).parent.parent / "examples" / "branch-weighted"
Run = Callable[..., str]


def installed(package: Path, place: Path) -> Run:
    """Install a package beside everything else, for the processes that this starts; what they write to stdout."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", place, package], check=True)
    environ = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, env=environ, cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def listed(run: Run, kind: str, name: str) -> dict[str, str]:
    (found,) = [plugin for plugin in json.loads(run("digen", "list", "--json"))[kind] if plugin["name"] == name]
    return found


def test_the_example_package_is_installed_listed_passes_its_suite_and_is_resolved_by_name(tmp_path: Path) -> None:
    run = installed(EXAMPLE, tmp_path / "site")
    found = listed(run, "algorithms", "branch-weighted")
    assert found["source"] == "branch-weighted"
    assert found["summary"] == "Flow-GRPO without KL, its steps weighed by their noise."
    assert found["problem"] == ""
    assert "8 passed" in run("pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"))
    plan = run("digen", "run", "branch-weighted", "--model", "glyph", "--dry-run", "algorithm.loss.power=2", "--json")
    loss = json.loads(plan)["config"]["algorithm"]["loss"]
    assert (loss["type"], loss["power"]) == ("branch-weighted", 2.0)


@pytest.mark.slow
def test_the_example_package_trains_with_generator_and_trainer_in_processes_of_their_own(tmp_path: Path) -> None:
    run = installed(EXAMPLE, tmp_path / "site")
    small = ("algorithm.samples_per_prompt=4", "data.prompts_per_step=2", "sampling.num_steps=6", "steps=2")
    rows = tmp_path / "run"
    run("digen", "run", "branch-weighted", "--model", "glyph", "--run-dir", str(rows), *small)
    metrics = [json.loads(line) for line in (rows / "metrics.jsonl").read_text().splitlines()]
    assert [row["step_applied"] for row in metrics] == [1, 1]


def test_the_example_is_forty_lines_and_mentions_no_model() -> None:
    text = (EXAMPLE / "branch_weighted.py").read_text()
    assert len(text.splitlines()) <= 40
    assert "digen.models" not in text
    assert "digen.backends" not in text


@pytest.mark.parametrize(
    ("kind", "tests"),
    [
        ("reward", "6 passed"),
        *(pytest.param(k, n, marks=pytest.mark.slow) for k, n in (("algorithm", "8"), ("model", "10"))),
    ],
)
def test_a_new_package_passes_its_tests_as_it_is_written(kind: str, tests: str, tmp_path: Path) -> None:
    made = create(kind, f"some-{kind}", tmp_path / "package")
    run = installed(made.folder, tmp_path / "site")
    found = listed(run, f"{kind}s", f"some-{kind}")
    assert (found["source"], found["problem"]) == (f"some-{kind}", "")
    assert tests in run("pytest", "-q", "-p", "no:cacheprovider", str(made.folder / "tests"))
    if kind == "reward":
        assert f"some-{kind}:" in run(*made.command.split())


def test_the_command_says_what_was_written_and_what_comes_next(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "reward", "my-own", "--to", str(tmp_path / "a")])
    assert done.exit_code == 0
    assert str(tmp_path / "a" / "my_own.py") in done.output
    assert "pip install -e '.[test]' && pytest" in done.output
    done = CliRunner().invoke(app, ["new", "model", "my-own", "--to", str(tmp_path / "b"), "--json"])
    document = json.loads(done.stdout)
    assert set(document) == {"folder", "files", "command"}
    assert all(Path(path).is_file() for path in document["files"])


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("algorthm", "mine", "Did you mean 'algorithm'"),
        ("reward", "Mine", "allowed: lower-case words"),
        ("reward", "my_own", "allowed: lower-case words"),
        ("reward", "ocr", "one of digen's"),
        ("reward", "json", "module 'json' is there already"),
        ("reward", "class", "module 'class' is there already"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused_with_nothing_written(
    kind: str, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        create(kind, name, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        create("reward", "my-own", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --- broken packages ---


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add entry points of distributions that are not installed."""

    def offer(*found: tuple[str, str, str]) -> None:
        from importlib.metadata import EntryPoint, EntryPoints

        known = plugins._group("rewards")
        more = [EntryPoint(name, where, "digen.rewards") for name, where, _ in found]
        sources = {where: source for _, where, source in found}
        group = EntryPoints([*known, *more])
        monkeypatch.setattr(plugins, "_group", lambda kind: group if kind == "rewards" else EntryPoints([]))
        monkeypatch.setattr(plugins, "_source_of", lambda e: sources.get(f"{e.module}:{e.attr}", "digen"))

    return offer


def test_a_broken_plugin_is_named_with_its_reason_and_stops_nobody_who_does_not_ask_for_it(
    offers: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_plugin.py").write_text("def f(:\n")
    (tmp_path / "failing_plugin.py").write_text("def f():\n    pass\n\n\n1 / 0\n")
    offers(("gone", "no_such_module_anywhere:f", "other"), ("broken", "broken_plugin:f", "other"),
           ("nameless", "failing_plugin:g", "other"), ("fails", "failing_plugin:f", "other"))  # fmt: skip
    found = {plugin.name: plugin for plugin in plugins.available("rewards")}
    assert "module no_such_module_anywhere does not exist" in found["gone"].problem
    assert "broken_plugin.py:1: invalid syntax" in found["broken"].problem
    assert "got 'g'" in found["nameless"].problem
    assert found["ocr"].problem == ""
    assert plugins.find("rewards", "jpeg-compressibility")
    shown = CliRunner().invoke(app, ["list"])
    assert shown.exit_code == 0
    assert "broken: " in shown.output
    with pytest.raises(plugins.PluginError, match="failing_plugin:f cannot be imported: ZeroDivisionError"):
        plugins.find("rewards", "fails")


def test_a_name_that_two_packages_offer_is_refused_until_one_is_chosen(
    offers: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "second_ocr.py").write_text("def f():\n    pass\n")
    offers(("ocr", "second_ocr:f", "other"))
    with pytest.raises(plugins.PluginError, match=r"'ocr' is offered by digen \(digen.rewards.ocr:Ocr\) and other"):
        plugins.target("rewards", "ocr")
    assert [p.problem != "" for p in plugins.available("rewards") if p.name == "ocr"] == [True, True]
    assert plugins.target("rewards", "second_ocr:f") == "second_ocr:f"
