"""The pure parts: cut, stack, assist, staleness, costs; and from answers of ranks to advantages and rows."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digen import credit, gather
from digen.algos.base import BestOfN
from digen.algos.flowgrpo import FlowGRPO
from digen.errors import ConfigError, DataError, WorkerError
from digen.metrics import StepFacts, log_prob_complaint, step_row
from digen.schedule import gap, tag, tsp
from digen.schedule.costs import Costs
from digen.schedule.staleness import StalenessPolicy
from digen.step import GlobalStep
from digen.testing import SimulatedGroup, simulate, simulated_config, simulated_prompts
from digen.types import MicroBatch, Prompt, Ref, Rollout, ScoredRollout, Scores, Shard, Stat, StepReport

NAN = math.nan
REF = Ref("key", 1)


def microbatch(*, step: int = 0, index: int = 0, prompts: int = 2, samples: int = 3) -> MicroBatch:
    return MicroBatch(step, index, simulated_prompts(index, prompts), samples, 0)


def rollout_of(batch: MicroBatch, *, version: int = 0) -> Rollout:
    return Rollout(batch, version, (Shard(tuple(range(batch.num_samples)), REF, REF),), "generator")


# GAP


def test_a_step_is_cut_into_whole_groups_in_prompt_order_and_the_last_may_be_smaller() -> None:
    prompts = simulated_prompts(0, 5)
    batches = gap.cut(7, prompts, samples_per_prompt=4, prompts_per_microbatch=2, seed=9)
    assert [[p.id for p in b.prompts] for b in batches] == [[0, 1], [2, 3], [4]]
    assert [(b.step, b.index, b.seed, b.num_samples) for b in batches] == [(7, 0, 9, 8), (7, 1, 9, 8), (7, 2, 9, 4)]


def test_a_step_without_prompts_is_an_error_that_names_the_step() -> None:
    with pytest.raises(DataError, match="global step 3 was given no prompts"):
        gap.cut(3, (), 4, 1, 0)


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 5))
def test_any_number_of_ranks_fits_any_size_of_group(ranks: int, samples: int, prompts: int) -> None:
    batch = microbatch(prompts=prompts, samples=samples)
    rows = sorted(row for rank in range(ranks) for row in batch.rows(rank, ranks))
    assert rows == list(range(batch.num_samples))


# TSP


@given(st.integers(0, 13), st.integers(1, 11), st.integers(1, 14), st.integers(0, 12))
def test_stacking_takes_every_pair_once_in_the_stated_number_of_passes(
    samples: int, timesteps: int, batch_size: int, width: int
) -> None:
    passes = tsp.chunks(samples, timesteps, batch_size, width)
    pairs = [(k, t) for c in passes for k in range(samples)[c.samples] for t in range(timesteps)[c.timesteps]]
    assert sorted(pairs) == [(k, t) for k in range(samples) for t in range(timesteps)]
    assert len(passes) == math.ceil(samples / batch_size) * math.ceil(timesteps / (width or timesteps))
    assert all(range(samples)[c.samples] and range(timesteps)[c.timesteps] for c in passes)


def test_width_zero_stacks_all_timesteps_of_a_batch_into_one_pass() -> None:
    assert tsp.chunks(4, 9, 2, 0) == ((slice(0, 2), slice(0, 9)), (slice(2, 4), slice(0, 9)))


# TAG


def bubble(assisted: int) -> tag.Bubble:
    step = GlobalStep(0, gap.cut(0, simulated_prompts(0, 6), 2, 1, 0), 1.0, 2)
    step.num_assisted = assisted
    return step.bubble(tag.Activity("trainer"), (), max_in_flight=1)


def test_static_tag_fills_the_first_n_bubbles_of_a_step_and_none_fills_none() -> None:
    answers = [tag.parse("static(2)").choose(bubble(assisted), Costs()).rows for assisted in range(4)]
    assert answers == [2, 2, 0, 0]
    assert not tag.parse("none").choose(bubble(0), Costs()).rows
    assert not tag.parse("static(0)").choose(bubble(0), Costs()).rows


def test_a_bubble_counts_every_micro_batch_once() -> None:
    step = GlobalStep(0, gap.cut(0, simulated_prompts(0, 6), 2, 1, 0), 1.0, 2)
    step.unscored.append(rollout_of(step.pending.popleft().microbatch))
    step.num_trained = 1
    facts = step.bubble(tag.Activity("trainer"), (), max_in_flight=1)
    assert (facts.num_microbatches, facts.pending, facts.unscored, facts.updates_left) == (6, 5, 1, 5)


@pytest.mark.parametrize("text", ["", "static", "static()", "static(-1)", "static(1.5)", "bts2", "NONE", "static(1)x"])
def test_an_unknown_tag_policy_is_an_error_that_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.tag: got .* Allowed: none, static\(n\)"):
        tag.parse(text)


def test_a_tag_policy_of_the_users_own_is_named_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from digen.schedule.tag import Choice\n\n\nclass EveryOther:\n"
        "    def choose(self, bubble, costs):\n        return Choice(bubble.next_rows * (bubble.trained % 2))\n"
    )
    seen = simulate(
        simulated_config(schedule={"tag": f"{path}:EveryOther"}),
        [SimulatedGroup("g0", generate=1.0)],
        SimulatedGroup("trainer", generate=1.0, update=0.25),
        prompts_per_step=8,
    )
    taken = [decision.rows > 0 for decision in seen.decisions]
    assert True in taken
    assert False in taken
    path.write_text("class Nothing: ...\n")
    with pytest.raises(ConfigError, match="is no policy, it has no `choose"):
        tag.parse(f"{path.rename(tmp_path / 'other.py')}:Nothing")


# TCSS


def test_the_current_step_is_always_allowed_and_the_next_up_to_its_share_of_samples() -> None:
    policy = StalenessPolicy(share=0.5, window=2)
    batch = microbatch(step=4, prompts=1, samples=2)
    assert policy.allows(batch, 4, 99, 8)
    assert [policy.allows(batch, 3, stale, 8) for stale in (0, 2, 3, 4)] == [True, True, False, False]
    assert not policy.allows(batch, 2, 0, 8)


def test_a_share_counts_samples_so_a_small_last_micro_batch_may_fit_where_a_whole_one_does_not() -> None:
    policy = StalenessPolicy(share=0.25, window=2)
    assert not policy.allows(microbatch(step=1, prompts=2, samples=4), 0, 0, 24)
    assert policy.allows(microbatch(step=1, prompts=1, samples=4), 0, 0, 24)


def test_a_share_that_is_no_binary_fraction_still_allows_what_it_says() -> None:
    assert 0.29 * 100 < 29
    assert StalenessPolicy(share=0.29).allows(microbatch(step=1, prompts=1, samples=1), 0, 28, 100)


@pytest.mark.parametrize("policy", [StalenessPolicy(0.0, 2), StalenessPolicy(1.0, 1)])
def test_share_zero_and_window_one_are_both_fully_synchronous(policy: StalenessPolicy) -> None:
    assert policy.lag == 0
    assert not policy.allows(microbatch(step=1), 0, 0, 1000)


# From ranks to groups


def test_a_rollout_is_refused_when_ranks_left_out_or_repeated_a_row() -> None:
    batch = microbatch(prompts=1, samples=3)
    for rows in ((0, 1), (0, 1, 1), (0, 1, 2, 3)):
        with pytest.raises(WorkerError, match=r"gen rank 0 failed in generate.*each of 0\.\.2 once"):
            gather.rollout(batch, 0, range(3), [Shard(rows, REF, REF)], "gen")


def test_scores_of_ranks_are_put_together_by_row_and_not_by_place() -> None:
    parts = [Scores(("a",), (1, 2), ((1.0,), (2.0,))), Scores(("a",), (), ()), Scores(("a",), (0,), ((0.5,),))]
    merged = gather.scores(microbatch(prompts=1, samples=3), parts, "gen")
    assert merged == Scores(("a",), (0, 1, 2), ((0.5,), (1.0,), (2.0,)))


def test_ranks_that_name_different_rewards_are_an_error() -> None:
    parts = [Scores(("a",), (0, 1), ((1.0,), (2.0,))), Scores(("b",), (2,), ((0.5,),))]
    with pytest.raises(WorkerError, match="different rewards"):
        gather.scores(microbatch(prompts=1, samples=3), parts, "gen")


def test_a_second_attempt_fills_what_failed_and_keeps_what_did_not() -> None:
    first = Scores(("a", "b"), (0, 1), ((1.0, NAN), (NAN, 4.0)))
    second = Scores(("a", "b"), (0, 1), ((9.0, 2.0), (NAN, 9.0)))
    mended = gather.mend(first, second)
    assert mended.values[0] == (1.0, 2.0)
    assert gather.failed(mended) == [(1, "a")]


# Credit


def test_advantages_are_of_each_group_alone() -> None:
    algorithm = FlowGRPO(samples_per_prompt=3)
    scored = credit.credit(rollout_of(microbatch()), [0.0, 1.0, 2.0, 10.0, 11.0, 12.0], algorithm)
    assert scored.advantages[:3] == pytest.approx(scored.advantages[3:])
    assert scored.keep == (True,) * 6


def test_a_failed_reward_drops_its_group_and_leaves_the_others_as_they_were() -> None:
    algorithm = FlowGRPO(samples_per_prompt=3)
    whole = credit.credit(rollout_of(microbatch()), [0.0, 1.0, 2.0, 5.0, 7.0, 6.0], algorithm)
    short = credit.credit(rollout_of(microbatch()), [0.0, NAN, 2.0, 5.0, 7.0, 6.0], algorithm)
    assert short.keep == (False, False, False, True, True, True)
    assert short.advantages[3:] == whole.advantages[3:]
    assert credit.whole_groups([short]) == [(5.0, 7.0, 6.0)]


def test_best_of_n_is_chosen_within_each_group() -> None:
    algorithm = FlowGRPO(samples_per_prompt=3, best_of_n=BestOfN(best=1, worst=1))
    scored = credit.credit(rollout_of(microbatch()), [0.0, 1.0, 2.0, 7.0, 5.0, 6.0], algorithm)
    assert scored.keep == (True, False, True, True, True, False)


def test_the_denominator_counts_trained_pairs_of_a_step_without_failures() -> None:
    config = simulated_config(samples_per_prompt=6, sampling={"num_steps": 10})
    assert credit.denominator(config, 4) == 4 * 6 * 9


def test_a_failure_is_described_by_reward_sample_and_prompt() -> None:
    scores = Scores(("ocr", "jpeg"), tuple(range(6)), ((1.0, 1.0),) * 4 + ((1.0, NAN), (1.0, 1.0)))
    assert credit.failures(rollout_of(microbatch()), scores) == [
        "reward 'jpeg' failed for sample 1 of prompt 1 ('prompt 1')"
    ]


# Rows

REPORT = StepReport(grad_norm=0.5, learning_rate=1e-3, weight_delta=0.1, applied=True, finite=True)


def facts(stats: dict[str, Stat], *rewards: float, version: int = 3) -> StepFacts:
    batch = replace(microbatch(step=3, prompts=len(rewards) // 2, samples=2))
    scored = credit.credit(rollout_of(batch, version=version), rewards, FlowGRPO(samples_per_prompt=2))
    scores = Scores(("ocr",), tuple(range(len(rewards))), tuple((r,) for r in rewards))
    return StepFacts(3, 3, [(scored, scores)], stats, REPORT, 20.0, 2.0, {"generator": 0.75})


def test_a_row_has_the_documented_keys_and_values() -> None:
    stats = {
        "ratio": Stat(4.0, 4, 0.9, 1.1),
        "ratio_error": Stat(0.0, 4, 0.0, 0.1),
        "clip_fraction": Stat(1.0, 4, 0.0, 1.0),
        "log_prob_gap": Stat(0.1, 4, 0.0, 0.05),
        "log_prob_gap/step10": Stat(0.1, 2, 0.0, 0.05),
        "log_prob_gap/step2": Stat(0.02, 2, 0.0, 0.01),
    }
    row = step_row(facts(stats, 1.0, 3.0, 2.0, 2.0))
    assert row == pytest.approx(
        {
            "step": 3, "version": 4, "time_s": 20.0, "step_time_s": 2.0,
            "samples": 4, "trained_samples": 4, "groups_dropped": 0, "stale_share": 0.0,
            "reward/failed": 0, "reward/mean": 2.0, "reward/std": math.sqrt(0.5), "reward/zero_std_share": 0.5,
            "reward/ocr/mean": 2.0, "reward/ocr/std": math.sqrt(0.5), "advantage/abs_mean": 0.5,
            "ratio/mean": 1.0, "ratio/low": 0.9, "ratio/high": 1.1, "ratio/max_error": 0.1, "clip_fraction/mean": 0.25,
            "log_prob_gap/max": 0.05, "log_prob_gap/step2": 0.01, "log_prob_gap/step10": 0.05,
            "grad_norm": 0.5, "learning_rate": 1e-3, "weight_delta": 0.1, "step_applied": 1, "busy/generator": 0.75,
        },
        abs=1e-3,
    )  # fmt: skip
    assert [key for key in row if "/step" in key] == ["log_prob_gap/step2", "log_prob_gap/step10"]


def test_failed_rewards_are_counted_and_enter_no_mean() -> None:
    row = step_row(facts({}, 1.0, 3.0, NAN, 9.0))
    assert (row["reward/failed"], row["groups_dropped"], row["trained_samples"]) == (1, 1, 2)
    assert row["reward/mean"] == pytest.approx((1 + 3 + 9) / 3)


def test_what_was_not_measured_has_no_key() -> None:
    row = step_row(facts({}, NAN, NAN))
    missing = {
        "reward/mean",
        "reward/zero_std_share",
        "advantage/abs_mean",
        "ratio/mean",
        "kl/mean",
        "log_prob_gap/max",
    }
    assert not missing & row.keys()
    assert row["trained_samples"] == 0


def test_samples_of_older_weights_are_the_stale_share() -> None:
    assert step_row(facts({}, 1.0, 2.0, version=2))["stale_share"] == 1.0


def test_a_log_prob_gap_names_the_timestep_where_it_is_largest() -> None:
    stats = {
        "log_prob_gap": Stat(0.0, 2, 0.0, 0.5),
        "log_prob_gap/step1": Stat(0.0, 1, 0.0, 0.1),
        "log_prob_gap/step7": Stat(0.0, 1, 0.0, 0.5),
    }
    complaint = log_prob_complaint(2, stats, 1e-3)
    assert complaint is not None
    assert "step 2" in complaint
    assert "most at step7" in complaint
    assert log_prob_complaint(2, stats, 0.5) is None
    assert log_prob_complaint(2, {}, 1e-3) is None


def test_a_log_prob_gap_that_is_no_number_is_a_complaint() -> None:
    assert log_prob_complaint(0, {"log_prob_gap": Stat(NAN, 1, NAN, NAN)}, 1e-3) is not None


def test_scored_micro_batches_are_read_in_index_order_whenever_they_came() -> None:
    step = GlobalStep(0, gap.cut(0, (Prompt(0, "a"), Prompt(1, "b")), 1, 1, 0), 1.0, 1)
    for batch in reversed(step.microbatches):
        scored = ScoredRollout(rollout_of(batch), (1.0,), (0.0,), (True,))
        step.results[batch.index] = (scored, Scores(("a",), (0,), ((1.0,),)))
    assert [scored.rollout.microbatch.index for scored, _ in step.scored_in_order()] == [0, 1]
