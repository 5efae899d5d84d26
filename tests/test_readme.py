"""The README and the docs are true: their commands run as written, their options exist, their links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digen.cli import app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE_ELSEWHERE = {"make demo", "make test", "make check", "make test-slow", "make test-oldest"}
"""Run by the continuous integration itself, or they would start this test again."""


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and line not in MADE_ELSEWHERE]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after `make demo`, but for a run of two steps."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    shell("digen run flowgrpo --run-dir runs/demo --steps 2", folder)
    return folder


def shortened(command: str) -> tuple[str, dict[str, str]]:
    """With few prompts and few steps: 1, or where the command says how many, 3 and one more for each hundred."""
    has_config = "--resume" in command or not command.startswith("digen run")
    short = {} if has_config else {"DIGEN_STEPS": "1", "DIGEN_DATA__PROMPTS_PER_STEP": "2"}
    return re.sub(r"(?<!\w)steps([= ])(\d\d+)", lambda m: f"steps{m[1]}{3 + int(m[2]) // 100}", command), short


def shell(command: str, folder: Path) -> str:
    """What it prints, run by a shell."""
    command, short = shortened(command)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **short}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def here(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What it prints, run in this process, with workers that outlive it."""
    command, short = shortened(command)
    for name, value in {**short, "DIGEN_ENGINE__NAME": f"{Path(__file__).parent}/warm.py:WarmEngine"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="digen")
    assert done.exit_code == 0, done.stderr
    return done.stdout


def is_for_newcomers(command: str) -> bool:
    """Commands of the README that do work: a shell runs them, in the processes that a user would have."""
    return command in commands(README) and "--dry-run" not in command


@pytest.mark.slow
@pytest.mark.parametrize("command", dict.fromkeys(c for page in PAGES for c in commands(page) if c.startswith("digen")))
def test_a_command_of_the_documentation_runs_as_written(
    command: str, place: Path, warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (shell(command, place) if is_for_newcomers(command) else here(command, place, monkeypatch)).strip()


def test_every_command_of_the_documentation_is_one_that_the_tests_run() -> None:
    others = {c for page in PAGES for c in commands(page) if not c.startswith("digen")}
    assert others <= {"pip install 'digen[ocr]'", 'pip install "digen[ocr]"', "tensorboard --logdir runs"}


def test_every_option_named_in_the_documentation_exists() -> None:
    helps = "".join(
        subprocess.run(
            [sys.executable, "-m", "digen", *words, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for words in (
            *([], ["run"], ["eval"], ["export"], ["sample"], ["list"], ["plan"], ["trace"], ["doctor"], ["new"]),
            ["reward", "serve"],
        )
    )
    named = {
        option
        for page in PAGES
        for line in page.read_text().splitlines()
        if ("digen" in line or line.startswith("|")) and "benchmarks/" not in line
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }
    assert named - {"--logdir", "--check", "--folder", "--strict", "--quick"} <= set(
        re.findall(r"--[a-z][a-z-]+", helps)
    )


def test_every_relative_link_leads_to_a_file() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_path_and_name_in_the_paper_map_exists() -> None:
    table = (ROOT / "docs" / "concepts.md").read_text().split("## From the paper")[1].split("## ")[0]
    for path, names in re.findall(r"`(digen/[\w/.]+)`(?:: ((?:`[\w.]+`(?:, )?)+))?", table):
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        assert source or (ROOT / path).is_dir(), path
        for name in re.findall(r"`([\w.]+)`", names):
            assert all(re.search(rf"(?:def|class) {part}\b", source) for part in name.split(".")), f"{path}: {name}"
