"""What docs/faults.md says was measured is what docs/benchmarks/ has, and within what is promised there."""

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "faults.md").read_text()


def recorded(name: str) -> Any:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())


def row(begins: str) -> list[str]:
    """The other cells of the row of a table that begins with this."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {begins}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("column", "kind", "least"), [(0, "simulated", 2000), (1, "real", 200)])
def test_every_run_with_faults_ended_and_the_table_counts_them(column: int, kind: str, least: int) -> None:
    found = recorded("faults")[kind]
    assert least <= found["runs"] == sum(found["ended"].values())
    told = {
        "runs |": found["runs"],
        "faults that happened": sum(found["faults"].values()),
        "ended with all steps trained": found["ended"]["weights"],
        "of these held against the undisturbed run": found["compared_with_the_undisturbed_run"],
        "ended with a clear error": found["runs"] - found["ended"]["weights"],
        "workers started again": found["workers_started_again"],
        "runs begun again at a checkpoint": found["runs_begun_again"],
        "hung": 0,
    }
    for begins, number in told.items():
        assert int(row(begins)[column].replace(",", "")) == number, begins


def test_starts_and_stops_left_nothing() -> None:
    found = recorded("starts")
    assert sum(found["exit_codes"].values()) == found["times"] == 30
    assert set(found["exit_codes"]) == {"130", "143"}
    assert f"at most {found['longest_from_signal_to_end_s']} s from the signal to the end; {found['saved']} of" in PAGE
    assert found["longest_from_signal_to_end_s"] < 30


def test_nothing_grew_over_2000_steps() -> None:
    found = recorded("soak")
    assert found["steps"] == 2000
    memory, files = row("resident memory"), row("open files")
    for told, opened, worker in zip(memory, files, found["workers"].values(), strict=True):
        assert told == "{}, {} MB".format(*worker["resident_mb"])
        assert opened == "{}, {}".format(*worker["open_files"])
        assert worker["grown_mb"] < 30
        assert worker["open_files"][1] <= worker["open_files"][0]
    first, last = found["step_s"].values()
    assert f"{first:.3f} s in the first quarter and {last:.3f} s in the last" in PAGE
    assert last < 1.1 * first


def test_no_broken_input_ended_in_a_traceback() -> None:
    found = recorded("fuzz")
    understood, refused = (sum(kind[how] for kind in found["kinds"].values()) for how in ("understood", "refused"))
    assert 20_000 <= found["inputs"] == understood + refused
    assert f"Of {found['inputs']:,} inputs {understood:,} were understood and {refused:,} refused" in " ".join(
        PAGE.split()
    )
