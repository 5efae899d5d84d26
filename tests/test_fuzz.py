"""Everything that reads what others wrote, with broken input: an error that says what is wrong, or nothing."""

from pathlib import Path

import pytest

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
