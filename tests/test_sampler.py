"""Which prompts a step takes: any step at any time, each epoch once."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digen.data.prompts import load_prompts
from digen.data.sampler import StepPrompts
from digen.errors import DataError
from digen.types import Prompt

FILES = Path(__file__).parent / "prompts"


def prompts(count: int) -> list[Prompt]:
    return [Prompt(k, f"prompt {k}") for k in range(count)]


def ids(sampler: StepPrompts, step: int) -> list[int]:
    return [prompt.id for prompt in sampler(step)]


def test_each_of_fifty_steps_has_six_different_prompts() -> None:
    sampler = StepPrompts(load_prompts(FILES / "drawbench_x5.txt"), 6, shuffle=True, seed=0)
    for step in range(50):
        assert len(set(ids(sampler, step))) == 6


@given(
    count=st.integers(1, 40),
    per_step=st.integers(1, 40),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)
def test_within_an_epoch_no_prompt_comes_twice_and_no_step_is_short(
    count: int, per_step: int, epoch: int, seed: int, shuffle: bool
) -> None:
    per_step = min(per_step, count)
    sampler = StepPrompts(prompts(count), per_step, shuffle, seed)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    taken = [i for step in steps for i in ids(sampler, step)]
    assert len(set(taken)) == len(taken) == count // per_step * per_step


def test_any_step_can_be_asked_for_first_so_that_resuming_needs_no_state() -> None:
    forwards = [ids(StepPrompts(prompts(10), 3, shuffle=True, seed=1), step) for step in range(20)]
    sampler = StepPrompts(prompts(10), 3, shuffle=True, seed=1)
    assert [ids(sampler, step) for step in reversed(range(20))] == forwards[::-1]


def test_the_order_is_fixed_by_seed_and_epoch_on_every_machine() -> None:
    sampler = StepPrompts(prompts(8), 8, shuffle=True, seed=7)
    assert [ids(sampler, epoch) for epoch in range(2)] == [[5, 0, 4, 2, 1, 3, 7, 6], [4, 5, 7, 6, 0, 2, 1, 3]]


def test_seeds_and_epochs_have_different_orders() -> None:
    orders = {
        tuple(ids(StepPrompts(prompts(30), 30, shuffle=True, seed=seed), epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_every_prompt_gets_its_turn_when_the_rest_of_an_epoch_is_left_out() -> None:
    sampler = StepPrompts(prompts(10), 4, shuffle=True, seed=3)
    assert sampler.steps_per_epoch == 2
    assert {i for step in range(40) for i in ids(sampler, step)} == set(range(10))


def test_without_shuffle_the_order_is_the_files_in_every_epoch() -> None:
    sampler = StepPrompts(prompts(7), 3, shuffle=False, seed=0)
    assert [ids(sampler, step) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_repeated_texts_are_separate_prompts() -> None:
    sampler = StepPrompts(load_prompts(FILES / "edge" / "duplicates.txt"), 6, shuffle=True, seed=0)
    assert sorted(ids(sampler, 0)) == [0, 1, 2, 3, 4, 5]
    assert len({prompt.text for prompt in sampler(0)}) == 3


def test_fewer_prompts_than_a_step_takes_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"prompts_per_step: got 8; allowed: 1 to 3, the number of prompts"):
        StepPrompts(prompts(3), 8, shuffle=True, seed=0)


@pytest.mark.parametrize(("steps", "epochs", "expected"), [(None, 2, 4), (3, 2, 3), (9, 2, 4), (9, None, 9), (4, 2, 4)])
def test_a_run_ends_at_the_limit_that_comes_first(steps: int | None, epochs: int | None, expected: int) -> None:
    assert StepPrompts(prompts(10), 4, shuffle=True, seed=0).num_steps(steps, epochs) == expected


def test_a_sampler_cannot_be_changed() -> None:
    sampler = StepPrompts(prompts(3), 1, shuffle=True, seed=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.seed = 1  # type: ignore[misc]
