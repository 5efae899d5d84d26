"""From everything a user sets to one run: precedence, problems with their source, files that can be fed back."""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digen import plugins, presets, schema
from digen.algos.flowgrpo import FlowGRPO
from digen.config import RunConfig
from digen.errors import ConfigError
from digen.presets import derived, dump, load, payload, rebuild, resolve

KNOWN = schema.keys(RunConfig[FlowGRPO])


def run_with(
    *overrides: str,
    algorithm: str = "flowgrpo",
    model: str | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig[Any]:
    return resolve(algorithm, model, file, overrides, environ or {})


def problems(*overrides: str, **where: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run_with(*overrides, **where)
    assert caught.value.exit_code == 2
    return str(caught.value)


def nested(key: str, value: str) -> str:
    """`a.b=c` as a YAML file."""
    parts = key.split(".")
    return "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts))[:-1] + f" {value}\n"


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write_file


# --- precedence ---


def test_each_layer_wins_over_those_below_it(write) -> None:
    """default < preset < file < environment < command line, one key at a time."""
    default = RunConfig[FlowGRPO].model_fields["trainer"].default.learning_rate
    preset = run_with().trainer.learning_rate
    assert preset != default
    file = write("trainer: {learning_rate: 3e-5}\n")
    environ = {"DIGEN_TRAINER__LEARNING_RATE": "4e-5"}
    assert run_with(file=file).trainer.learning_rate == 3e-5
    assert run_with(file=file, environ=environ).trainer.learning_rate == 4e-5
    assert run_with("trainer.learning_rate=5e-5", file=file, environ=environ).trainer.learning_rate == 5e-5


def test_a_layer_leaves_alone_what_it_does_not_name(write) -> None:
    changed = run_with(file=write("trainer: {learning_rate: 3e-5}\n"))
    assert changed == run_with("trainer.learning_rate=3e-5")
    assert changed.trainer.adam_eps == run_with().trainer.adam_eps


def test_the_last_of_two_overrides_of_one_key_counts() -> None:
    assert run_with("seed=1", "seed=2").seed == 2


def test_the_order_of_type_and_options_does_not_matter() -> None:
    assert run_with("algorithm.noise.level=0.5", "algorithm.noise.type=cps") == run_with(
        "algorithm.noise.type=cps", "algorithm.noise.level=0.5"
    )


def test_a_new_type_of_noise_takes_its_own_defaults_not_the_options_of_the_old_one() -> None:
    noise = run_with("algorithm.noise.type=cps").algorithm.noise
    assert noise == type(noise)()


def test_an_override_inside_a_section_that_was_off_switches_it_on() -> None:
    assert run_with("trainer.lora.rank=4").trainer.lora.rank == 4
    assert run_with("trainer.lora={}").trainer.lora.alpha == 64.0
    assert run_with("trainer.lora={}", "trainer.lora=null").trainer.lora is None


def test_a_file_with_rewards_replaces_those_of_the_preset_and_an_override_adds(write) -> None:
    jpeg = "jpeg-compressibility"
    assert list(run_with(file=write(f"reward: {{{jpeg}: {{}}}}\n")).reward) == [jpeg]
    both = run_with(f"reward.{jpeg}.weight=-0.5")
    assert {name: term.weight for name, term in both.reward.items()} == {"ocr": 1.0, jpeg: -0.5}


def test_who_sets_the_mode_or_the_tag_policy_switches_off_the_assist_of_the_layers_below(write) -> None:
    def assist(*overrides: str, **where: Any) -> str:
        return run_with(*overrides, **where).schedule.assist

    assert assist() == assist("schedule.staleness=0.5") == "both"  # the preset's
    assert assist("schedule.tag=bts") == assist("schedule.mode=naive") == "none"
    assert assist("schedule.tag=bts", "schedule.assist=generator") == "generator"
    file = write("schedule: {assist: trainer}\n")
    assert assist(file=file) == assist("schedule.assist=trainer", environ={"DIGEN_SCHEDULE__TAG": "bts"}) == "trainer"
    assert assist("schedule.tag=none", file=file) == "none"
    assert assist(file=write(dump(run_with("schedule.assist=both", "schedule.tag=bts")))) == "both"


def test_a_generator_that_has_no_gradients_cannot_help_and_that_is_said_before_anything_loads(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("class Plain:\n    def generate(self, microbatch, version, rows): ...\n")
    backend = f"generator.backend={plain}:Plain"
    assert "schedule.assist=generator: generator" in problems(backend, "schedule.assist=generator")
    assert "hand_gradients" in problems(backend, "schedule.assist=both")
    assert run_with(backend, "schedule.assist=trainer").schedule.assist == "trainer"


def test_the_highest_layer_that_names_a_model_chooses_the_preset(write, tmp_path: Path) -> None:
    assert run_with().model.name == "glyph"
    file = write("model: {name: nowhere}\n")
    assert "model 'nowhere'" not in str(run_with(model="glyph", file=file))
    assert run_with(model="glyph", file=file) == run_with()
    assert "model.name" in problems(file=file)


# --- P60: what is misspelt or misplaced is refused wherever it stands, before anything is loaded ---


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("learning_rte", "learning_rte: unknown key. Did you mean trainer.learning_rate?"),
        ("trainer.learning_rte", "trainer.learning_rte: unknown key. Did you mean trainer.learning_rate?"),
        ("model.learning_rate", "model.learning_rate: unknown key. It belongs at trainer.learning_rate."),
        ("learning_rate", "learning_rate: unknown key. It belongs at trainer.learning_rate."),
        ("trianer.learning_rate", "trianer: unknown key. Did you mean trainer?"),
        ("samples_per_prompt", "samples_per_prompt: unknown key. It belongs at algorithm.samples_per_prompt."),
        ("algorithm.noise.levle", "algorithm.noise.levle: unknown key. Did you mean algorithm.noise.level?"),
        ("algorithm.steps.fraction", "algorithm.steps.fraction: not an option of algorithm.steps.type=window"),
        ("trainer.lora.rnk", "trainer.lora.rnk: unknown key. Did you mean trainer.lora.rank?"),
    ],
)
@pytest.mark.parametrize("layer", ["file", "environment", "command line"])
def test_a_wrong_key_is_refused_with_its_place_and_the_nearest(key: str, sentence: str, layer: str, write) -> None:
    name = "DIGEN_" + key.upper().replace(".", "__")
    message = {
        "file": lambda: problems(file=write(nested(key, "1"))),
        "environment": lambda: problems(environ={name: "1"}),
        "command line": lambda: problems(f"{key}=1"),
    }[layer]()
    origin = {"file": "mine.yaml:", "environment": f"environment variable {name}", "command line": "command line"}
    assert sentence in message
    assert origin[layer] in message


@pytest.mark.parametrize("layer", ["file", "command line"])
def test_a_hyphen_for_an_underscore_is_refused_with_the_right_key(layer: str, write) -> None:
    key = "trainer.learning-rate"
    message = problems(file=write(nested(key, "1"))) if layer == "file" else problems(f"{key}=1")
    assert "trainer.learning-rate: unknown key. Did you mean trainer.learning_rate?" in message


def test_a_wrong_value_is_shown_with_what_is_allowed_and_its_line(write) -> None:
    message = problems(file=write("steps: 2\nschedule:\n  mode: naiv\n"))
    assert "schedule.mode: got 'naiv'. Did you mean 'naive'? Allowed: colocated, naive, pipelined." in message
    assert "mine.yaml:3)" in message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.learning_rate=-1", "trainer.learning_rate: got -1; allowed: a number > 0"),
        ("trainer.learning_rate=.nan", "trainer.learning_rate: got nan; allowed: a number > 0"),
        ("trainer.learning_rate=fast", "trainer.learning_rate: got 'fast'; allowed: a number > 0"),
        ("steps=true", "steps: got true; allowed: a whole number >= 1 or null"),
        ("steps=2.5", "steps: got 2.5; allowed: a whole number >= 1 or null"),
        ("schedule.staleness=2", "schedule.staleness: got 2; allowed: a number >= 0 and <= 1"),
        ("generator.devices=gpu", "generator.devices: got 'gpu'; allowed: `cpu`, `cuda`, `cuda:0-3`, `cuda:0,2`"),
        ("algorithm.noise.type=cpz", "algorithm.noise.type: got 'cpz'. Did you mean 'cps'?"),
        ("trainer.adam_betas=[0.9]", "trainer.adam_betas"),
        ("trainer=3", "trainer: got 3; allowed: a section with ranks"),
        ("reward.ocr=3", "reward.ocr: got 3; allowed: a section with weight"),
        ("reward.ocr.weight=x", "reward.ocr.weight: got 'x'; allowed: a number"),
        ("generator.env.A=[1]", "generator.env.A: got [1]; allowed: text"),
        ("reward.ocr.detct=no", "Did you mean 'detect'?"),
        ("reward.ocr.threads=0", "reward.ocr.threads"),
        ("schedule.tag=stati(2)", "schedule.tag: got 'stati(2)'"),
        ("sampling.num_steps=1", "sampling.num_steps=1"),
        ("algorithm.steps.high=11", "algorithm.steps.high=11"),
        ("schedule.prompts_per_microbatch=13", "got 13; allowed: 1 to data.prompts_per_step=12"),
        ("data.prompts_per_step=100000", "data.prompts_per_step: got 100000; allowed: 1 to"),
        ("generator.backend=difusers", "generator.backend: generator: got 'difusers'. Did you mean 'diffusers'?"),
        ("trainer.backend=lokal", "Did you mean 'local'?"),
        ("engine.name=proces", "Did you mean 'process'?"),
        ("model.name=glyf", "Did you mean 'glyph'?"),
        ("reward.jpeg-compresibility.weight=1", "Did you mean 'jpeg-compressibility'?"),
        ("data.prompts=no/such.txt", "no/such.txt does not exist"),
        ("data.heldout=no/such.txt", "no/such.txt does not exist"),
        ("model.path=./no/such", "no/such does not exist"),
    ],
)
def test_a_value_that_cannot_be_had_is_one_readable_line(override: str, sentence: str) -> None:
    message = problems(override)
    assert sentence in message
    assert message.endswith("(command line)")
    assert "\n" not in message


def test_all_problems_are_reported_at_once(write) -> None:
    message = problems(
        "trainer.learning_rate=-1",
        "engine.name=proces",
        "data.prompts=gone.txt",
        file=write("steps: true\nlearning_rte: 1\n"),
        environ={"DIGEN_SCHEDULE__MODE": "fast"},
    )
    assert message.startswith("6 problems:\n")
    for part in ("learning_rate: got -1", "proces", "gone.txt", "steps: got true", "learning_rte", "schedule.mode"):
        assert part in message


def test_a_file_for_another_algorithm_is_refused(write) -> None:
    message = problems(file=write("algorithm: {name: dancegrpo}\n"))
    assert "algorithm.name: got 'dancegrpo', but the run is for 'flowgrpo' (" in message


def test_a_configuration_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml cannot be read: No such file or directory" in problems(file=tmp_path / "nowhere.yaml")


def test_checking_a_run_imports_neither_torch_nor_a_model() -> None:
    code = (
        "import sys; from digen.presets import resolve, derived; derived(resolve('flowgrpo', None, None, [], {}));"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'ray', 'rapidocr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- P61: booleans ---

NAMED = {"reward": "ocr", "eval_reward": "jpeg-compressibility"}
"""What stands for <name> in there."""
BOOLEANS = [
    ".".join(path).replace("<name>", NAMED.get(path[0], ""))
    for path, field in KNOWN.items()
    if "true or false" in schema.allowed(field)
]
NEEDED = {
    "algorithm.steps.per_sample": ["algorithm.steps.type=random-fraction"],
    "trainer.cpu_offload": ["trainer.backend=deepspeed"],
}


def value_at(config: RunConfig[Any], key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


@pytest.mark.parametrize("key", BOOLEANS)
@pytest.mark.parametrize(("text", "meant"), [("false", False), ("no", False), ("off", False), ("0", False)])
def test_false_on_the_command_line_beats_true_in_the_file(key: str, text: str, meant: bool, write) -> None:
    file = write(nested(key, "true"))
    needed = NEEDED.get(key, [])
    assert value_at(run_with(*needed, file=file), key) is True
    assert value_at(run_with(*needed, f"{key}={text}", file=file), key) is meant


@pytest.mark.parametrize("key", BOOLEANS)
@pytest.mark.parametrize("text", ["true", "yes", "on", "1", "True", "YES"])
def test_true_on_the_command_line_beats_false_in_file_and_environment(key: str, text: str, write) -> None:
    environ = {"DIGEN_" + key.upper().replace(".", "__"): "off"}
    needed = NEEDED.get(key, [])
    assert value_at(run_with(*needed, file=write(nested(key, "no")), environ=environ), key) is False
    assert value_at(run_with(*needed, f"{key}={text}", environ=environ), key) is True


@pytest.mark.parametrize("key", BOOLEANS)
def test_maybe_is_no_boolean(key: str) -> None:
    message = problems(*NEEDED.get(key, []), f"{key}=maybe")
    assert f"{key}: got 'maybe'; allowed: true or false (also yes/no, on/off, 1/0)" in message


# --- presets, files and processes ---


@pytest.mark.parametrize(("algorithm", "model"), presets.presets())
def test_every_preset_is_a_valid_run_of_its_own_algorithm_and_model(algorithm: str, model: str) -> None:
    config = run_with(algorithm=algorithm, model=model)
    assert config.algorithm.name == algorithm
    assert config.model.name == model


def test_a_resolved_run_can_be_fed_back_and_loaded_on_its_own(tmp_path: Path) -> None:
    config = run_with("reward={jpeg-compressibility: {weight: 2}}", "algorithm.noise.type=cps", "trainer.lora={}")
    (tmp_path / "config.yaml").write_text(dump(config))
    assert run_with(file=tmp_path / "config.yaml") == config
    assert load(tmp_path / "config.yaml") == config


def test_a_file_without_an_algorithm_cannot_be_loaded_on_its_own(write) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name is missing"):
        load(write("steps: 1\n"))


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff"))
OVERRIDES = {
    "trainer.learning_rate": st.floats(1e-12, 1.0).map(repr),
    "trainer.adam_eps": st.floats(1e-30, 1e-3).map(repr),
    "trainer.tsp": st.integers(0, 20).map(str),
    "trainer.lora": st.sampled_from(["null", "{}", "{rank: 3, alpha: 1e-1}", "{target_modules: [to_q, 'no']}"]),
    "trainer.max_grad_norm": st.sampled_from(["null", "1e3"]),
    "trainer.env": st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["1", "no", "1e-3"])).map(str),
    "sampling.negative_prompt": TEXTS.map(lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    "data.shuffle": st.sampled_from(["yes", "no", "true", "0"]),
    "schedule.tag": st.sampled_from(["none", "static(2)"]),
    "algorithm.noise.type": st.sampled_from(["flow-sde", "cps", "dance-sde", "wan-sde"]),
    "algorithm.loss.kl": st.sampled_from(["0", "0.04", "1e-3"]),
    "reward": st.sampled_from(["{ocr: {weight: 0.5}}", "{jpeg-compressibility: {}, ocr: {weight: -1e-3}}"]),
    "seed": st.integers(0, 2**63 - 1).map(str),
    "run_dir": st.sampled_from(["null", "runs/x", "'1e-5'", "'no'"]),
}


@given(st.fixed_dictionaries({}, optional=OVERRIDES))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_dumped_and_fed_back_is_the_same_run(tmp_path: Path, chosen: Mapping[str, str]) -> None:
    config = run_with(*(f"{key}={value}" for key, value in chosen.items()))
    file = tmp_path / "config.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert run_with(file=file) == config
    assert rebuild(pickle.loads(pickle.dumps(payload(config)))) == config


# --- plugins by path ---


@pytest.fixture
def own_algorithm(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(
        "from typing import Literal\n\nfrom digen.algos.flowgrpo import FlowGRPO\n\n\n"
        'class Own(FlowGRPO):\n    name: Literal["own"] = "own"\n'
        "    samples_per_prompt: int = 6\n    zeal: float = 1.0\n"
    )
    return f"{path}:Own"


def test_an_algorithm_from_a_file_takes_the_preset_without_its_algorithm_section(own_algorithm: str) -> None:
    config = run_with("algorithm.zeal=2", algorithm=own_algorithm)
    assert config.algorithm.zeal == 2.0
    assert config.algorithm.samples_per_prompt == 6
    assert config.trainer == run_with().trainer


def test_a_run_with_an_algorithm_from_a_file_can_be_fed_back_loaded_and_sent_to_a_process(
    own_algorithm: str, tmp_path: Path
) -> None:
    config = run_with(algorithm=own_algorithm)
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    assert load(file) == run_with(algorithm=own_algorithm, file=file) == config
    code = (
        "import pickle, sys; from digen.presets import rebuild; "
        "print(rebuild(pickle.loads(sys.stdin.buffer.read())).algorithm.name)"
    )
    data = pickle.dumps(payload(config))
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout.strip() == b"own"


def test_what_is_no_algorithm_is_refused_as_one() -> None:
    assert "is no subclass of digen.algos.base.Algorithm" in problems(algorithm="math:sqrt")


def test_a_reward_from_a_file_is_checked_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def bright(media, prompts, metadata):\n    return []\n")
    assert list(run_with(f'reward={{"{path}:bright": {{}}}}').reward) == [f"{path}:bright"]
    assert "Did you mean 'bright'?" in problems(f'reward={{"{path}:brigt": {{}}}}')


# --- what follows from the settings ---


def test_the_counts_of_the_preset_follow_from_its_numbers() -> None:
    config = run_with()
    counts = derived(config)
    assert counts["groups_per_step"] == 12
    assert counts["samples_per_step"] == counts["trained_samples_per_step"] == 12 * 8
    assert counts["microbatches_per_step"] == 12
    assert counts["trained_timesteps_per_sample"] == 3
    assert counts["rollout_forwards_per_step"] == 12 * 8 * 10
    assert counts["update_forwards_per_step"] == 12 * 8 * 3
    assert counts["optimizer_steps_per_step"] == 1
    assert counts["steps"] == 45


@pytest.mark.parametrize(
    ("overrides", "name", "count"),
    [
        (["schedule.prompts_per_microbatch=5"], "microbatches_per_step", 3),
        (["sampling.guidance=4"], "rollout_forwards_per_step", 2 * 960),
        (["sampling.guidance=4"], "update_forwards_per_step", 2 * 288),
        (["algorithm.loss.kl=0.1"], "update_forwards_per_step", 2 * 288),
        (["algorithm.old_log_prob=replay"], "update_forwards_per_step", 288),
        (["algorithm.best_of_n={best: 1, worst: 1}"], "trained_samples_per_step", 24),
        (["steps=null", "epochs=1", "data.prompts_per_step=3", "data.prompts={seven}"], "steps", 2),
        (["steps=3", "epochs=2", "data.prompts_per_step=3", "data.prompts={seven}"], "steps", 3),
        (["data.prompts_per_step=3", "data.prompts={seven}"], "prompts", 7),
    ],
)
def test_counts_follow_from_settings(overrides: Sequence[str], name: str, count: int, tmp_path: Path) -> None:
    seven = tmp_path / "seven.txt"
    seven.write_text("".join(f"prompt {k}\n" for k in range(7)))
    assert derived(run_with(*(o.replace("{seven}", str(seven)) for o in overrides)))[name] == count


@pytest.mark.parametrize("per_microbatch", [1, 2, 4, 5, 7, 12])
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_micro_batch_size_works_with_any_number_of_workers(per_microbatch: int, ranks: int) -> None:
    """P26: no divisibility rule ties batch, workers and group size."""
    config = run_with(
        f"schedule.prompts_per_microbatch={per_microbatch}",
        f"generator.ranks={ranks}",
        f"generator.replicas={ranks}",
        "algorithm.samples_per_prompt=5",
    )
    assert derived(config)["samples_per_step"] == 60


def test_a_model_without_prompts_of_its_own_asks_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    pass\n")
    assert f"data.prompts: must be set, model '{path}:Mine'" in problems("steps=1", model=f"{path}:Mine")


def test_presets_are_found_beside_the_package_or_inside_it() -> None:
    assert ("flowgrpo", "glyph") in presets.presets()
    assert all(os.access(path, os.R_OK) for path in presets.presets().values())


def test_plugin_names_of_the_configuration_cover_every_kind_that_is_not_read_elsewhere() -> None:
    assert {*presets.NAMES.values(), "algorithms", "rewards", "policies"} == set(plugins.KINDS)
