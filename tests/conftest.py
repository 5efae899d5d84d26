"""Shared fixtures: real workers of the bundled model in this process, small enough for every test."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
from hypothesis import settings

from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.types import MicroBatch, Prompt, Rollout, ScoredRollout

settings.register_profile("digen", deadline=None, derandomize=True)
"""The same examples in every run: a test that fails fails for everybody."""
settings.load_profile("digen")

Make = Callable[..., Any]

PROMPTS = (
    Prompt(3, 'a sign that says "OPEN"'),
    Prompt(8, 'small red letters "CAT" on a white background'),
    Prompt(11, 'a label with the text "SUN"'),
)


@pytest.fixture
def make_config() -> Callable[..., RunConfig[Any]]:
    """A small run of the bundled model; overrides are `section.key=value`."""
    from digen.presets import resolve

    def make(*overrides: str, algorithm: str = "flowgrpo") -> RunConfig[Any]:
        small = ("algorithm.samples_per_prompt=4", "sampling.num_steps=6", "data.prompts_per_step=3", "steps=3")
        return resolve(algorithm, "glyph", None, [*small, *overrides], {})

    return make


@pytest.fixture
def make_worker() -> Make:
    """A loaded worker of one rank that lives in this process, without any reward."""
    from digen.presets import payload

    def make(kind: type, config: RunConfig[Any], store: MemoryStore | None = None, name: str = "worker") -> Any:
        context = WorkerContext(name, 0, 1, "cpu", store or MemoryStore())
        worker = kind({**payload(config), "reward": {}}, context)
        worker.load()
        return worker

    return make


@pytest.fixture
def make_microbatch() -> Callable[..., MicroBatch]:
    def make(config: RunConfig[Any], prompts: int = 2, step: int = 0) -> MicroBatch:
        return MicroBatch(step, 0, PROMPTS[:prompts], config.algorithm.samples_per_prompt, config.seed)

    return make


@pytest.fixture
def make_scored() -> Callable[..., ScoredRollout]:
    """A rollout of one worker with made-up rewards, credited by the algorithm."""
    from digen import credit

    def make(config: RunConfig[Any], worker: Any, microbatch: MicroBatch, version: int = 0) -> ScoredRollout:
        rollout = Rollout(
            microbatch, version, (worker.generate(microbatch, version, tuple(range(microbatch.num_samples))),), "worker"
        )
        rewards = [float((7 * row) % 5) for row in range(microbatch.num_samples)]
        return credit.credit(rollout, rewards, config.algorithm)

    return make


@pytest.fixture(scope="session")
def warm() -> Iterator[Any]:
    """The engine `warm.py:WarmEngine`, for tests that use it, by its name too: its processes end with the session."""
    from digen import plugins

    engine: Any = plugins.load(f"{Path(__file__).parent}/warm.py:WarmEngine")
    yield engine
    engine.close()
