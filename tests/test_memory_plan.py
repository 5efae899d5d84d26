"""The memory planner: what a rank holds against sums by hand, placements, the command, and what a run is told."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import digen
from digen.cli import app
from digen.config import ModelConfig, RunConfig
from digen.errors import ConfigError
from digen.memory import here
from digen.memory.placement import MemoryPlan, place
from digen.memory.ranks import RankMemory, generator_memory, rollouts, trainer_memory
from digen.memory.sizes import Weight, Weights
from digen.presets import resolve

GB = 10**9
GLYPH = Path(digen.__file__).parent / "models" / "glyph"


@dataclass(frozen=True)
class Model:
    """Ten blocks of a million parameters, adapters of a thousand, and a thousand parameters outside of blocks."""

    trained: bool
    itemsize: int = 4
    encoders: int = 7000
    decoder: int = 900
    latents: int = 10
    num_latents: int = 2
    media: int = 5
    conditioning: int = 3
    blocks: int = 10
    asked: list[tuple[int, bool, bool]] = field(default_factory=list)

    @property
    def weights(self) -> Weights:
        base = Weight((1000, 1000), self.itemsize, self.trained)
        block = (base,) if self.trained else (base, Weight((10, 100), 4, True))
        return Weights((*(block,) * self.blocks, (Weight((1000,), self.itemsize, self.trained),)), 64)

    def pass_bytes(self, rows: int, *, trained: bool, checkpointed: bool = False) -> int:
        self.asked.append((rows, trained, checkpointed))
        return rows * (100_000 if checkpointed else 1_000_000) * (10 if trained else 1)

    def decode_bytes(self, rows: int) -> int:
        return rows * 2000


FULL, ADAPTERS = Model(trained=True), Model(trained=False, itemsize=2)


def configured(*overrides: str, algorithm: str = "flowgrpo") -> RunConfig[Any]:
    small = (
        "algorithm.samples_per_prompt=8", "sampling.num_steps=6", "data.prompts_per_step=3", "steps=3",
        "trainer.batch_size=2", "trainer.tsp=2", "schedule.assist=none",
    )  # fmt: skip
    return resolve(algorithm, "glyph", None, [*small, *overrides], {})


def trainer(model: Model, *overrides: str, memory: float | None = None) -> RankMemory:
    return trainer_memory(configured(*overrides), model, memory)


# --- one rank ---


def test_one_rank_with_full_weights_has_four_copies_of_them_and_two_more_while_it_steps() -> None:
    whole = 10_001_000 * 4
    rank = trainer(FULL)
    assert rank.parts["parameters"] == whole + 64
    assert (rank.parts["optimizer"], rank.parts["gradients"], rank.parts["copies"]) == (2 * whole, whole, 0)
    assert rank.parts["activations"] == 2 * 2 * 10_000_000
    assert rank.moments["step"] == 6 * whole + 64
    trajectories = 8 * 3 * 2 * 10 + 3 + 4 * (2 * 10 + 3)
    assert rank.moments["update"] == 4 * whole + 64 + 40_000_000 + trajectories
    assert (rank.peak, rank.when) == (rank.moments["step"], "step")


def test_adapters_are_float32_on_a_frozen_base_in_bfloat16() -> None:
    rank = trainer(ADAPTERS, "trainer.lora={rank: 4, alpha: 8}")
    adapters = 10 * 1000 * 4
    assert rank.parts["parameters"] == 10_001_000 * 2 + adapters + 64
    assert (rank.parts["gradients"], rank.parts["optimizer"]) == (adapters, 2 * adapters)
    assert rank.parts["base copy"] == 0


@pytest.mark.parametrize(
    ("overrides", "part", "nbytes"),
    [
        (["trainer.optimizer=sgd"], "optimizer", 0),
        (["trainer.ema={}"], "copies", 40_004_000),
        (["algorithm.loss.kl=0.1"], "base copy", 40_004_064),
        (["trainer.batch_size=1"], "activations", 20_000_000),
        (["trainer.tsp=0"], "activations", 60_000_000),
        (["trainer.activation_checkpointing=true"], "activations", 4_000_000),
    ],
)
def test_each_setting_changes_its_part(overrides: list[str], part: str, nbytes: int) -> None:
    assert trainer(FULL, *overrides).parts[part] == nbytes


def test_moments_in_eight_bits_take_a_byte_and_a_scale_for_each_block() -> None:
    config = configured()
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"optimizer": "adamw-8bit"})})
    large, small = 10 * 2 * (1_000_000 + 4 * 3907), 8 * 1000
    assert trainer_memory(config, FULL).parts["optimizer"] == large + small


# --- several ranks ---


def test_fsdp_divides_all_but_the_gradients_that_are_summed_once_a_step() -> None:
    rank = trainer(FULL, "trainer.backend=fsdp", "trainer.ranks=4")
    part = (10 * 250 * 1000 + 250) * 4
    assert rank.parts["parameters"] == part + 64
    assert rank.parts["optimizer"] == 2 * part
    assert rank.parts["gradients"] == 10_001_000 * 4
    assert rank.parts["gathered"] == (1000 + 2 * 1_000_000) * 4
    assert rank.moments["step"] == 6 * part + 64
    assert (
        trainer(FULL, "trainer.backend=fsdp", "trainer.ranks=4", "trainer.sync_gradients=pass").parts["gradients"]
        == part
    )


def test_rows_that_do_not_divide_are_rounded_up() -> None:
    rank = trainer(FULL, "trainer.backend=fsdp", "trainer.ranks=3")
    assert rank.parts["parameters"] == (10 * 334 * 1000 + 334) * 4 + 64


def test_hybrid_divides_over_its_row_alone() -> None:
    rank = trainer(FULL, "trainer.backend=fsdp", "trainer.ranks=8", "trainer.shard_ranks=2")
    assert rank.parts["parameters"] == 10_001_000 * 2 + 64


def test_offload_leaves_what_is_gathered_and_whole_gradients_on_the_device() -> None:
    rank = trainer(FULL, "trainer.backend=fsdp", "trainer.ranks=4", "trainer.cpu_offload=true")
    assert (rank.parts["parameters"], rank.parts["optimizer"]) == (64, 0)
    assert rank.parts["gathered"] > 0
    assert rank.host > 3 * (10_001_000 // 4) * 4


@pytest.mark.parametrize(("stage", "whole"), [(1, True), (2, True), (3, False)])
def test_deepspeed_steps_a_second_copy_of_its_part(stage: int, whole: bool) -> None:
    rank = trainer(FULL, "trainer.backend=deepspeed", "trainer.ranks=4", f"trainer.zero_stage={stage}")
    part, all_of_it = 10_001_000, 10_001_000 * 4
    assert rank.parts["parameters"] == (all_of_it if whole else part) + part + 64
    assert rank.parts["optimizer"] == 2 * part
    bucket = all_of_it
    assert rank.parts["gradients"] == (all_of_it if stage == 1 else part) + bucket
    assert rank.moments["load"] == all_of_it + 64


def test_a_trainer_that_generates_has_room_for_it_and_its_copy() -> None:
    tagged = ("schedule.tag=static(1)", "trainer.backend=fsdp", "trainer.ranks=4")
    without = trainer(FULL, "trainer.backend=fsdp", "trainer.ranks=4")
    assert "generate" not in without.moments
    ways = {way: trainer(FULL, *tagged, f"trainer.generate_with={way}") for way in ("sharded", "gathered", "copy")}
    whole = 10_001_000 * 4
    assert ways["gathered"].moments["generate"] - ways["sharded"].moments["generate"] == whole - 4 * 2_001_000
    assert ways["copy"].parts["generation copy"] == whole + 64
    assert ways["copy"].host == whole + 64
    assert ways["sharded"].moments["encode"] == 7000


def test_a_generator_has_the_whole_model_and_encodes_before_it_loads_it() -> None:
    rank = generator_memory(configured("generator.ranks=2", "generator.replicas=3", "generator.batch_size=4"), FULL)
    assert rank.ranks == 6
    assert rank.parts["parameters"] == 40_004_064
    assert rank.moments["encode"] == 7000
    samples = 2 * 4 * (3 * 2 * 10 + 5) + (1 + 4) * 3
    assert rank.moments["generate"] == 40_004_064 + 900 + 4_000_000 + samples
    assert rank.standing == 40_004_964
    assert "update" not in rank.moments


def test_a_generator_that_helps_has_gradients_and_activations_too() -> None:
    rank = generator_memory(configured("schedule.assist=generator"), FULL)
    assert rank.parts["gradients"] == 40_004_000
    assert rank.moments["update"] > rank.moments["generate"]


def test_a_steps_samples_are_in_the_hosts_memory() -> None:
    assert rollouts(configured(), FULL) == 3 * (8 * (3 * 2 * 10 + 5) + 3)


# --- placements ---


def placed(model: Model, gpus: int, gigabytes: float, *overrides: str) -> MemoryPlan:
    config = configured("trainer.backend=fsdp", "trainer.tsp=auto", *overrides)
    given = {text.partition("=")[0] for text in overrides}
    return place(config, lambda *_: model, gpus, gigabytes * GB, given)


def test_what_fits_is_left_as_it_is_but_for_the_number_of_devices() -> None:
    found = placed(FULL, 8, 80)
    assert found.fits
    assert not found.problems
    assert found.added == {
        "trainer.ranks": 4,
        "trainer.devices": "cuda:4-7",
        "generator.replicas": 4,
        "generator.devices": "cuda:0-3",
    }


def test_auto_takes_the_widest_pass_that_fits() -> None:
    assert placed(FULL, 8, 80).ranks[1].width == 3  # all
    assert placed(FULL, 8, 0.12).ranks[1].width == 1


def test_activation_checkpointing_comes_before_more_trainers_and_offload_last() -> None:
    assert placed(FULL, 8, 0.105).added["trainer.activation_checkpointing"] is True
    tight = placed(Model(trained=False, blocks=40), 8, 0.20, "trainer.lora={rank: 4, alpha: 8}")
    assert tight.fits
    assert "trainer.cpu_offload" not in tight.added


def test_what_the_user_set_stays() -> None:
    found = placed(FULL, 8, 80, "trainer.ranks=2", "generator.ranks=2")
    assert found.config.trainer.ranks == 2
    assert (found.config.generator.ranks, found.config.generator.replicas) == (2, 3)
    fixed = placed(FULL, 8, 0.105, "trainer.activation_checkpointing=false", "trainer.batch_size=2")
    assert not {"trainer.activation_checkpointing", "trainer.batch_size"} & fixed.added.keys()


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    found = placed(Model(trained=True, itemsize=4000), 8, 5)
    assert found.fits is False
    generator, trainer_ = found.problems
    missing = (found.ranks[0].peak - 0.9 * 5 * GB) / GB
    assert generator.startswith(f"needs {missing:.1f} GB more per generator rank (while it does: generate); fits with")
    assert generator.endswith("devices of 45 GB")
    assert "GB more per trainer rank" in trainer_


def test_more_devices_are_named_where_they_would_do() -> None:
    lora = Model(trained=False, blocks=400)
    found = placed(lora, 4, 1.0, "trainer.cpu_offload=false", "trainer.sync_gradients=step", "trainer.tsp=1")
    (problem,) = [p for p in found.problems if "trainer rank" in p] or [""]
    assert not problem or "GPUs" in problem


@pytest.mark.parametrize(
    ("gpus", "allowed"), [(0, "1 to 4096"), (-3, "1 to 4096"), (5000, "1 to 4096"), (1, "2 or more")]
)
def test_a_senseless_number_of_devices_is_refused(gpus: int, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"--gpus: got {gpus}; allowed: {allowed}"):
        placed(FULL, gpus, 80)


def test_one_device_does_for_a_colocated_run() -> None:
    found = placed(FULL, 1, 80, "schedule.mode=colocated")
    assert found.fits
    assert [rank.group for rank in found.ranks] == ["trainer"]


# --- the command ---


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "120", "TERM": "dumb"})


def test_the_command_plans_a_run_as_it_is_configured(tmp_path: Path) -> None:
    result = call("flowgrpo", "--model", "glyph", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["fits"] is None
    generator, trainer_ = document["groups"]
    config = json.loads((Path(here.__file__).parents[1] / "models/glyph/transformer/config.json").read_text("utf-8"))
    assert config["in_channels"] > 0
    assert trainer_["bytes"]["optimizer"] == 2 * trainer_["bytes"]["gradients"]
    assert generator["bytes"]["parameters"] == trainer_["bytes"]["parameters"]
    assert trainer_["peak"] == max(trainer_["moments"].values())


def test_the_table_names_parts_peak_and_settings() -> None:
    result = call("flowgrpo", "--model", "glyph", "--gpus", "4", "--gpu-memory", "1")
    assert result.exit_code == 0, result.output
    for text in (
        "generator (",
        "trainer (",
        "parameters",
        "activations",
        "peak",
        "fits on 4 GPUs with",
        "trainer.ranks=2",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flowgrpo", "--gpus", "1"], "error: --gpus: got 1; allowed: 2 or more, or 1 with schedule.mode=colocated"),
        (["flowgrpo", "--gpus", "4", "--gpu-memory", "-3"], "error: --gpu-memory: got -3; allowed: gigabytes"),
        (["--gpus", "8"], "error: --gpus needs an ALGORITHM"),
        (["flowgrpo", "--microbatches", "8"], "error: --microbatches is about the time of a step"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(words: list[str], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr


# --- what a run is told ---


def on_gpus(*overrides: str) -> RunConfig[Any]:
    config = configured(*overrides)
    section = {
        name: getattr(config, name).model_copy(update={"devices": devices})
        for name, devices in (("generator", "cuda:0"), ("trainer", "cuda:1"))
    }
    return config.model_copy(update=section)


RANKS = (
    RankMemory("generator", 1, {}, {"generate": 50 * GB}, 40 * GB),
    RankMemory("trainer", 1, {}, {"update": 70 * GB}, 30 * GB),
)


def test_a_run_is_refused_only_where_it_cannot_fit_and_told_where_it_is_close() -> None:
    def kind(first: float, second: float) -> str:
        return here.judge(on_gpus(), RANKS, {"cuda:0": int(first * GB), "cuda:1": int(second * GB)}).kind

    assert kind(80, 80) == "fits"
    assert kind(80, 72) == "close"
    assert kind(80, 60) == "close"
    assert kind(80, 59) == "too much"
    assert kind(42, 80) == "too much"


def test_groups_that_share_a_device_are_added_up_one_of_them_at_its_peak() -> None:
    config = on_gpus()
    shared = config.model_copy(update={"trainer": config.trainer.model_copy(update={"devices": "cuda:0"})})
    found = here.judge(shared, RANKS, {"cuda:0": 80 * GB})
    assert found.kind == "too much"
    assert found.lines == ("cuda:0: 1 x generator and 1 x trainer will need 110.0 GB, 80.0 GB are free",)
    resting = RankMemory("generator", 1, {}, {"generate": 50 * GB}, 0)
    assert here.judge(shared, (resting, RANKS[1]), {"cuda:0": 80 * GB}).kind == "close"


def test_a_run_that_cannot_fit_ends_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "ask", lambda _: here.Judgement("too much", ("cuda:1: 1 x trainer will need 99 GB",)))
    with pytest.raises(
        ConfigError, match=r"does not fit into the devices' memory\ncuda:1: 1 x trainer will need 99 GB\n"
    ):
        here.check_memory(on_gpus())
    monkeypatch.setattr(here, "ask", lambda _: here.Judgement("close", ("cuda:1: 1 x trainer will need 99 GB",)))
    assert here.check_memory(on_gpus()) == ["cuda:1: 1 x trainer will need 99 GB: that is close"]


@pytest.mark.slow
def test_a_process_of_its_own_counts_a_run_on_gpus() -> None:
    assert here.ask(on_gpus()).kind == "fits"  # no such device here: the engine will say so


def test_on_a_cpu_a_note_says_that_the_weights_alone_are_too_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert here.check_memory(configured()) == []
    monkeypatch.setattr(here, "available_memory", lambda: 1000)
    (note,) = here.check_memory(configured("generator.replicas=3", f"model.path={GLYPH}"))
    assert note.startswith("4 ranks load 0.0 GB of weights each, 0.0 GB of memory are free here")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   512 kB\n")
    monkeypatch.undo()
    assert here.available_memory(meminfo) == 512 * 1024
    assert here.available_memory(tmp_path / "none") is None


# --- the published models ---


@dataclass(frozen=True)
class Known:
    """Parameters as published, of the transformer and of all text encoders."""

    transformer: int
    encoders: int


KNOWN = {
    "qwen-image": Known(20_430_401_088, 8_292_166_656),
    "flux1-dev": Known(11_901_408_320, 123_060_480 + 4_762_310_656),
    "sd3.5-medium": Known(2_243_171_520, 123_650_304 + 694_659_840 + 4_762_310_656),
    "sd3.5-large": Known(8_056_627_520, 123_650_304 + 694_659_840 + 4_762_310_656),
    "wan2.1-1.3b": Known(1_418_996_800, 5_680_910_336),
    "wan2.1-14b": Known(14_288_491_584, 5_680_910_336),
    "hunyuan-video": Known(12_821_012_544, 7_505_186_816 + 123_060_480),
}


@pytest.mark.parametrize("model", KNOWN)
def test_sizes_of_published_models_are_known_without_a_download(model: str) -> None:
    from digen.memory.blank import blank
    from digen.memory.measure import weights_of

    family, parts = blank(ModelConfig(name=model, height=480, width=832, num_frames=5), torch.bfloat16)
    weights = weights_of(family)
    assert sum(weight.numel for weight in weights.all) == KNOWN[model].transformer
    assert parts.encoder_size == KNOWN[model].encoders
    assert family.latent_shape[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks"),
    [("qwen-image", 16), ("flux1-dev", 8), ("sd3.5-medium", 4), ("wan2.1-14b", 8), ("hunyuan-video", 8)],
)
def test_a_preset_is_placed_on_gpus_with_the_parts_that_arithmetic_gives(model: str, ranks: int) -> None:
    result = call("flowgrpo", "--model", model, "--gpus", 2 * ranks, "--gpu-memory", 80, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    generator, trainer_ = document["groups"]
    config = resolve("flowgrpo", model, None, [], {})
    adapters = trainer_["bytes"]["gradients"]
    assert document["fits"] is True
    assert (trainer_["ranks"], generator["ranks"]) == (ranks, ranks)
    frozen = 2 * KNOWN[model].transformer
    assert 0 <= generator["bytes"]["parameters"] - frozen - adapters < 0.25 * frozen  # buffers: SD3.5's positions
    assert trainer_["bytes"]["optimizer"] == pytest.approx(2 * adapters / ranks, rel=0.02)
    least = (frozen + adapters) / ranks
    assert least <= trainer_["bytes"]["parameters"] < least + 0.25 * frozen
    assert generator["bytes"]["text encoders"] == 2 * KNOWN[model].encoders
    assert 0 < trainer_["bytes"]["activations"] < 72e9
    assert config.trainer.lora is not None
