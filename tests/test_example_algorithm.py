"""The example of a user's own algorithm: what is its own. What every algorithm must do is in test_contracts.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from digen.algos.base import Algorithm, LossInputs
from digen.testing.contract.toy import Toy

PATH = Path(__file__).parent.parent / "examples" / "my_algorithm.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_my_algorithm", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load()
MyAlgorithm: type[Algorithm] = example.MyAlgorithm


def test_the_example_is_a_frozen_strict_config_of_its_own() -> None:
    algorithm = MyAlgorithm.model_validate({"loss": {"limit": 2e-3}})

    assert algorithm.loss == example.TrustRegion(limit=2e-3)
    assert MyAlgorithm.model_validate(algorithm.model_dump()) == algorithm
    with pytest.raises(ValidationError, match="limt"):
        MyAlgorithm.model_validate({"loss": {"limt": 1.0}})


def test_the_examples_advantages_leave_the_own_reward_out() -> None:
    advantage = MyAlgorithm().advantage

    assert advantage([1.0, 2.0, 6.0]) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert advantage([0.1] * 8) == [0.0] * 8


def test_the_examples_loss_drops_only_what_left_the_trust_region_outwards() -> None:
    ratios = torch.tensor([1.0, 1.01, 0.99, 1.01, 0.99])
    fields: dict[str, Any] = {name: torch.ones(5) for name in ("mean", "std")}
    given = LossInputs(
        new_log_prob=ratios.log(),
        old_log_prob=torch.zeros(5),
        advantage=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        at=Toy(MyAlgorithm(), 6).at(0, torch.zeros(5, 1)),
        **fields,
    )

    terms = MyAlgorithm().loss(given)

    torch.testing.assert_close(terms.loss, torch.tensor([-1.0, 0.0, -0.99, 1.01, 0.0]))
    assert terms.stats["clip_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]


def test_the_example_stays_short_and_mentions_no_model() -> None:
    text = PATH.read_text()

    assert len([line for line in text.splitlines() if line.strip()]) <= 45
    assert "digen.models" not in text
    assert "digen.backends" not in text
