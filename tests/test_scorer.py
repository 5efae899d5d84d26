"""A worker of its own for rewards (`scoring.devices`): what waits for a score is not what generates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.scoring import Scorer
from digen.config import RunConfig
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import ConfigError
from digen.evaluate import with_eval_rewards
from digen.presets import payload
from digen.run import specs
from digen.testing import Recorder, SimulatedGroup, simulated_config, simulated_driver, virtual_run
from digen.types import MicroBatch, Rollout

Make = Callable[..., Any]
COSTS = {"generate": 1.0, "update": 1.8}


def ran(schedule: dict[str, Any], *, score: float, apart: bool, steps: int = 6, **costs: float) -> tuple[Recorder, Any]:
    """Steps of four micro-batches, and the trainer."""
    costs = {**COSTS, **costs}
    here = 0.0 if apart else score
    trainer = SimulatedGroup("trainer", score=here, **costs)
    generators = [] if schedule["mode"] == "colocated" else [SimulatedGroup("generator-0", score=here, **costs)]
    scorer = SimulatedGroup("scorer", score=score) if apart else None
    seen = Recorder()
    config = simulated_config(steps=steps, samples_per_prompt=8, schedule=schedule)
    driver = simulated_driver(config, generators, trainer, seen, scorer=scorer)
    if scorer:
        scorer.store = trainer.store
    virtual_run(driver.run)
    return seen, trainer


def test_scores_are_made_while_the_next_micro_batch_is_generated() -> None:
    alone, _ = ran({"mode": "pipelined"}, score=1.0, apart=False, steps=1, update=0.0)
    beside, _ = ran({"mode": "pipelined"}, score=1.0, apart=True, steps=1, update=0.0)
    assert alone.end_s == pytest.approx(8.0)
    assert beside.end_s == pytest.approx(5.0)
    assert {span.worker for span in beside.spans if span.kind == "score"} == {"scorer"}


def test_an_idle_trainer_generates_while_a_score_is_under_way_elsewhere() -> None:
    seen, _ = ran({"mode": "pipelined", "assist": "both"}, score=0.5, apart=True)
    scores = [span for span in seen.spans if span.kind == "score" and span.step == 4]
    assists = [span for span in seen.spans if span.kind == "assist" and span.step == 4]
    assert any(score.start <= assist.start < score.end for score in scores for assist in assists)


@pytest.mark.parametrize("score", [0.2, 0.5, 0.7])
def test_where_both_sides_share_a_slow_reward_is_hidden(score: float) -> None:
    schedule = {"mode": "pipelined", "assist": "both"}
    (fast, _), (slow, _), (on_generator, _) = (
        ran(schedule, score=s, apart=apart) for s, apart in ((0.0, False), (score, True), (score, False))
    )
    assert slow.end_s <= 1.06 * fast.end_s
    assert on_generator.end_s > slow.end_s


@pytest.mark.parametrize("mode", ["colocated", "naive", "pipelined"])
def test_who_scores_changes_nothing_that_is_learned(mode: str) -> None:
    (_, here), (seen, apart) = (ran({"mode": mode}, score=0.3, apart=apart) for apart in (False, True))
    assert apart.weights == pytest.approx(here.weights, rel=1e-12)
    assert {span.worker for span in seen.spans if span.kind == "score"} == {"scorer"}


def test_it_gives_the_scores_that_a_generator_gives(
    make_config: Callable[..., RunConfig[Any]],
    make_worker: Make,
    make_microbatch: Callable[..., MicroBatch],
    tmp_path: Path,
) -> None:
    jpeg = "reward={jpeg-compressibility: {weight: 2}, jpeg-incompressibility: {}}"
    store, microbatch = MemoryStore(), make_microbatch(make_config())
    generator = make_worker(DiffusersGenerator, make_config(), store)
    shard = generator.generate(microbatch, 0, tuple(range(microbatch.num_samples)))
    rollout = Rollout(microbatch, 0, (shard,), "generator")
    here = DiffusersGenerator(payload(make_config(jpeg)), WorkerContext("generator", 0, 1, "cpu", store))
    here._load_rewards()
    apart = Scorer(payload(make_config(jpeg, "scoring.devices=cpu")), WorkerContext("scorer", 0, 1, "cpu", store))
    apart.load()
    assert apart.score(rollout) == here.score(rollout)
    apart.encode(["a cat"])
    apart.draw(rollout, (0.0,) * microbatch.num_samples, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").is_file()
    assert not hasattr(apart.model, "transformer")


def test_it_is_started_where_it_is_set_and_generators_then_load_no_reward(
    make_config: Callable[..., RunConfig[Any]], tmp_path: Path
) -> None:
    apart, usual = make_config("scoring.devices=cuda:3"), make_config()
    assert [(s.name, s.devices, s.ranks) for s in specs(apart, tmp_path)][2:] == [("scorer", "cuda:3", 1)]
    assert "scorer" not in [s.name for s in specs(usual, tmp_path)]
    context = WorkerContext("generator", 0, 1, "cpu", MemoryStore())
    assert not DiffusersGenerator(payload(apart), context).scores_here
    assert DiffusersGenerator(payload(usual), context).scores_here


def test_an_evaluation_scores_where_it_samples(make_config: Callable[..., RunConfig[Any]]) -> None:
    assert with_eval_rewards(make_config("scoring.devices=cpu")).scoring.devices is None


def test_a_policy_that_counts_on_scoring_generators_is_refused(make_config: Callable[..., RunConfig[Any]]) -> None:
    apart = ("scoring.devices=cpu", "schedule.tag=bts")
    with pytest.raises(ConfigError, match=r"schedule.tag=bts counts on scores from the generators.*schedule.assist"):
        make_config(*apart, "schedule.assist=none")
    make_config(*apart, "schedule.assist=both")
    make_config("scoring.devices=cpu", "schedule.tag=static(1)", "schedule.assist=none")
