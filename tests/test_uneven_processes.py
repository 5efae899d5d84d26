"""A generator that is three times slower than its twin, as processes: who does how much, predicted and measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from digen.plan import predict
from digen.testing.faults import Planned, Setup, run_to_the_end
from digen.testing.faulty_processes import SECOND_S, run_processes
from digen.workload import read

pytestmark = pytest.mark.slow

PACED = f"{Path(__file__).parent}/workers_of_pace.py:Paced"
FAST_S = 0.3 + SECOND_S
MICROBATCHES = 8
RUN = Setup(3, (), {"mode": "pipelined"}, replicas=2, prompts=MICROBATCHES, every=0, restarts=0)


def predicted_s(slower: str) -> float:
    """By `digen plan`, from what calls are told to take."""
    words = {"microbatches": MICROBATCHES, "samples": 2, "generate": FAST_S, "slower": slower, "score": SECOND_S}
    words |= {"update": SECOND_S, "sync": 3 * SECOND_S, "pull": SECOND_S}
    return predict(read(None, words), "gap").step_time_s


def made(folder: Path, group: str) -> int:
    return (folder / "happened" / f"made-by-{group}").stat().st_size


def test_work_follows_speed_and_a_step_takes_what_was_predicted(tmp_path: Path) -> None:
    ended = run_processes(RUN, tmp_path / "run", PACED)
    assert made(tmp_path / "run", "g0") / made(tmp_path / "run", "g1") == pytest.approx(3.0, rel=0.1)
    fastest = min(row["step_time_s"] for row in ended.rows[1:])  # the other one may have been held up by the machine
    assert fastest == pytest.approx(predicted_s("1,3"), rel=0.1)


def test_losing_the_slow_one_in_the_middle_of_a_run_only_slows_it(tmp_path: Path) -> None:
    dying = replace(RUN, faults=(Planned("kill", "g1", "generate", 3, 1.0),))
    ended = run_processes(dying, tmp_path / "run", PACED)
    assert ended.weights == run_to_the_end(RUN).weights
    assert ["the run goes on without g1" in note for note in ended.notes] == [True]
    assert made(tmp_path / "run", "g1") == 3
    assert predicted_s("1,3") < ended.rows[2]["step_time_s"] < 1.5 * predicted_s("1")
