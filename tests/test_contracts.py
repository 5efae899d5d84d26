"""digen's own plugins run through the suites that it offers to others, and each suite can fail."""

from pathlib import Path
from typing import Any, Literal

import pytest

from digen import plugins
from digen.algos.base import Advantage, Algorithm, PolicyLoss
from digen.algos.flowgrpo import FlowGRPO
from digen.algos.losses import ClippedLoss
from digen.algos.steps import AllButLast
from digen.testing.contract import AlgorithmContract, RewardContract, TagPolicyContract, failing

EXAMPLES = Path(__file__).parent.parent / "examples"


# --- algorithms ---

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{found.name: (found.name, {}) for found in plugins.available("algorithms")},
    "my-algorithm": (f"{EXAMPLES}/my_algorithm.py:MyAlgorithm", {}),
    "flowgrpo with cps": ("flowgrpo", {"noise": {"type": "cps"}, "loss": {"kl": 0}}),
    "flowgrpo with a window": ("flowgrpo", {"steps": {"type": "window"}, "loss": {"kl": 0}}),
    "dancegrpo with best of n": ("dancegrpo", {"best_of_n": {"best": 3, "worst": 3}}),
    "dancegrpo with wan's noise": ("dancegrpo", {"noise": {"type": "wan-sde"}}),
    "mixgrpo": ("mixgrpo", {"steps": {"every": 2}}),  # it moves on while it is watched
    "mixgrpo with a random window": ("mixgrpo", {"steps": {"order": "random", "size": 2}}),
    "longcat": ("longcat", {"samples_per_prompt": 12, "steps": {"high": 5}}),
    "diffusion-nft": ("diffusion-nft", {"loss": {"kl": 0}}),  # it would hold the flow where it is
    "dpo": ("dpo", {"loss": {"beta": 5}, "steps": {"fraction": 0.5}}),  # for distances of this toy, not of latents
}


class TestAlgorithms(AlgorithmContract):
    num_steps = 6

    @pytest.fixture(autouse=True, params=ALGORITHMS)
    def _each(self, request: pytest.FixtureRequest) -> None:
        name, settings = ALGORITHMS[request.param]
        kind: Any = plugins.find("algorithms", name)
        self.algorithm = kind.model_validate(settings)


class Shifted(Advantage):
    type: Literal["shifted"] = "shifted"

    def __call__(self, rewards):  # type: ignore[no-untyped-def]
        return [reward + 1 for reward in rewards]


class Mean(PolicyLoss):
    """A mean over rows: every row then depends on the number of the others."""

    type: Literal["mean"] = "mean"

    def __call__(self, inputs):  # type: ignore[no-untyped-def]
        terms = ClippedLoss(kl=0)(inputs)
        return type(terms)(terms.loss / len(terms.loss), terms.stats)


class Last(AllButLast):
    def trained(self, seed, step, prompt_id, sample, num_steps):  # type: ignore[no-untyped-def]
        return tuple(range(1, num_steps))


class Backwards(Mean):
    def __call__(self, inputs):  # type: ignore[no-untyped-def]
        terms = ClippedLoss(kl=0)(inputs)
        return type(terms)(-terms.loss, {"ratio": terms.stats["ratio"] * 1.01})


def changed(**parts: Any) -> Algorithm:
    fields = {name: (type(part), part) for name, part in parts.items()}
    kind = type("Changed", (FlowGRPO,), {"__annotations__": {n: f[0] for n, f in fields.items()}, **parts})
    return kind()


@pytest.mark.parametrize(
    ("part", "red"),
    [
        ({}, set()),
        ({"advantage": Shifted()}, {"test_advantages_are_finite_belong_to_their_samples_and_are_zero"}),
        ({"loss": Mean()}, {"test_a_row_has_a_loss_of_its_own"}),
        ({"steps": Last()}, {"test_trained_steps_are_noisy_ones"}),
        ({"loss": Backwards()}, {"test_the_ratio_is_1", "test_it_teaches"}),
    ],
)
def test_an_algorithm_that_breaks_a_rule_fails_there(part: dict[str, Any], red: set[str], tmp_path: Path) -> None:
    found = failing(AlgorithmContract, tmp_path, algorithm=changed(**part))
    assert all(any(name.startswith(start) for name in found) for start in red)
    assert all(
        any(name.startswith(start) for start in red) for name in found - {"test_it_teaches_a_flow_with_one_weight"}
    )


# --- rewards ---

REWARDS: dict[str, dict[str, Any]] = {
    "ocr": {"options": {"detect": False, "without_target": "prompt"}, "is_video": True},
    "jpeg-compressibility": {"is_video": True},
    "jpeg-incompressibility": {"is_video": True},
    "spread": {"judges_groups": True, "prompts": ("a", "b", "a", "b")},
    f"{EXAMPLES}/my_reward.py:named_colour": {"is_video": True},
}


class TestRewards(RewardContract):
    @pytest.fixture(autouse=True, params=REWARDS)
    def _each(self, request: pytest.FixtureRequest) -> None:
        for key, value in {"reward": request.param, **REWARDS[request.param]}.items():
            setattr(self, key, value)


@pytest.mark.parametrize(
    ("body", "red"),
    [
        ("return [float(x.mean()) for x in media]", set()),
        ("return [float(x.mean() - media.mean()) for x in media]", {"test_a_sample_has_the_score_that_it_has_alone"}),
        ("return [float(media[0].mean()) for x in media]", {"test_a_sample_has_the_score_that_it_has_alone"}),
        ("return [None for x in media]", {"test_a_score_is_a_number_or_none"}),
        ("return [float('inf')]", {"test_a_score_is_a_number", "test_scoring_twice", "test_a_sample_has_the_score"}),
        ("global n; n += 1; return [n for x in media]", {"test_scoring_twice", "test_a_sample_has_the_score"}),
    ],
)
def test_a_reward_that_breaks_a_rule_fails_there(body: str, red: set[str], tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"n = 0\n\n\ndef score(media, prompts, metadata):\n    {body}\n")
    found = failing(RewardContract, tmp_path, reward=f"{path}:score")
    assert all(any(name.startswith(start) for start in red) for name in found)
    assert all(any(name.startswith(start) for name in found) for start in red)


# --- TAG policies ---


class TestTagPolicies(TagPolicyContract):
    @pytest.fixture(autouse=True, params=["none", "static(2)", *(p.name for p in plugins.available("policies"))])
    def _each(self, request: pytest.FixtureRequest) -> None:
        self.policy = request.param


@pytest.mark.parametrize(
    ("choice", "red"),
    [
        ("Choice(bubble.next_rows)", set()),
        ("Choice(bubble.rows + 1)", {"test_it_chooses_between"}),
        ("Choice(int(costs.seconds('trainer', 'assist', 4)) and 4)", {"test_it_needs_no_costs", "test_it_chooses"}),
        ("Choice(next(turn) % 2 * 4)", {"test_it_needs_no_costs"}),
    ],
)
def test_a_policy_that_breaks_a_rule_fails_there(choice: str, red: set[str], tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import itertools\nfrom digen.schedule.tag import Choice\n\nturn = itertools.count()\n\n\n"
        f"class Mine:\n    def choose(self, bubble, costs):\n        return {choice}\n"
    )
    found = failing(TagPolicyContract, tmp_path, policy=f"{path}:Mine")
    assert all(any(name.startswith(start) for name in found) for start in red)
    assert found if red else not found
