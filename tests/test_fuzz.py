"""Everything that reads what others wrote, with broken input: an error that says what is wrong, or nothing."""

import struct
from pathlib import Path

import pytest

from digen.errors import DigenError
from digen.testing.fuzz import attack, targets

COUNT = 150
TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_broken_input_is_refused_with_an_error_of_ours(name: str, tmp_path: Path) -> None:
    understood, refused = attack(TARGETS[name], 1, COUNT, tmp_path)
    assert understood + refused == COUNT + len(TARGETS[name].examples)
    assert understood >= 1
    assert refused > COUNT // 4


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"manifest"}))
def test_sound_input_is_understood_or_the_fuzz_shows_nothing(name: str, tmp_path: Path) -> None:
    assert attack(TARGETS[name], 1, 0, tmp_path) == (len(TARGETS[name].examples), 0)


def test_a_header_that_claims_more_than_there_is_is_refused_whatever_it_claims(tmp_path: Path) -> None:
    """benchmarks/fuzz.py found the first of them."""
    for size in (2**63 + 3, 2**64 - 1, 2**62, 2**33):
        content = struct.pack("<Q", size) + b"{}"
        for name in ("checkpoint", "weight folder", "size"):
            path = tmp_path / next(iter(TARGETS[name].examples))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            with pytest.raises(DigenError):
                TARGETS[name].read(path)
