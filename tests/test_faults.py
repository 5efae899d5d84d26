"""Runs to which everything happens that can happen: they end with the right weights, or with an error that says why."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from digen.errors import CheckpointError, DigenError, SyncError, WorkerError
from digen.testing.faults import KINDS, Ended, Planned, Setup, run_to_the_end

SEEDS = 150
ALL_SEEDS = 2400
CLEAR = (WorkerError, SyncError, CheckpointError)
"""How a run may end that does not end well."""
LEFT_BY = ("lost result", "duplicated result", "clock jump", "hang", "kill", "killed while idle", "slow")
"""Faults after which something may be in the store that nobody knows of."""


@cache
def undisturbed(seed: int) -> Ended:
    return run_to_the_end(replace(Setup.drawn(seed), faults=()))


def judge(seed: int) -> Ended:
    setup, ended = Setup.drawn(seed), run_to_the_end(Setup.drawn(seed))
    assert (ended.weights is None) != (ended.error is None)
    if ended.error is not None:
        assert isinstance(ended.error, CLEAR), (seed, ended.error)
        assert str(ended.error)
        assert ended.happened, seed
        return ended
    reference = undisturbed(seed)
    assert reference.weights is not None
    if not setup.schedule.get("staleness"):  # which samples are stale depends on when work ends
        assert ended.weights == reference.weights, seed
    if not any(fault.kind in LEFT_BY for fault in ended.happened):
        assert ended.left == 0, seed
    assert ended.left <= 4 * len(ended.happened) + 8 * ended.restarts, seed
    return ended


def judge_all(seeds: range) -> Counter[str]:
    """Kinds of faults that happened, and how runs ended."""
    found = Counter[str]()
    for seed in seeds:
        ended = judge(seed)
        found.update(fault.kind for fault in ended.happened)
        found["restarts"] += ended.restarts
        found["equal" if ended.error is None else type(ended.error).__name__] += 1
    return found


def test_simulated_runs_under_faults_end_with_the_weights_of_undisturbed_ones_or_a_clear_error() -> None:
    found = judge_all(range(SEEDS))
    assert found["equal"] > 0.6 * SEEDS
    assert found["restarts"] > 5


@pytest.mark.slow
def test_thousands_of_them_do() -> None:
    found = judge_all(range(SEEDS, ALL_SEEDS))
    assert all(found[kind] > 20 for kind in KINDS), found
    assert found["equal"] > 0.6 * (ALL_SEEDS - SEEDS)
    assert found["restarts"] > 100


def one(*faults: Planned, replicas: int = 2, every: int = 1, restarts: int = 6, **schedule: object) -> Ended:
    setup = Setup(7, faults, {"mode": "pipelined", **schedule}, replicas, every=every, restarts=restarts)
    return run_to_the_end(setup)


def weights(**schedule: object) -> float | None:
    return one(**schedule).weights  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["kill", "hang", "lost result", "killed while idle"])
@pytest.mark.parametrize("method", ["generate", "score", "pull"])
def test_a_generator_that_is_lost_is_started_again_and_its_micro_batch_is_made_again(kind: str, method: str) -> None:
    ended = one(Planned(kind, "g0", method, 1, 1.0))
    assert ended.weights == weights()
    assert ended.restarts == 0
    assert ended.happened
    if method != "pull":  # the other one may be through with everything before that counts as lost
        assert ["g0 is started again" in note for note in ended.notes] == [True]


def test_a_generator_that_dies_when_all_is_done_is_not_asked_for_anything_while_the_run_saves() -> None:
    ended = run_to_the_end(Setup.drawn(1452))  # it spun, asking a dead generator to pull
    assert ended.weights == undisturbed(1452).weights


@pytest.mark.parametrize("method", ["accumulate", "hand_gradients"])
def test_gradients_that_a_generator_had_not_handed_over_are_computed_again(method: str) -> None:
    ended = one(Planned("kill", "g0", method, 0, 1.0), Planned("kill", "g1", method, 1, 1.0), assist="both")
    assert ended.weights == weights(assist="both")
    assert ended.happened
    assert ended.restarts == 0


@pytest.mark.parametrize("method", ["accumulate", "optimizer_step", "push", "save"])
def test_a_trainer_that_is_lost_voids_the_step_and_the_run_goes_on_from_its_newest_checkpoint(method: str) -> None:
    ended = one(Planned("kill", "trainer", method, 1, 1.0))
    assert ended.restarts == 1
    assert ended.weights == weights()


def test_without_checkpoints_the_loss_of_the_trainer_ends_the_run_with_its_cause() -> None:
    ended = one(Planned("kill", "trainer", "accumulate", 5, 1.0), every=0)
    assert "trainer rank 0 failed in accumulate(): killed" in str(ended.error)


def test_a_generator_that_is_given_up_leaves_its_work_to_the_others() -> None:
    ended = one(Planned("kill", "g0", "generate", 1, 1.0), restarts=0)
    assert ended.weights == weights()
    assert ["the run goes on without g0" in note for note in ended.notes] == [True]


def test_a_generator_that_dies_whenever_it_is_asked_is_started_again_so_many_times_and_ends_the_run() -> None:
    calls = [Planned("kill", "g0", "generate", number, 1.0) for number in range(9)]
    ended = one(*calls, replicas=1, every=0, restarts=2)
    assert isinstance(ended.error, DigenError)
    assert "g0 rank 0 failed in generate(): killed" in str(ended.error)
    assert len(ended.happened) == 3
    assert len(ended.notes) == 2
