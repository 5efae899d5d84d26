"""Troubles with prompt data that users of other projects report, each as the check that was made of it."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from digen import credit
from digen.algos.flowgrpo import FlowGRPO
from digen.data.prompts import load_prompts
from digen.data.sampler import StepPrompts
from digen.presets import resolve
from digen.schedule import gap
from digen.types import MicroBatch, Rollout

FILES = Path(__file__).parent / "prompts"
EDGE = FILES / "edge"


def texts(path: Path) -> list[str]:
    return [prompt.text for prompt in load_prompts(path)]


def digen(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "digen", *words], capture_output=True, text=True, check=False)


def test_p67_rows_do_not_multiply_at_unicode_separators() -> None:
    found = texts(EDGE / "unicode_separators.txt")
    assert len(found) == 4
    assert [any(c in text for c in "\u2028\u0085\f\u2029") for text in found] == [True] * 4


def test_p68_byte_order_marks_and_carriage_returns_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    assert texts(EDGE / "bom_crlf_blank.txt") == ["a red cube", "a blue sphere", "a green cone"]
    real = FILES / "t2i_compbench_color_val.txt"
    unix = tmp_path / "lf.txt"
    unix.write_bytes(real.read_bytes().replace(b"\r\n", b"\n"))
    assert b"\r\n" in real.read_bytes()
    assert len(texts(real)) == 300
    assert not any(text.endswith("\r") for text in texts(real))
    assert texts(real) == texts(unix)


def test_p70_prompts_of_the_same_text_are_groups_of_their_own() -> None:
    algorithm = FlowGRPO(samples_per_prompt=4)
    prompts = StepPrompts(load_prompts(EDGE / "duplicates.txt"), 6, shuffle=True, seed=0)(0)
    microbatches = gap.cut(0, prompts, algorithm.samples_per_prompt, 2, seed=0)
    identities = [microbatch.identity(row) for microbatch in microbatches for row in range(microbatch.num_samples)]
    assert len({(prompt.id, sample) for prompt, sample in identities}) == 24
    for number, microbatch in enumerate(microbatches):
        rewards = [float((5 * row + 3 * number) % 7) for row in range(microbatch.num_samples)]
        advantages = _advantages(algorithm, microbatch, rewards)
        for start in range(0, len(rewards), 4):
            group = rewards[start : start + 4]
            mean, std = statistics.fmean(group), statistics.pstdev(group)
            expected = [(reward - mean) / (std + 1e-4) for reward in group]
            assert advantages[start : start + 4] == pytest.approx(expected, abs=1e-6)
    assert len(texts(FILES / "drawbench_x5.txt")) == 1000


def _advantages(algorithm: Any, microbatch: MicroBatch, rewards: list[float]) -> list[float]:
    return list(credit.credit(Rollout(microbatch, 0, (), "g"), rewards, algorithm).advantages)


def test_p71_a_file_smaller_than_a_step_is_refused_and_a_rest_sits_out_its_epoch(tmp_path: Path) -> None:
    few, ten = tmp_path / "few.txt", tmp_path / "ten.txt"
    few.write_text("a\nb\nc\n")
    ten.write_text("".join(f"{k}\n" for k in range(10)))
    run = ("run", "flowgrpo", "--steps", "2", "--run-dir", str(tmp_path / "run"), "data.prompts_per_step=8")
    refused = digen(*run, f"data.prompts={few}")
    assert refused.returncode == 2
    assert "data.prompts_per_step: got 8; allowed: 1 to 3, the number of prompts" in refused.stderr
    assert not (tmp_path / "run").exists()
    shown = digen(
        "run", "flowgrpo", "--dry-run", "--json", f"data.prompts={ten}", "data.prompts_per_step=4", "epochs=3"
    )
    derived = json.loads(shown.stdout)["derived"]
    assert (derived["prompts"], derived["steps_per_epoch"], derived["steps"]) == (10, 2, 6)
    assert "What does not fill a step sits out that epoch" in (FILES.parents[1] / "docs" / "data.md").read_text()


def test_p72_long_prompts_are_cut_with_one_warning_and_reach_the_reward_whole(tmp_path: Path) -> None:
    from rich.console import Console

    from digen.run import run

    (tmp_path / "own.py").write_text(
        "def length(media, prompts, metadata):\n"
        f"    with open('{tmp_path}/lengths', 'a') as file:\n"
        "        file.write(''.join(f'{len(p)}\\n' for p in prompts))\n"
        "    return [float(sample.mean()) for sample in media]\n"
    )
    long, real = EDGE / "long_line.txt", FILES / "t2is_first30.jsonl"
    small = ("engine.name=inline", "algorithm.samples_per_prompt=2", "sampling.num_steps=4", "steps=1")
    quick = ("observe.tensorboard=false", "data.prompts_per_step=4", f"run_dir={tmp_path}/run")
    reward = f'reward={{"{tmp_path}/own.py:length": {{}}}}'
    words = [*small, *quick, reward, f"data.prompts={{{long}: 1, {real}: 1}}", "model.max_text_tokens=64"]
    run(resolve("flowgrpo", "glyph", None, words, {}), console=Console(quiet=True))
    notes = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert notes.count("are cut by the text encoder") == 1
    assert "31 of 32 prompts have over 64 tokens" in notes
    lengths = {int(line) for line in (tmp_path / "lengths").read_text().split()}
    assert max(lengths) == max(map(len, texts(long))) > 99_000
    assert lengths < {len(text) for text in texts(long) + texts(real)}
