"""Which denoising steps are noisy and trained."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from digen.algos.base import StepSelector
from digen.algos.steps import AllButLast, MovingWindow, RandomFraction, Window
from digen.errors import ConfigError

SELECTORS: list[StepSelector] = [
    AllButLast(),
    RandomFraction(),
    RandomFraction(fraction=0.01),
    RandomFraction(fraction=1.0, per_sample=False),
    Window(),
    Window(size=3, low=1, high=6, noise="all"),
    Window(size=2, low=0, high=5, stride=1),
    MovingWindow(),
    MovingWindow(size=3, low=1, high=6, order="random", noise="all"),
    MovingWindow(size=2, stride=2, every=3, decay=0.1, decay_after=4),
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


moving = st.builds(
    lambda size, low, more, stride, every, order, decay: MovingWindow(
        size=size, low=low, high=low + size + more, stride=min(stride, size), every=every, order=order, decay=decay
    ),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 12),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 30)),
    st.just("progressive"),
    st.sampled_from([0.0, 0.1, 3.0]),
)


@given(window=moving, seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10_000))
def test_a_moving_window_is_whole_lies_in_its_range_and_is_one_for_all_samples_of_all_prompts(
    window: MovingWindow, seed: int, step: int
) -> None:
    assert window.high is not None
    num_steps = window.high + 1
    window.check(num_steps)
    for one in (window, window.model_copy(update={"order": "random", "decay": 0.0})):
        found = {one.trained(seed, step, prompt, sample, num_steps) for prompt in (0, 7) for sample in range(3)}
        (trained,) = found
        assert len(trained) == window.size == window.num_trained(num_steps)
        assert list(trained) == list(range(trained[0], trained[0] + window.size))
        assert window.low <= trained[0] <= trained[-1] < window.high


@settings(max_examples=40, deadline=None)
@given(window=moving)
def test_a_moving_window_covers_its_range_in_order_and_begins_again(window: MovingWindow) -> None:
    assert window.high is not None
    num_steps, every = window.high + 1, window.every or 25
    cycle = every * len(window.positions(num_steps))
    starts = [window.start(0, step, 0, num_steps) for step in range(2 * cycle)]
    seen = {i for start in starts for i in range(start, start + window.size)}
    drops = [step for step, (a, b) in enumerate(pairwise(starts)) if b < a]

    assert seen == set(range(window.low, window.high))
    assert starts[0] == window.low
    assert starts[: min(every, cycle)] == [window.low] * every or window.decay > 0
    assert all(starts[step] == window.high - window.size and starts[step + 1] == window.low for step in drops)
    assert max(b - a for a, b in pairwise(starts)) <= window.stride


def test_a_moving_window_moves_after_its_stay_and_a_resumed_run_finds_it_where_it_was() -> None:
    """P07: the first global step uses the first window, not the second."""
    window = MovingWindow(size=2, low=0, high=4, every=2)

    table = [window.trained(0, step, 7, 0, 10) for step in range(8)]

    assert table == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (0, 1), (0, 1)]
    assert [window.trained(0, step, 7, 0, 10) for step in (3, 4)] == table[3:5]


def test_a_random_moving_window_is_drawn_at_every_move_for_all_prompts() -> None:
    each, fifth = (MovingWindow(size=2, low=0, high=5, order="random", every=every) for every in (None, 5))

    assert {each.start(0, step, 0, 10) for step in range(100)} == {0, 1, 2, 3}
    assert {each.start(seed, 0, 0, 10) for seed in range(100)} == {0, 1, 2, 3}
    assert all(len({fifth.start(0, 5 * block + step, 0, 10) for step in range(5)}) == 1 for block in range(20))
    assert len({fifth.start(0, 5 * block, 0, 10) for block in range(20)}) == 4


def test_a_moving_window_reaches_the_last_trained_step_unless_told_otherwise() -> None:
    window = MovingWindow(size=4)

    assert window.positions(10) == [0, 1, 2, 3, 4, 5]
    assert window.trained(0, 5 * 25, 0, 0, 10) == (5, 6, 7, 8)
    assert MovingWindow(size=4, stride=4).positions(12) == [0, 4, 7]  # the last one moves up: none is cut short


@pytest.mark.parametrize(
    ("selector", "num_steps", "words"),
    [
        (MovingWindow(size=10), 10, "algorithm.steps.size=10 does not fit into steps 0 to 9"),
        (MovingWindow(high=10), 10, "at most 9"),
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
