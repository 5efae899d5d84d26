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
    assert sum(case["above"].values()) == pytest.approx(case["ratio"] - 1)
    assert min(case["above"]["waits"], case["above"]["other calls"]) > 0
    assert "scoring" in case["waits"]["trainer"]
    assert case["cpu_over_floor"] > 0
    assert "4 trained" in done.stdout


def test_where_the_recorded_steps_take_longer_than_they_may_it_is_said_what_takes_it() -> None:
    document = json.loads((ROOT / "docs" / "benchmarks" / "peer_workload.json").read_text())
    cases = document["cases"]
    assert [case["limit"] for case in cases] == [1.10, 1.10, 1.12]
    for case, trained in zip(cases, (9, 4, 9), strict=True):
        assert case["counts"] == case["floor_counts"] == {"decoded": 32, "generated": 320, "trained": 32 * trained}
        assert min(case["busy"][name] for name in ("generator", "trainer")) >= 0.95
        said = any(line.startswith(f"{case['case']}:") for line in document["missed"])
        assert said == (case["ratio"] > case["limit"])
        assert sum(case["above"].values()) == pytest.approx(sorted(case["ratios"])[3] - 1)
