"""docs/algorithms.md is true: names, parts, group sizes, clip ranges, and the variants in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from digen import plugins
from digen.algos.base import Algorithm
from digen.errors import ConfigError
from digen.presets import presets, resolve

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text("utf-8")
NAMES = {p.name for p in plugins.available("algorithms") if p.source == "digen"}


def table(first_column: str) -> dict[str, list[str]]:
    """First column -> the others, of the table whose heading begins so."""
    lines = PAGE.partition(f"| {first_column} |")[2].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {first.strip("`"): rest for first, *rest in rows}


def default(name: str) -> Algorithm:
    kind = plugins.find("algorithms", name)
    assert isinstance(kind, type)
    algorithm = kind()
    assert isinstance(algorithm, Algorithm)
    return algorithm


def test_every_algorithm_is_in_the_table_and_has_a_preset_for_the_bundled_model() -> None:
    assert set(table("name")) == NAMES
    assert {name for name, model in presets() if model == "glyph"} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_table_names_the_parts_and_numbers_of_an_algorithm(name: str) -> None:
    noise, steps, advantage, loss, group, clip, source = table("name")[name]
    algorithm = default(name)

    for cell, part in ((noise, algorithm.noise), (steps, algorithm.steps), (loss, algorithm.loss)):
        assert f"`{part.type}`" in cell
    for number in re.findall(r"\d+\.\d+", noise):
        assert float(number) in algorithm.noise.model_dump().values()
    values = algorithm.loss.model_dump()
    assert clip in ("-", *(f"{prefix}{_short(values.get(key))}" for prefix, key in (("", "clip"), ("limit ", "limit"))))
    std = algorithm.advantage.model_dump().get("std", "none")
    assert (std if std != "none" else "no std") in advantage or algorithm.advantage.needs_gradient_scale
    assert int(group) == algorithm.samples_per_prompt
    assert source


def _short(value: object) -> str:
    """1e-4 for 0.0001, 1 for 1.0."""
    return f"{value:g}".replace("e-0", "e-").replace("0.0001", "1e-4").replace("0.001", "1e-3") if value else ""


@pytest.mark.parametrize("what", sorted(table("what")))
def test_a_variant_in_one_line_is_a_valid_run(what: str) -> None:
    keys = table("what")[what][0].strip("`").split()
    algorithm = "mixgrpo" if what.startswith("MixGRPO") else "flowgrpo"

    resolve(algorithm, "glyph", None, keys, {})
    for key in keys:  # and each of them is a key that there is
        with pytest.raises(ConfigError, match="unknown key"):
            resolve(algorithm, "glyph", None, [key.replace("=", "x=", 1)], {})
