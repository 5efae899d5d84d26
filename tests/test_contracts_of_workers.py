"""Models, backends, transports and engines of digen run through its own suites, and each suite can fail."""

from pathlib import Path

import pytest

from digen.testing.contract import (
    EngineContract,
    GeneratorContract,
    ModelContract,
    TrainerContract,
    TransportContract,
    failing,
)


class TestGlyph(ModelContract):
    name = "glyph"


class TestGenerators(GeneratorContract):
    backend = "diffusers"


class TestTrainers(TrainerContract):
    backend = "local"


class TestTransports(TransportContract):
    @pytest.fixture(autouse=True, params=["inline", "shared_memory", "safetensors"])
    def _each(self, request: pytest.FixtureRequest) -> None:
        self.transport, self.between_processes = request.param, request.param != "inline"


class TestInline(EngineContract):
    engine, ranks = "inline", 1


@pytest.mark.slow
class TestProcess(EngineContract):
    engine = "process"


# --- what breaks a rule ---

GLYPH = "digen.models.glyph:Glyph"
GENERATOR = "digen.backends.generation.diffusers:DiffusersGenerator"
TRAINER = "digen.backends.training.local:LocalTrainer"
TRANSPORT = "digen.weights.inline:InlineTransport"

NEIGHBOURS = """
    def velocity(self, latents, sigma_N, conditioning):
        v = super().velocity(latents, sigma_N, conditioning)
        return v + 0.1 * v.mean(0, keepdim=True)
"""
BACKWARDS = """
    def sigmas(self, num_steps):
        return super().sigmas(num_steps).flip(0)
"""
BY_CALL = """
    def generate(self, microbatch, version, rows):
        self.calls = getattr(self, "calls", 0) + 1
        other = type(microbatch)(0, 0, microbatch.prompts, microbatch.samples_per_prompt, self.calls)
        return super().generate(other, self.version, rows)
"""
DEAF = """
    def pull(self, published):
        self.version = published.version
        return published.fingerprint
"""
GREEDY = """
    def accumulate(self, scored, tsp, denominator, last):
        stats = super().accumulate(scored, tsp, denominator / (1 + (tsp == 0)), last)
        for parameter in self.model.transformer.parameters():
            parameter.data.mul_(1.1)
        return stats
"""
LOSSY = """
    def send(self, ticket, tensors):
        super().send(ticket, {n: t * 1.0001 if t.ndim == 2 else t for n, t in tensors.items()})
"""
HASTY = """
    def pull(self, published, into):
        into["odd"].zero_()
        super().pull(published, into)
"""
BROKEN: list[tuple[type, str, str, str, set[str]]] = [
    (ModelContract, "name", GLYPH, NEIGHBOURS, {"rows_of_any_timesteps_and_prompts_share_a_forward_as_if_alone"}),
    (ModelContract, "name", GLYPH, BACKWARDS, {"noise_levels_fall_from_about_1_to_0"}),
    (
        GeneratorContract,
        "backend",
        GENERATOR,
        BY_CALL,
        {
            "a_sample_is_the_same_whatever_else_is_generated_with_it",
            "weights_of_another_version_are_not_sampled_from",
        },
    ),
    (GeneratorContract, "backend", GENERATOR, DEAF, {"new_weights_are_taken_proven_and_used"}),
    (
        TrainerContract,
        "backend",
        TRAINER,
        GREEDY,
        {
            "the_ratio_is_1_and_accumulating_changes_no_weight",
            "neither_stacking_nor_the_cut_into_pieces_changes_the_gradient",
        },
    ),
    (
        TransportContract,
        "transport",
        TRANSPORT,
        LOSSY,
        {
            "weights_arrive_bit_equal_version_after_version",
            "what_changes_after_settle_does_not_reach_what_was_published",
            "weights_may_be_cast_on_their_way",
        },
    ),
    (
        TransportContract,
        "transport",
        TRANSPORT,
        HASTY,
        {"weights_that_do_not_fit_are_refused_with_nothing_written"},
    ),
]


NAMES = ("neighbours", "backwards", "by-call", "deaf", "greedy", "lossy", "hasty")


@pytest.mark.parametrize(("suite", "key", "base", "body", "red"), BROKEN, ids=NAMES)
def test_what_breaks_a_rule_fails_there(
    suite: type, key: str, base: str, body: str, red: set[str], tmp_path: Path
) -> None:
    module, _, name = base.partition(":")
    path = tmp_path / "mine.py"
    path.write_text(f"from {module} import {name}\n\n\nclass Mine({name}):{body}")
    more = {"between_processes": False} if suite is TransportContract else {}
    found = failing(suite, tmp_path, **{key: f"{path}:Mine"}, **more)
    assert {name.removeprefix("test_") for name in found} == red


def test_an_engine_that_hides_errors_fails_there(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from contextlib import asynccontextmanager\n\n"
        "from digen.engines.inline import InlineEngine\nfrom digen.errors import WorkerError\n\n\n"
        "class Hiding:\n"
        "    def __init__(self, group):\n"
        "        self.group, self.name, self.world_size = group, group.name, group.world_size\n\n"
        "    async def call(self, method, /, *args, **kwargs):\n"
        "        try:\n"
        "            return await self.group.call(method, *args, **kwargs)\n"
        "        except WorkerError:\n"
        "            return (None,)\n\n\n"
        "class Mine(InlineEngine):\n"
        "    @asynccontextmanager\n"
        "    async def open(self, specs):\n"
        "        async with super().open(specs) as groups:\n"
        "            yield {name: Hiding(group) for name, group in groups.items()}\n"
    )
    assert failing(EngineContract, tmp_path, engine=f"{path}:Mine", ranks=1) == {
        "test_an_exception_names_group_rank_and_method_and_the_group_goes_on",
        "test_what_one_worker_stores_another_reads_until_it_is_dropped",
    }
