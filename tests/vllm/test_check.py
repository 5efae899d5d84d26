"""`digen check-backends` on the real engine, in this process: a module of its own, as a process can hold one engine."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from digen.cli import app

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("model", "lora"),
    [("tiny-qwen-image", "null"), ("tiny-flux", "{rank: 8}"), ("tiny-sd3", "{rank: 8}"), ("tiny-sd3", "null")],
)
def test_both_backends_pass_the_check(model: str, lora: str, tmp_path: Path) -> None:
    words = ["check-backends", f"trainer.lora={lora}", "--model", model, "--out", str(tmp_path / "both.png")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "both.png").is_file()
