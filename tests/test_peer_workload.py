"""The fixed piece of work: what is measured there is the same work on both sides, whatever it takes here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_floor_and_digen_pass_the_same_number_of_samples_through_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/peer_workload.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads((tmp_path / "peer_workload.json").read_text())
    (case,) = document["cases"]
    samples = 4 * 8
    assert case["counts"] == {"decoded": samples, "generated": 10 * samples, "trained": 4 * samples}
    assert case["floor_counts"] == case["counts"]
    assert set(case["busy"]) == {"generator", "trainer", "scorer"}
    assert all(0 < share <= 1 for share in case["busy"].values())
    assert case["ratio"] > 0
    assert "scoring" in case["waits"]["trainer"]
    assert case["cpu_over_floor"] > 0
    assert "4 trained" in done.stdout
