"""The schema: what each key takes, what cannot be had together, and how texts become values."""

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from digen import schema
from digen.algos.dancegrpo import DanceGRPO
from digen.algos.flowgrpo import FlowGRPO
from digen.config import RunConfig, doubts
from digen.errors import ConfigError
from digen.settings import (
    dump_yaml,
    from_environment,
    from_file,
    from_overrides,
    merge,
    parse_value,
    source,
    without_other_types,
)

RUN = RunConfig[FlowGRPO]
KNOWN = schema.keys(RUN)


def run_with(**settings: object) -> RunConfig[FlowGRPO]:
    return RUN.model_validate({"algorithm": {}, "steps": 1, **settings})


def values(text: str) -> dict[tuple[str, ...], object]:
    return {s.path: s.value for s in from_file(text, "file.yaml") if s.value != {}}


# --- what cannot be had together ---


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"schedule": {"assist": "both", "mode": "naive"}}, "assist=both needs schedule.mode=pipelined, got naive"),
        ({"schedule": {"assist": "generator", "ordered": True}}, "ordered=true needs one worker that accumulates"),
        ({"trainer": {"updates_per_rollout": 2}, "steps": 3}, "steps=3 must be a multiple of .*rollout=2"),
        ({"trainer": {"updates_per_rollout": 2}, "steps": 4, "checkpoint": {"every": 1}}, "every=1 must be a multiple"),
        (
            {"trainer": {"updates_per_rollout": 2}, "steps": 2, "algorithm": {"old_log_prob": "replay"}},
            "updates_per_rollout=2 needs algorithm.old_log_prob=rollout, got replay",
        ),
    ],
)
def test_what_cannot_be_had_together_is_said_with_both_values(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        run_with(**settings)


def test_assist_may_be_had_with_tag_but_a_person_is_told_that_tag_is_not_asked() -> None:
    assert doubts(run_with(schedule={"assist": "both", "tag": "bts"})) == [
        "schedule.assist=both decides when the trainer generates, not tag=bts"
    ]
    assert not doubts(run_with(schedule={"assist": "generator", "tag": "bts"}))


# --- values (P59) ---


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-5", "1.0e-5", "+1e-5", ".00001", '"1e-5"', "1_0e-6"])
def test_every_spelling_of_a_small_number_is_a_number_in_file_and_on_the_command_line(text: str) -> None:
    in_file = values(f"trainer: {{learning_rate: {text}}}")["trainer", "learning_rate"]
    for value in (in_file, parse_value(text, "trainer.learning_rate")):
        rate = run_with(trainer={"learning_rate": value}).trainer.learning_rate
        assert isinstance(rate, float)
        assert rate == pytest.approx(1e-5, rel=1e-12)


@pytest.mark.parametrize("text", ["nan", ".nan", "inf", ".inf", "-.inf", "-1e-5", "0", "true", "fast", "null", "[1]"])
def test_what_is_no_positive_finite_number_is_refused_as_a_learning_rate(text: str) -> None:
    value = parse_value(text, "trainer.learning_rate")
    flagged = schema.flags_for_numbers({"trainer": {"learning_rate": value}}, KNOWN)
    if not flagged:
        with pytest.raises(ValidationError):
            run_with(trainer={"learning_rate": value})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-4", -4),
        ("2.5", 2.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("2001-01-01", "2001-01-01"),
        ("a: b # c", "a: b # c"),
        ("[1, 1e-3, no]", [1, 1e-3, "no"]),
        ("{a: 1e-3}", {"a": 1e-3}),
        ('"true"', "true"),
    ],
)
def test_a_value_on_the_command_line_follows_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text, "key")
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_broken_value_on_the_command_line_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.adam_betas: cannot read '\[0\.9'"):
        parse_value("[0.9", "trainer.adam_betas")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nsteps: 2\n", r"f\.yaml:2:1: duplicate key 'steps'"),
        ("trainer:\n  tsp: 1\n  tsp: 1\n", r"f\.yaml:3:3: duplicate key 'tsp'"),
        ("steps: [\n", r"f\.yaml:2:1: "),
        ("- steps\n", r"f\.yaml: got \['steps'\]; a configuration file is a mapping"),
        ("steps: \x00\n", r"f\.yaml: .*special characters"),
        ("? [a]\n: 1\n", r"f\.yaml:1:"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(text, "f.yaml")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_sets_nothing(text: str) -> None:
    assert from_file(text, "f.yaml") == []


@pytest.mark.parametrize(
    "text", ["1e-5", "no", "true", "null", "~", "", " ", "010", "0o7", "0x1", ".5", "1.", "12:30", "-", "#", "é\n", "="]
)
def test_a_text_that_looks_like_something_else_stays_a_text_when_written_and_read(text: str) -> None:
    assert values(dump_yaml({"key": text})) == {("key",): text}


@pytest.mark.parametrize("value", [1e-5, 1e-10, 2.5, 1e22, 5, -3, True, False, None])
def test_a_number_is_written_so_that_it_is_read_as_the_same_number(value: object) -> None:
    (read,) = values(dump_yaml({"key": value})).values()
    assert read == value
    assert type(read) is type(value)


# --- layers ---


def test_a_setting_knows_its_line_variable_or_command_line() -> None:
    layers = [
        *from_file("trainer:\n  tsp: 1\n  adam_eps: 1e-9\n", "f.yaml"),
        *from_environment({"DIGEN_TRAINER__TSP": "2", "HOME": "/"}),
        *from_overrides(["seed=3"]),
    ]
    assert source(layers, ("trainer", "adam_eps")) == "f.yaml:3"
    assert source(layers, ("trainer", "tsp")) == "environment variable DIGEN_TRAINER__TSP"
    assert source(layers, ("seed",)) == "command line"
    assert source(layers, ("steps",)) == "default"


@pytest.mark.parametrize("text", ["steps", "=3", "trainer..tsp=1", ".tsp=1", "trainer.=1", 'reward."ocr=1'])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: section\.key=value"):
        from_overrides([text])


def test_a_quoted_part_of_an_override_may_hold_dots() -> None:
    (setting,) = from_overrides(['reward."my/file.py:name".weight=2'])
    assert setting.path == ("reward", "my/file.py:name", "weight")
    assert schema.dotted(setting.path) == 'reward."my/file.py:name".weight'


def merged(*layers: str) -> object:
    """`noise` as these files set it, lowest first."""
    kept = without_other_types([from_file(text, "f") for text in layers], {("noise", "type")})
    return merge({}, [s for layer in kept for s in layer], set())["noise"]


def test_an_option_belongs_to_the_type_that_its_layer_names() -> None:
    sde = "noise: {type: flow-sde, level: 0.7}"
    assert merged(sde, "noise: {type: cps}") == {"type": "cps"}
    assert merged(sde, "noise: {type: cps, level: 0.9}") == {"type": "cps", "level": 0.9}
    assert merged(sde, "noise: {type: cps, level: 0.9}", "noise: {type: flow-sde}") == {
        "type": "flow-sde",
        "level": 0.7,
    }


def test_an_option_of_a_layer_without_a_type_belongs_to_the_final_one() -> None:
    assert merged("noise: {type: flow-sde, level: 0.7}", "noise: {level: 0.9}", "noise: {type: cps}") == {
        "type": "cps",
        "level": 0.9,
    }


def test_a_mapping_with_free_keys_is_replaced_as_a_whole_and_extended_by_key() -> None:
    defaults = {"reward": {"ocr": {"weight": 1.0}}}
    whole = merge(defaults, from_file("reward: {jpeg: {weight: 2}}", "f"), {("reward",)})
    assert whole == {"reward": {"jpeg": {"weight": 2}}}
    one = merge(defaults, from_overrides(["reward.jpeg.weight=2"]), {("reward",)})
    assert one == {"reward": {"ocr": {"weight": 1.0}, "jpeg": {"weight": 2}}}


# --- the schema itself ---


def test_every_key_is_described_in_words() -> None:
    for path, field in schema.keys(RunConfig[DanceGRPO]).items():
        assert schema.allowed(field), path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("trainer.learning_rate", "a number > 0"),
        ("schedule.staleness", "a number >= 0 and <= 1"),
        ("trainer.max_grad_norm", "a number > 0 or null"),
        ("schedule.mode", "colocated, naive, pipelined"),
        ("data.shuffle", "true or false (also yes/no, on/off, 1/0)"),
        ("seed", "a whole number >= 0 and < 9223372036854775808"),
        ("trainer.lora", "a section with rank, alpha, target_modules or null"),
        ("reward.<name>.weight", "a number"),
    ],
)
def test_what_a_key_allows_is_read_from_its_type(path: str, words: str) -> None:
    assert schema.allowed(KNOWN[tuple(path.split("."))]) == words


def test_a_section_is_frozen() -> None:
    with pytest.raises(ValidationError):
        run_with().trainer.learning_rate = 1.0  # type: ignore[misc]


def test_a_number_where_a_text_is_wanted_is_that_text() -> None:
    assert run_with(sampling={"negative_prompt": 7}).sampling.negative_prompt == "7"


def test_an_infinite_loss_clip_is_refused() -> None:
    with pytest.raises(ValidationError):
        run_with(algorithm={"loss": {"clip": math.inf}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": None}, "one of steps and epochs must be set"),
        ({"schedule": {"staleness": 0.5, "window": 1}}, r"schedule\.staleness=0\.5 needs schedule\.window=2, got 1"),
        ({"schedule": {"staleness": 0.5, "mode": "naive"}}, r"needs schedule\.mode=pipelined, got naive"),
        ({"trainer": {"ranks": 2}}, r"trainer\.backend=local has one rank, got trainer\.ranks=2; use fsdp"),
        ({"engine": {"name": "inline"}, "generator": {"ranks": 2}}, r"engine\.name=inline runs one rank"),
    ],
)
def test_what_cannot_be_had_together_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_with(**settings)


@pytest.mark.parametrize("devices", ["cpu", "cuda", "cuda:0", "cuda:0-3", "cuda:0,2", "cuda:0-1,4"])
def test_devices_are_written_as_documented(devices: str) -> None:
    assert run_with(generator={"devices": devices}).generator.devices == devices


@pytest.mark.parametrize("devices", ["gpu", "cuda:", "cuda:a", "cpu:0", "cuda:0-"])
def test_other_devices_are_refused(devices: str) -> None:
    with pytest.raises(ValidationError):
        run_with(generator={"devices": devices})


def test_a_run_dir_is_a_path() -> None:
    assert run_with(run_dir="runs/x").run_dir == Path("runs/x")
