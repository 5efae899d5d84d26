"""The GPU kit in miniature on a CPU: every section runs, and what goes wrong is named and ends with an exit code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def kit(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "benchmarks/gpu_kit.py", "--tiny", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (out / "gpu_kit.json").is_file(), done.stderr
    document: dict[str, Any] = json.loads((out / "gpu_kit.json").read_text())
    return done.returncode, {one["section"]: one for one in document["sections"]}


def test_a_section_that_takes_too_long_is_ended_and_those_after_it_are_named(tmp_path: Path) -> None:
    code, found = kit(tmp_path, "--budget", "11", "--only", "correctness,sync")
    assert code == 1
    assert list(found) == ["build", "correctness", "sync"]
    assert found["sync"]["status"] in ("skipped", "timeout")
    assert found["sync"]["problems"]
    page = (tmp_path / "gpu_kit.md").read_text()
    assert f"## sync: {found['sync']['status']}" in page


@pytest.mark.slow
def test_every_section_runs_on_a_cpu_and_every_check_holds(tmp_path: Path) -> None:
    code, found = kit(tmp_path)
    assert {name: one["problems"] for name, one in found.items()} == {name: [] for name in found}
    assert code == 0
    assert list(found) == ["build", "correctness", "speed", "tag", "sync"]
    for family in ("sd3", "qwen_image"):
        checks = found["correctness"]["results"][family]
        assert len(checks) == 9
        assert all(check["value"] <= check["limit"] for check in checks)
        assert found["build"]["results"][family]["parameters"] > 1e5
        assert all(one["seconds"] > 0 for part in found["speed"]["results"][family].values() for one in part)
        assert set(found["tag"]["results"][family]) == {"gap", "bts", "shared"}
    assert set(found["sync"]["results"]["seconds"]) == {"inline", "shared_memory"}
    page = (tmp_path / "gpu_kit.md").read_text()
    assert page.count("\n| --- |") == 6
