"""Event files are what TensorBoard itself reads; bytes of single records are checked against known values."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest

from digen.observe.tensorboard import TensorBoardObserver, masked_crc32c


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():  # what the reader's own dependencies deprecate is not ours to fix
        warnings.simplefilter("ignore")
        module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_every_scalar_at_its_step(tmp_path: Path) -> None:
    sink = TensorBoardObserver(tmp_path, clock=lambda: 1_700_000_000.5)
    for step in (0, 1, 300):
        sink.on_step({"step": step, "reward/mean": 0.25 * step, "busy/generator-0": 0.5, "samples": 96})
    sink.close()
    assert read_back(tmp_path) == {
        "reward/mean": [(0, 0.0), (1, 0.25), (300, 75.0)],
        "busy/generator-0": [(0, 0.5), (1, 0.5), (300, 0.5)],
        "samples": [(0, 96.0), (1, 96.0), (300, 96.0)],
    }


def test_a_step_is_in_the_file_before_the_run_ends(tmp_path: Path) -> None:
    sink = TensorBoardObserver(tmp_path)
    sink.on_step({"step": 0, "reward/mean": 0.5})
    assert read_back(tmp_path) == {"reward/mean": [(0, 0.5)]}
    sink.close()


def test_the_steps_that_a_run_does_again_after_going_on_are_shown_once_as_they_were_done_last(tmp_path: Path) -> None:
    """Three parts of one run: from the beginning, from step 2, and, killed before its first step, from step 1."""
    for part, (first, last) in enumerate(((0, 4), (2, 6), (1, 1), (1, 3))):
        sink = TensorBoardObserver(tmp_path, clock=lambda part=part: 1_700_000_000.0 + 60 * part, first_step=first)
        for step in range(first, last):
            sink.on_step({"step": step, "reward/mean": 10.0 * part + step})
        sink.close()
        wanted = {0: [0, 1, 2, 3], 1: [0, 1, 12, 13, 14, 15], 2: [0], 3: [0, 31, 32]}[part]
        assert read_back(tmp_path) == {"reward/mean": list(enumerate(map(float, wanted)))}


def test_values_beyond_float32_and_not_finite_ones_are_kept_as_such(tmp_path: Path) -> None:
    sink = TensorBoardObserver(tmp_path)
    sink.on_step({"step": 5, "huge": 1e300, "low": -1e300, "bad": math.nan})
    sink.close()
    values = read_back(tmp_path)
    assert values["huge"] == [(5, math.inf)]
    assert values["low"] == [(5, -math.inf)]
    assert math.isnan(values["bad"][0][1])


def test_the_checksum_is_the_masked_crc32c_of_the_standard() -> None:
    """RFC 3720, appendix B.4: 32 bytes of zeros have CRC-32C 8A9136AA."""
    crc = 0x8A9136AA
    assert masked_crc32c(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_folder_that_vanishes_does_not_stop_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tensorboard").mkdir()
    sink = TensorBoardObserver(tmp_path / "tensorboard", said.append)
    sink.close()
    for file in (tmp_path / "tensorboard").iterdir():
        file.unlink()
    (tmp_path / "tensorboard").rmdir()
    sink.on_step({"step": 0, "reward/mean": 0.5})
    sink.on_step({"step": 1, "reward/mean": 0.5})
    assert len(said) == 1
    assert "training goes on" in said[0]


def test_a_folder_that_cannot_be_made_does_not_stop_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tensorboard").touch()
    sink = TensorBoardObserver(tmp_path / "tensorboard", said.append)
    sink.on_step({"step": 0, "reward/mean": 0.5})
    sink.close()
    assert len(said) == 1
    assert "training goes on" in said[0]
