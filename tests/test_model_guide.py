"""The guide to adding a model can be followed to the letter: its pieces are the adapter, and its commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "models.md").read_text("utf-8").partition("## Adding a model")[2]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)


def lines(source: str) -> list[str]:
    return [line for line in source.splitlines() if line.strip()]


def test_the_pieces_of_the_guide_are_the_adapter_that_is_tested() -> None:
    source = (ROOT / "digen" / "models" / "z_image.py").read_text("utf-8")
    adapter = source[source.index("from __future__") : source.index("class TinyZImage")]
    adapter = adapter.replace("from digen.models.tiny import Tiny\n", "")
    assert lines("\n".join(blocks("python"))) == lines(adapter)


@pytest.mark.slow
def test_the_guide_followed_to_the_letter_trains_a_model(tmp_path: Path) -> None:
    (tmp_path / "z_image.py").write_text("\n".join(blocks("python")))
    (console,) = blocks("console")
    script = "\n".join(line.removeprefix("$ ") for line in console.splitlines())
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "samples" / "000.png").is_file()
    assert (tmp_path / "runs" / "z-image" / "checkpoints" / "step_000001" / "weights.safetensors").is_file()
