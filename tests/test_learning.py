"""The demo learns what docs/learning.md says, within the ranges of docs/learning.json (rule: learning is real)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_demo_learns_within_the_documented_ranges(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/learning.py", "--check", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documented_gains_are_those_that_were_asked_for() -> None:
    results = json.loads((ROOT / "docs" / "learning.json").read_text())["results"]
    page = (ROOT / "docs" / "learning.md").read_text()
    gains = {name: [r["gain"] for r in results if r["algorithm"] == name] for name in ("flowgrpo", "dancegrpo")}
    assert len(gains["flowgrpo"]) == 3
    assert min(gains["flowgrpo"]) >= 0.20
    assert min(gains["dancegrpo"]) >= 0.10
    assert all(f"{gain:+.3f}" in page for values in gains.values() for gain in values)
