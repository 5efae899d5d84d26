"""Benchmarks run, write what they say, and the figures in the documentation are those that were asked for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "benchmarks"


def quick(name: str, out: Path) -> dict[str, Any]:
    """Run one in its quick form: the JSON that it writes."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    with Image.open(out / f"{name}.png") as picture:
        assert picture.width > picture.height > 100
    document: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return document


def recorded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DOCS / f"{name}.json").read_text())
    return document


@pytest.mark.slow
def test_with_the_stated_costs_the_simulated_figures_reach_every_range_of_the_paper(tmp_path: Path) -> None:
    figures = quick("paper_figures", tmp_path)["figures"]
    assert [figure["figure"] for figure in figures] == [17, 18]
    for figure in figures:
        for mode, paper in figure["paper"].items():
            assert all(round(here, 2) >= low for here, low in zip(figure["here"][mode], paper, strict=True)), mode


def test_the_documented_figures_reach_every_range_with_one_set_of_costs_and_each_idea_adds_to_the_last() -> None:
    for figure in recorded("paper_figures")["figures"]:
        assert figure["reached"]
        assert len(figure["cells"]) == 12
        for cell in figure["cells"]:
            speedup, costs = cell["speedup"], cell["costs"]
            assert speedup["gap"] <= speedup["tsp"] <= speedup["bts"] <= speedup["tcss"]
            work = costs["generate"] + costs["score"]
            bound = 2 * (work + costs["update"]) / (work + costs["stacked"])
            assert speedup["tcss"] <= bound * 1.01, "faster than two sides that never wait"


def test_a_search_takes_longer_the_more_bubbles_there_are_and_stays_within_the_documented_times(tmp_path: Path) -> None:
    found = {(row["microbatches"], row["ratio"]): row["ms"] for row in quick("search_time", tmp_path)["search_ms"]}
    assert len(found) == 3 * 10
    assert found[32, 0.1] > found[8, 1.0]
    documented = {(row["microbatches"], row["ratio"]): row["ms"] for row in recorded("search_time")["search_ms"]}
    assert max(ms for (b, _), ms in documented.items() if b <= 128) <= 20
    assert max(documented.values()) <= 100


def test_the_driver_is_cheap_and_replicas_scale(tmp_path: Path) -> None:
    rows = quick("scaling", tmp_path)["scaling"]
    assert [row["replicas"] for row in rows] == [1, 2, 4, 8, 16]
    assert all(row["overhead_ms"] < 5 for row in rows)
    assert all(row["efficiency"]["gap"] < row["efficiency"]["gap-tcss"] for row in rows)
    assert all(row["efficiency"]["gap-tcss"] > 0.99 for row in rows)
    assert [row["replicas"] for row in recorded("scaling")["scaling"]] == [2**k for k in range(10)]


def test_no_mix_of_replicas_beats_the_bound_and_sharing_comes_near_it(tmp_path: Path) -> None:
    for row in quick("heterogeneous", tmp_path)["heterogeneous"]:
        assert min(row["step_s"].values()) >= 0.99 * row["bound_s"]
        assert row["step_s"]["shared"] <= 1.05 * row["bound_s"]
        assert row["step_s"]["gap"] > 1.2 * row["bound_s"]
        assert row["step_s"]["bts"] <= row["step_s"]["gap"]


@pytest.mark.slow
def test_an_assist_that_pauses_gains_less_than_parts_do(tmp_path: Path) -> None:
    found = quick("sharing", tmp_path)
    for case in (*found["few"], *found["many"]):
        steps = case["step_s"]
        assert case["half_s"] <= steps["pausing"] + 1e-9 or case["assist"] > 1
        assert steps["shared"] <= 1.005 * steps["pausing"], case
        assert steps["pausing"] <= 1.001 * steps["bts"], case


def test_every_table_is_on_its_page() -> None:
    names = ("paper_figures", "search_time", "scaling", "heterogeneous", "sharing", "peer_workload")
    pages = {name: "design/sharing.md" if name == "sharing" else "benchmarks.md" for name in names}
    for name, page in pages.items():
        text = (ROOT / "docs" / page).read_text()
        part = text.split(f"<!-- results of {name}.py -->")[1].split(f"<!-- end of {name}.py -->")[0]
        assert part.count("\n|") > 3, name
        assert (DOCS / f"{name}.png").is_file()


@pytest.mark.slow
def test_on_real_workers_every_synchronous_mode_ends_with_the_same_weights(tmp_path: Path) -> None:
    (ratio,) = quick("ablation", tmp_path)["ratios"]
    assert ratio["weights_moved"] > 1e-3
    assert set(ratio["modes"]) >= {"colocated", "naive", "gap", "tsp", "tag-static", "bts", "shared"}
    for mode, found in ratio["modes"].items():
        assert found["step_s"] > 0
        if not mode.endswith("tcss"):
            assert found["weights_from_naive"] <= 1e-5, mode
