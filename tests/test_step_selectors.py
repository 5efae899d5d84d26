"""Which denoising steps are noisy and trained."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from digen.algos.base import StepSelector
from digen.algos.steps import AllButLast, RandomFraction, Window
from digen.errors import ConfigError

SELECTORS: list[StepSelector] = [
    AllButLast(),
    RandomFraction(),
    RandomFraction(fraction=0.01),
    RandomFraction(fraction=1.0, per_sample=False),
    Window(),
    Window(size=3, low=1, high=6, noise="all"),
    Window(size=2, low=0, high=5, stride=1),
]

identities = st.tuples(
    st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 100_000), st.integers(0, 63), st.integers(8, 60)
)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@settings(max_examples=40, deadline=None)
@given(identity=identities)
def test_trained_steps_are_noisy_sorted_never_the_last_and_as_many_as_said(
    selector: StepSelector, identity: tuple[int, int, int, int, int]
) -> None:
    seed, step, prompt_id, sample, num_steps = identity
    selector.check(num_steps)

    noisy = selector.noisy(seed, step, prompt_id, num_steps)
    trained = selector.trained(seed, step, prompt_id, sample, num_steps)

    assert trained == selector.trained(seed, step, prompt_id, sample, num_steps)
    assert list(trained) == sorted(set(trained))
    assert len(trained) == selector.num_trained(num_steps) >= 1
    assert set(trained) <= set(noisy) <= set(range(num_steps))
    assert max(trained) < num_steps - 1


def test_all_steps_but_the_last_are_trained() -> None:
    assert AllButLast().trained(0, 0, 0, 0, 10) == tuple(range(9))
    assert AllButLast().noisy(0, 0, 0, 10) == tuple(range(10))


# Fractions


def test_a_fraction_of_0_4_of_10_steps_trains_exactly_4_steps_of_each_of_8_samples() -> None:
    terms = [RandomFraction(fraction=0.4).trained(1, 0, 3, sample, 10) for sample in range(8)]

    assert [len(steps) for steps in terms] == [4] * 8
    assert sum(map(len, terms)) == 32


@pytest.mark.parametrize(("num_steps", "count"), [(16, 9), (12, 6), (20, 11)])
def test_dancegrpo_counts_its_fraction_without_the_last_step(num_steps: int, count: int) -> None:
    assert RandomFraction(fraction=0.6, of="all-but-last").num_trained(num_steps) == count


def test_fractions_are_not_cut_short_by_binary_rounding() -> None:
    assert RandomFraction(fraction=0.29).num_trained(100) == 29


def test_a_tiny_fraction_trains_one_step_and_the_whole_all_but_the_last() -> None:
    assert RandomFraction(fraction=0.05).num_trained(10) == 1
    assert RandomFraction(fraction=1.0).num_trained(10) == 9


@pytest.mark.parametrize("fraction", [0, 1.2, -1, float("nan")])
def test_fractions_that_mean_nothing_are_refused(fraction: float) -> None:
    with pytest.raises(ValidationError, match="fraction"):
        RandomFraction(fraction=fraction)


def test_random_steps_differ_between_samples_or_are_shared_by_the_group() -> None:
    own = {RandomFraction().trained(0, 0, 0, sample, 16) for sample in range(12)}
    shared = {RandomFraction(per_sample=False).trained(0, 0, 0, sample, 16) for sample in range(12)}

    assert len(own) > 6
    assert len(shared) == 1


def test_random_steps_cover_all_steps_evenly() -> None:
    counts = [0] * 10
    for sample in range(1000):
        for step in RandomFraction(fraction=0.4).trained(0, 0, 0, sample, 10):
            counts[step] += 1

    assert counts[9] == 0
    assert all(390 < count < 500 for count in counts[:9])


# Windows


def test_a_window_is_one_for_all_samples_and_differs_between_prompts_and_steps() -> None:
    window = Window(size=2, low=0, high=5)

    for prompt_id in range(20):
        trained = {window.trained(0, 0, prompt_id, sample, 10) for sample in range(24)}
        assert trained == {window.noisy(0, 0, prompt_id, 10)}
    for windows in (
        {window.trained(0, 0, prompt_id, 0, 10) for prompt_id in range(100)},
        {window.trained(0, step, 0, 0, 10) for step in range(100)},
        {window.trained(seed, 0, 0, 0, 10) for seed in range(100)},
    ):
        assert windows == {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_the_first_step_uses_the_first_window_and_a_sliding_window_moves_by_its_stride() -> None:
    window = Window(size=2, low=0, high=5, stride=1)

    table = [window.trained(0, step, 7, 0, 10) for step in range(6)]

    assert table == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 1), (1, 2)]
    assert [window.trained(0, step, 7, 0, 10) for step in (2, 3)] == table[2:4]  # as after a resume


def test_draws_are_the_same_for_ever() -> None:
    assert [Window().trained(0, step, 0, 0, 10)[0] for step in range(8)] == WINDOW_STARTS
    assert RandomFraction().trained(0, 0, 0, 0, 10) == RANDOM_STEPS


WINDOW_STARTS = [0, 2, 1, 1, 1, 3, 3, 0]
RANDOM_STEPS = (0, 2, 5, 6, 7, 8)


def test_a_window_as_wide_as_its_range_trains_the_first_steps() -> None:
    window = Window(size=3, low=0, high=3)

    assert {window.trained(seed, 0, 0, 0, 10) for seed in range(20)} == {(0, 1, 2)}
    assert window.noisy(0, 0, 0, 10) == (0, 1, 2)
    assert Window(size=3, low=0, high=3, noise="all").noisy(0, 0, 0, 10) == tuple(range(10))


def test_a_window_lies_in_the_first_half_unless_told_otherwise() -> None:
    steps = {i for seed in range(100) for i in Window().trained(seed, 0, 0, 0, 10)}

    assert steps == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("selector", "num_steps", "words"),
    [
        (Window(size=2, low=0, high=10), 10, "at most 9"),
        (Window(size=4), 6, "algorithm.steps.size=4 does not fit into steps 0 to 3"),
        (Window(), 1, "2 or more"),
        (AllButLast(), 1, "sampling.num_steps=1"),
        (RandomFraction(), 1, "sampling.num_steps=1"),
    ],
)
def test_a_selector_that_does_not_fit_the_number_of_steps_is_refused(
    selector: StepSelector, num_steps: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        selector.check(num_steps)
