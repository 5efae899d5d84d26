"""Several rewards as one: sums, advantages of their own, GDPO; optional ones; what the metrics say of each."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from digen import credit
from digen.algos.advantages import GroupAdvantage
from digen.algos.flowgrpo import FlowGRPO
from digen.config import RewardTerm, RunConfig
from digen.errors import ConfigError, RewardError
from digen.metrics import StepFacts, step_row
from digen.presets import resolve
from digen.rewards.base import RewardSet
from digen.rewards.total import parts, total
from digen.testing import SimulatedGroup, simulate, simulated_config, simulated_prompts
from digen.types import MicroBatch, Ref, Rollout, ScoredRollout, Scores, Shard, StepReport

NAN = math.nan
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "advantages.json").read_text())
REF = Ref("key", 1)


def scores(*columns: Sequence[float]) -> Scores:
    """Of the rewards a, b, ..., a column each."""
    return Scores(tuple("abcdefg"[: len(columns)]), tuple(range(len(columns[0]))), tuple(zip(*columns, strict=True)))


def config(combine: str = "rewards", samples: int = 3, **sections: Any) -> RunConfig[FlowGRPO]:
    """A run that has the rewards a (weight 0.7) and b (weight 0.3)."""
    advantage = {"type": "group", "std": "biased", "scale": "group", "eps": 1e-4}
    loss = {"type": "clipped", "advantage_clip": None, "kl": 0.0}
    algorithm = {"samples_per_prompt": samples, "advantage": advantage, "loss": loss}
    given = {
        "algorithm": algorithm,
        "steps": 1,
        "reward": {"a": {"weight": 0.7}, "b": {"weight": 0.3}},
        "scoring": {"combine": combine},
    }
    return RunConfig[FlowGRPO].model_validate({**given, **sections})


def credited(run: RunConfig[FlowGRPO], *columns: Sequence[float]) -> tuple[ScoredRollout, Scores]:
    found, size = scores(*columns), run.algorithm.samples_per_prompt
    batch = MicroBatch(0, 0, simulated_prompts(0, len(columns[0]) // size), size, 0)
    rollout = Rollout(batch, 0, (Shard(tuple(range(batch.num_samples)), REF, REF),), "generator")
    rewards = total(found, run.reward, size)
    return credit.credit(rollout, rewards, run.algorithm, credit.parts(run, found)), found


# --- optional and required ---


def test_an_optional_reward_that_failed_for_a_sample_counts_for_none_of_its_group() -> None:
    terms = {"a": RewardTerm(), "b": RewardTerm(weight=10.0, required=False)}
    found = scores([1, 2, 3, 4, 5, 6], [1, NAN, 1, 1, 2, 3])
    assert total(found, terms, 3) == (1, 2, 3, 14, 25, 36)
    assert parts(found, terms, 3)[0] == [(1.0, (1, 2, 3))]


def test_a_required_reward_that_failed_fails_its_sample_and_with_it_the_group() -> None:
    terms = {"a": RewardTerm(required=False), "b": RewardTerm()}
    values = total(scores([1, 2, 3], [1, NAN, 1]), terms, 3)
    assert [math.isnan(value) for value in values] == [False, True, False]


def test_a_group_that_lost_every_reward_with_a_weight_fails_and_does_not_count_as_zero() -> None:
    terms = {"a": RewardTerm(required=False), "b": RewardTerm(weight=0.0)}
    values = total(scores([1, NAN, 3, 4], [1, 1, 1, 1]), terms, 2)
    assert [math.isnan(value) for value in values] == [False, True, False, False]
    assert values[2:] == (3.0, 4.0)


def test_a_reward_that_is_only_watched_changes_no_total_and_drops_no_group() -> None:
    terms = {"a": RewardTerm(), "b": RewardTerm(weight=0.0, required=False)}
    assert total(scores([1, 2], [NAN, 5]), terms, 2) == (1.0, 2.0)


def simulated(b: RewardTerm, asked: list[Scores]) -> dict[str, float | int]:
    """The row of a step in which reward a is sound and reward b fails for the first sample of every group."""

    def two(found: Scores) -> Scores:
        asked.append(found)
        values = tuple((row[0], NAN if index == 0 else 1.0) for index, row in enumerate(found.values))
        return Scores(("a", "b"), found.rows, values)

    terms = {"a": RewardTerm(), "b": b}
    run = simulated_config(steps=1, schedule={"retries": 1}, reward=terms, scoring={"on_failure": "stop"})
    generator = SimulatedGroup("generator", generate=1.0, score=0.1, alter={"score": two})
    sums = partial(total, terms=terms, group_size=run.algorithm.samples_per_prompt)
    return simulate(run, [generator], SimulatedGroup("trainer", update=1.0), total=sums).rows[0]


def test_in_a_run_an_optional_reward_that_fails_is_asked_again_counted_and_drops_nothing() -> None:
    asked: list[Scores] = []
    row = simulated(RewardTerm(required=False), asked)
    assert len(asked) == 2 * 4  # groups
    assert row["groups_dropped"] == row["reward/failed"] == row["reward/a/failed"] == 0
    assert row["reward/b/failed"] == 4


def test_in_a_run_a_required_reward_that_fails_stops_it_when_it_is_set_to() -> None:
    with pytest.raises(RewardError, match="reward 'b' failed for sample 0"):
        simulated(RewardTerm(), [])


# --- advantages of their own, and GDPO, against formulas in numpy ---


def normalised(values: NDArray[np.float64], size: int, eps: float = 1e-4) -> NDArray[np.float64]:
    groups = values.reshape(-1, size)
    std = groups.std(1, keepdims=True)
    centred = groups - groups.mean(1, keepdims=True)
    return np.where(np.ptp(groups, 1, keepdims=True) > 0, centred / (std + eps), 0.0).reshape(-1)


Column = st.lists(st.integers(-8, 8).map(float), min_size=12, max_size=12)


@given(Column, Column)
def test_advantages_of_their_own_are_weighted_and_summed(a: list[float], b: list[float]) -> None:
    scored, _ = credited(config("advantages"), a, b)
    expected = 0.7 * normalised(np.array(a), 3) + 0.3 * normalised(np.array(b), 3)
    np.testing.assert_allclose(scored.advantages, expected, atol=1e-12)


@given(Column, Column)
def test_gdpo_divides_their_sum_by_its_std_over_the_step_and_its_mean_is_zero(a: list[float], b: list[float]) -> None:
    run = config("gdpo")
    first, _ = credited(run, a[:6], b[:6])  # two micro-batches, whose advantages are made one after the other
    second, _ = credited(run, a[6:], b[6:])
    scaled = np.array([*first.advantages, *second.advantages]) * credit.gradient_scale(run, [first, second])
    summed = 0.7 * normalised(np.array(a), 3) + 0.3 * normalised(np.array(b), 3)
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    np.testing.assert_allclose(scaled, expected, atol=1e-9)


def test_p50_the_scale_of_a_reward_does_not_decide_when_advantages_are_combined() -> None:
    small, large = [0.0, 1.0, 2.0], [2000.0, 1000.0, 0.0]
    by_rewards, _ = credited(config("rewards"), small, large)
    by_advantages, _ = credited(config("advantages"), small, large)
    assert by_rewards.advantages[0] > 0 > by_advantages.advantages[0]


def test_one_reward_alone_has_the_same_advantages_however_it_is_combined() -> None:
    values = [0.3, 0.1, 0.9, 4.0, 4.0, 4.0]
    found = [
        credited(config(combine, reward={"a": {"weight": 1.0}}), values)[0].advantages
        for combine in ("rewards", "advantages", "gdpo")
    ]
    assert found[0] == found[1] == found[2]


def test_a_group_with_a_failed_reward_is_no_part_of_the_std_of_gdpo() -> None:
    run = config("gdpo")
    whole, _ = credited(run, [0, 1, 2], [5, 3, 3])
    short, _ = credited(run, [0, 1, 2, 9, 9, 1], [5, 3, 3, NAN, 1, 2])
    assert short.keep == (True,) * 3 + (False,) * 3
    assert credit.gradient_scale(run, [short]) == credit.gradient_scale(run, [whole])
    assert credit.gradient_scale(run, [replace(short, rewards=(NAN,) * 6)]) == 1.0


def test_weighted_advantages_equal_those_of_genrl() -> None:
    """Each reward is divided by the largest std of its groups, which is known when the step is scored."""
    prompts, golden = GOLDEN["inputs"]["prompts"], GOLDEN["genrl_weight_advantages_max_std_w1_1"]
    estimator = GroupAdvantage(scale="max-group")
    order = sorted(range(len(prompts)), key=lambda k: prompts[k])
    result = np.zeros(len(prompts))
    for key in ("rewards", "rewards2"):
        values = [GOLDEN["inputs"][key][k] for k in order]
        groups = [
            [v for v, k in zip(values, order, strict=True) if prompts[k] == p] for p in dict.fromkeys(sorted(prompts))
        ]
        own = [advantage for group in groups for advantage in estimator(group)]
        result[order] += np.array(own) * estimator.gradient_scale(groups)
    np.testing.assert_allclose(result, golden, rtol=2e-5, atol=2e-5)


# --- what is refused ---


@pytest.mark.parametrize(
    ("combine", "overrides", "message"),
    [
        ("gdpo", ["algorithm.loss.advantage_clip=5"], "set algorithm.loss.advantage_clip=null and algorithm.loss.kl=0"),
        ("gdpo", ["algorithm.loss.kl=0.1"], "exact only for a loss proportional to the advantage"),
        ("gdpo", ["algorithm.advantage.std=none"], "gdpo divides by stds; algorithm.advantage.std=none"),
        ("gdpo", ["algorithm.advantage.scale=batch"], "scoring.combine=gdpo needs algorithm.advantage.scale=group"),
        (
            "advantages",
            ["algorithm.advantage.scale=batch"],
            "scoring.combine=advantages needs algorithm.advantage.scale=group",
        ),
    ],
)
def test_what_is_not_exact_with_the_algorithm_is_refused(combine: str, overrides: list[str], message: str) -> None:
    sound = ["algorithm.loss.advantage_clip=null", "algorithm.loss.kl=0", f"scoring.combine={combine}"]
    resolve("flowgrpo", "glyph", None, sound, {})
    with pytest.raises(ConfigError, match=message):
        resolve("flowgrpo", "glyph", None, [*sound, *overrides], {})


def test_a_reward_that_is_trained_on_cannot_be_one_of_evaluation_too() -> None:
    with pytest.raises(ConfigError, match=r"eval_reward\.ocr: a reward of this name is trained on"):
        resolve("flowgrpo", "glyph", None, ["eval_reward.ocr={}"], {})
    words = ["eval_reward.again.plugin=ocr", "eval_reward.again.detect=false"]
    assert resolve("flowgrpo", "glyph", None, words, {}).eval_reward["again"].plugin == "ocr"
    with pytest.raises(ConfigError, match=r"eval_reward\.again\.detekt: unknown option"):
        resolve("flowgrpo", "glyph", None, [*words[:1], "eval_reward.again.detekt=false"], {})


# --- one plugin, several entries ---


def test_a_plugin_can_be_used_twice_with_options_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def score(media, prompts, metadata, *, add=0.0):\n    return [add] * len(media)\n"
    )
    plugin = f"{tmp_path}/own.py:score"
    terms = {f"add{k}": RewardTerm.model_validate({"plugin": plugin, "add": k}) for k in (1, 2)}
    rewards = RewardSet(terms, 30.0)
    rewards.load()
    assert rewards.score(np.zeros((1, 8, 8, 3), np.uint8), ["p"], [{}]) == {"add1": (1.0,), "add2": (2.0,)}


def test_a_plugin_of_an_entry_that_is_not_there_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"reward\.text\.plugin: reward: got 'orc'\. Did you mean 'ocr'"):
        resolve("flowgrpo", "glyph", None, ["reward.text.plugin=orc"], {})


# --- metrics ---


def row_of(run: RunConfig[FlowGRPO], *columns: Sequence[float]) -> dict[str, float | int]:
    report = StepReport(0.5, 1e-3, 0.1, applied=True, finite=True)
    return step_row(StepFacts(0, 0, [credited(run, *columns)], {}, report, 1.0, 1.0, {}))


def test_p50_with_several_rewards_the_row_has_each_raw_and_normalised() -> None:
    a, b = [0.0, 1.0, 2.0, 5.0, 5.0, 8.0], [3.0, 2.0, 1.0, 7.0, NAN, 7.0]
    row = row_of(config("rewards", reward={"a": {}, "b": {"weight": 0.1, "required": False}}), a, b)
    assert row["reward/a/mean"] == pytest.approx(np.mean(a))
    assert row["reward/a/group_std"] == pytest.approx((np.std(a[:3]) + np.std(a[3:])) / 2)
    assert row["reward/b/group_std"] == pytest.approx(np.std(b[:3]))
    assert row["reward/a/pull"] == pytest.approx(1.0)
    assert row["reward/b/pull"] == pytest.approx(-1.0)
    assert (row["reward/a/failed"], row["reward/b/failed"], row["reward/failed"]) == (0, 1, 0)


def test_one_reward_alone_has_the_keys_that_it_always_had() -> None:
    row = row_of(config(reward={"a": {}}), [0.0, 1.0, 2.0])
    assert {key for key in row if key.startswith("reward/a")} == {"reward/a/mean", "reward/a/std"}
