"""`digen doctor`: every check seen green on a sound run and red on one that is broken in just that way."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from typer.testing import CliRunner

from digen import checks
from digen.checks import Facts, Finding, examine
from digen.cli import app
from digen.doctor import num_weights
from digen.observe.files import RunFolder
from digen.presets import resolve
from digen.rewards.spread import spread
from digen.run import run
from digen.types import Span

SOUND = {
    "step": 0, "version": 1, "samples": 24, "trained_samples": 24, "groups_dropped": 0, "stale_share": 0.0,
    "reward/failed": 0, "reward/mean": 0.5, "reward/std": 0.2, "reward/zero_std_share": 0.1, "reward/ocr/std": 0.2,
    "advantage/abs_mean": 0.8, "ratio/mean": 1.0, "ratio/max_error": 4e-7, "log_prob_gap/max": 4e-7,
    "log_prob_gap/step0": 4e-7, "log_prob_gap/step1": 1e-7,
    "grad_norm": 1e-3, "weight_delta": 0.1, "step_applied": 1, "reward/spread/mean": 12.0,
}  # fmt: skip


def facts(make_config: Callable[..., Any], *settings: str, first: Mapping[str, Any] = {}, **changes: Any) -> Facts:
    """Three sound steps with these keys (`a__b` for `a/b`) changed; None takes a key away. `first`: in the first."""
    named = {key.replace("__", "/"): value for key, value in changes.items()}
    rows = []
    for step in range(3):
        row = {**SOUND, "step": step, "version": step + 1, **named, **(first if step == 0 else {})}
        rows.append({key: value for key, value in row.items() if value is not None})
    pulls = [Span("pull", "generator", k, -1, k, k + 0.5, k + 0.6) for k in (1, 2)]
    return Facts(make_config("schedule.assist=none", *settings), rows, pulls, 10_000)


def about(check: str, found: Facts) -> list[Finding]:
    return [finding for finding in examine(found) if finding.check == check]


RATIO, CLIP, INERT = "ratio before update", "clip above noise", "clip acts"
HAD, GROUPS, ALIKE, SCALE = (
    "scores", "groups differ", "samples differ", "reward scale",
)  # fmt: skip
EPS, SYNC = "Adam's eps", "weights and sync"


def test_a_sound_run_has_nothing_wrong_and_one_note(make_config: Callable[..., Any]) -> None:
    found = examine(facts(make_config))
    assert {f.check for f in found} == {RATIO, CLIP, INERT, HAD, GROUPS, ALIKE, SCALE, EPS, SYNC}
    assert {f.check: f.level for f in found if f.level != "ok"} == {INERT: "note"}
    assert all(f.found for f in found)
    assert all(f.advice for f in found if f.level != "ok")


BROKEN: list[tuple[str, str, str, dict[str, Any]]] = [
    (RATIO, "wrong", "abs(ratio - 1) 0.003", {"ratio__max_error": 3e-3}),
    (RATIO, "wrong", "most at denoising step1", {"ratio__max_error": 3e-3, "log_prob_gap__step1": 3e-3}),
    (RATIO, "wrong", "0.002", {"ratio__max_error": 0.0, "log_prob_gap__max": 2e-3}),
    (RATIO, "unknown", "no on-policy sample", {"ratio__max_error": None}),
    (CLIP, "warn", "are up to 0.002 from 1", {"ratio__max_error": 2e-3}),
    (HAD, "warn", "9 of 72 samples without", {"reward__failed": 3}),
    (HAD, "wrong", "72 of 72", {"reward__failed": 24}),
    (GROUPS, "wrong", "100% of the groups", {"reward__zero_std_share": 1.0}),
    (GROUPS, "warn", "70% of the groups", {"reward__zero_std_share": 0.7}),
    (GROUPS, "unknown", "no group", {"reward__zero_std_share": None}),
    (ALIKE, "wrong", "is 0.1 of 255 away", {"reward__spread__mean": 0.1}),
    (ALIKE, "warn", "samples of a prompt never do", {"reward__spread__mean": None, "reward__zero_std_share": 1.0}),
    (ALIKE, "unknown", "not measured", {"reward__spread__mean": None, "reward__zero_std_share": None}),
    (SCALE, "warn", "abs(advantage) is 0.001", {"advantage__abs_mean": 9e-4}),
    (SCALE, "warn", "and clipped at 5", {"advantage__abs_mean": 9.0}),
    (SCALE, "unknown", "no sample was trained", {"advantage__abs_mean": None}),
    (EPS, "wrong", "steps are 1% of the learning rate", {"grad_norm": 1e-10}),
    (EPS, "warn", "steps are 33% of the learning rate", {"grad_norm": 5e-9}),
    (EPS, "unknown", "no gradient", {"grad_norm": 0.0}),
    (SYNC, "wrong", "none of 3 steps changed the weights", {"weight_delta": 0.0}),
    (SYNC, "wrong", "none of 3 steps changed the weights", {"step_applied": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "level", "part", "changes"), BROKEN)
def test_what_is_broken_is_told_with_its_numbers_and_what_to_do(
    check: str, level: str, part: str, changes: dict[str, Any], make_config: Callable[..., Any]
) -> None:
    (finding,) = about(check, facts(make_config, **changes))
    assert finding.level == level
    assert part in finding.found
    assert finding.advice or level == "unknown"


def test_weights_that_do_not_arrive_show_in_the_ratios_of_the_next_steps(make_config: Callable[..., Any]) -> None:
    found = facts(make_config, ratio__max_error=0.02, first={"ratio/max_error": 4e-7})
    (finding,) = about(SYNC, found)
    assert finding.level == "wrong"
    assert "grows to 0.02 after the first step" in finding.found
    assert about(RATIO, found)[0].level == "ok"


def test_generators_that_never_pulled_are_told_unless_there_are_none(make_config: Callable[..., Any]) -> None:
    update = [Span("update", "trainer", 0, 0, 0, 0.0, 1.0)]
    (finding,) = about(SYNC, replace(facts(make_config), spans=update))
    assert (finding.level, finding.found) == ("wrong", "no generator ever took new weights")
    colocated = replace(facts(make_config, "schedule.mode=colocated"), spans=update)
    assert about(SYNC, colocated)[0].level == "ok"


def test_some_steps_that_were_not_applied_are_a_warning_and_one_step_is_too_few_to_tell(
    make_config: Callable[..., Any],
) -> None:
    (finding,) = about(SYNC, facts(make_config, first={"step_applied": 0}))
    assert (finding.level, finding.found) == ("warn", "1 of 3 steps were not applied")
    whole = facts(make_config)
    assert about(SYNC, replace(whole, rows=whole.rows[:1]))[0].level == "unknown"
    assert about(SYNC, replace(whole, rows=[]))[0].found == "no step has ended yet"


def test_bfloat16_may_round_more_and_its_noise_is_held_against_the_clip(make_config: Callable[..., Any]) -> None:
    small = ("trainer.dtype=bfloat16", "algorithm.loss.clip=1e-4")
    found = facts(make_config, *small, ratio__max_error=2e-3, log_prob_gap__max=2e-3)
    assert about(RATIO, found)[0].level == "ok"
    assert about(CLIP, found)[0].level == "warn"
    assert "old_log_prob=replay" in about(CLIP, found)[0].advice


def test_with_two_updates_or_stale_samples_the_clip_acts(make_config: Callable[..., Any]) -> None:
    assert about(INERT, facts(make_config))[0].level == "note"
    assert not about(INERT, facts(make_config, "trainer.updates_per_rollout=2", "steps=4"))
    assert not about(INERT, facts(make_config, "schedule.staleness=0.5"))


def test_a_reward_that_drowns_the_others_is_named_with_its_weight(make_config: Callable[..., Any]) -> None:
    rewards = "reward={ocr: {weight: 1}, jpeg-compressibility: {weight: 100}, spread: {weight: 0}}"
    found = facts(make_config, rewards, **{"reward__jpeg-compressibility__std": 0.2, "reward__spread__std": 50.0})
    (finding,) = about(SCALE, found)
    assert finding.level == "warn"
    assert "ocr 0.2, jpeg-compressibility 20" in finding.found
    assert "lower reward.jpeg-compressibility.weight" in finding.advice
    even = facts(make_config, rewards.replace("100", "1"), **{"reward__jpeg-compressibility__std": 0.2})
    assert about(SCALE, even)[0].level == "ok"


def test_without_a_checkpoint_or_with_sgd_nothing_is_said_of_adams_eps(make_config: Callable[..., Any]) -> None:
    (finding,) = about(EPS, replace(facts(make_config), num_weights=None))
    assert (finding.level, finding.found[:13]) == ("unknown", "no checkpoint")
    assert not about(EPS, facts(make_config, "trainer.optimizer=sgd"))


def test_the_gradients_size_is_that_after_clipping(make_config: Callable[..., Any]) -> None:
    huge = facts(make_config, "trainer.max_grad_norm=1e-8", grad_norm=1e3)
    assert about(EPS, huge)[0].level in ("warn", "wrong")
    assert "gradients are about 1e-10" in about(EPS, huge)[0].found


def test_of_a_long_run_the_last_steps_speak_for_rewards_and_the_first_for_the_ratio(
    make_config: Callable[..., Any],
) -> None:
    whole = facts(make_config)
    early = [{**SOUND, "reward/zero_std_share": 1.0, "ratio/max_error": 1.0} for _ in range(5)]
    long = replace(whole, rows=[*early, *whole.rows * checks.RECENT])
    assert about(GROUPS, long)[0].level == "ok"
    assert about(RATIO, long)[0].level == "wrong"


def test_nothing_that_was_not_measured_passes(make_config: Callable[..., Any]) -> None:
    empty = Facts(make_config(), [], [], None)
    levels = {finding.check: finding.level for finding in examine(empty)}
    assert set(levels.values()) <= {"unknown", "note"}


# --- spread ---


def test_spread_is_the_distance_to_the_nearest_sample_of_the_same_prompt() -> None:
    media = np.zeros((5, 2, 2, 3), np.uint8)
    media[1], media[2], media[3], media[4] = 10, 30, 200, 30
    prompts = ["a", "a", "a", "b", "b"]
    assert spread(media, prompts, [{}] * 5) == [10.0, 10.0, 20.0, 170.0, 170.0]
    assert spread(media[:, None], prompts, [{}] * 5) == [10.0, 10.0, 20.0, 170.0, 170.0]
    assert spread(media[:1], ["a"], [{}]) == [None]
    media[1] = 0
    assert spread(media, prompts, [{}] * 5)[:2] == [0.0, 0.0]


# --- runs ---

SMALL = (
    "engine.name=inline", "algorithm.samples_per_prompt=2", "sampling.num_steps=4", "data.prompts_per_step=2",
    "observe.tensorboard=false", "observe.grid_every=0",
)  # fmt: skip
REWARDS = """
def brightness(media, prompts, metadata):
    return [float(sample.mean()) / 255 for sample in media]


def constant(media, prompts, metadata):
    return [1.0] * len(media)


def absent(media, prompts, metadata):
    return [None] * len(media)
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(REWARDS)
    return path


def digen(*words: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout) if "--json" in words and done.stdout else done.output


def levels(report: Mapping[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in report["findings"]}


def test_settings_are_tried_with_two_small_steps_that_leave_nothing_behind(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rewards.parent)
    word = f'reward={{"{rewards}:brightness": {{}}}}'
    code, report = digen("flowgrpo", *SMALL, word, "trainer.updates_per_rollout=1", "--json")
    assert code == report["wrong"] == 0
    assert report["num_steps"] == 2
    found = levels(report)
    assert {found[check] for check in (RATIO, CLIP, HAD, GROUPS, ALIKE, EPS, SYNC)} == {"ok"}
    assert [path.name for path in rewards.parent.iterdir() if path.name != "__pycache__"] == ["own.py"]


@pytest.mark.parametrize(("reward", "check"), [("constant", GROUPS), ("absent", HAD)])
def test_settings_that_cannot_learn_end_with_exit_code_1(reward: str, check: str, rewards: Path) -> None:
    code, report = digen("flowgrpo", *SMALL, f'reward={{"{rewards}:{reward}": {{}}}}', "--json")
    assert code == 1
    assert levels(report)[check] == "wrong"
    assert levels(report)[SYNC] == "wrong"


def test_a_run_is_judged_by_its_folder_alone(rewards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*SMALL, f'reward={{"{rewards}:brightness": {{}}}}', f"run_dir={folder}", "steps=2"]
    run(resolve("flowgrpo", "glyph", None, words, {}), console=Console(quiet=True))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, report = digen(str(folder), "--json")
    assert (code, report["target"], report["num_steps"]) == (0, str(folder), 2)
    assert levels(report)[EPS] == "ok"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    code, table = digen(str(folder))
    assert code == 0
    assert "nothing wrong" in table
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, "weight_delta": 0.0}) + "\n" for row in rows))
    code, table = digen(str(folder))
    assert code == 1
    assert "1 wrong" in table


def test_what_is_no_run_and_no_algorithm_is_refused(tmp_path: Path) -> None:
    code, message = digen(str(tmp_path))
    assert code == 2
    assert "error" in message
    assert digen(str(tmp_path), "--model", "glyph")[0] == 2
    assert "Did you mean 'flowgrpo'" in digen("flowgrop")[1]


def test_the_number_of_trained_weights_is_read_from_the_newest_checkpoints_head(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "flowgrpo", "glyph")
    assert num_weights(folder) is None
    for version, size in ((1, 4), (10, 7)):
        folder.checkpoint(version).mkdir()
        tensors = {"a": np.zeros((3, size), np.float32), "b": np.zeros((), np.float32)}
        save_file(tensors, folder.checkpoint(version) / "weights.safetensors", metadata={"made": "here"})
    assert num_weights(folder) == 22


def test_every_check_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "doctor.md").read_text()
    for check in (RATIO, CLIP, INERT, HAD, GROUPS, ALIKE, SCALE, EPS, SYNC, "settings"):
        assert f"| {check} |" in page
    for key in ("target", "num_steps", "wrong", "findings", "check", "level", "found", "advice"):
        assert f"`{key}`" in page
