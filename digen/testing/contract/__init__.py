"""One suite for each kind of plugin: what digen counts on, as tests that its own implementations run through too.

    from digen.testing.contract import RewardContract

    class TestBrightness(RewardContract):
        reward = "my_package.brightness:brightness"

Invariant: a suite knows the Protocol and nothing of an implementation, and is imported when it is asked for: that of
rewards needs no torch. Needs pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from digen.testing.contract.algorithm import AlgorithmContract
    from digen.testing.contract.backends import GeneratorContract, TrainerContract
    from digen.testing.contract.engine import EngineContract
    from digen.testing.contract.model import ModelContract
    from digen.testing.contract.policy import TagPolicyContract
    from digen.testing.contract.reward import RewardContract
    from digen.testing.contract.transport import TransportContract
    from digen.testing.contract.tried import failing

_PLACES = {
    "AlgorithmContract": "algorithm",
    "EngineContract": "engine",
    "GeneratorContract": "backends",
    "ModelContract": "model",
    "RewardContract": "reward",
    "TagPolicyContract": "policy",
    "TrainerContract": "backends",
    "TransportContract": "transport",
    "failing": "tried",
}
pytest.register_assert_rewrite(*(f"{__name__}.{place}" for place in sorted(set(_PLACES.values()))))

__all__ = [
    "AlgorithmContract",
    "EngineContract",
    "GeneratorContract",
    "ModelContract",
    "RewardContract",
    "TagPolicyContract",
    "TrainerContract",
    "TransportContract",
    "failing",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
