"""Tables, saved data sets and chats as prompts; several sources in a run; where metadata and negatives arrive."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from digen.config import doubts
from digen.data import columns
from digen.data.prompts import load_prompts
from digen.data.shares import counts_of, rounded_shares
from digen.data.sources import Sources
from digen.errors import ConfigError, DataError
from digen.presets import dump, load, prompt_sources, resolve, step_prompts
from digen.rewards.ocr import target_of
from digen.types import MicroBatch, Prompt

SAVED = Path(__file__).parent / "prompts" / "saved"
"""What Hugging Face's library (datasets 5.2) wrote: prompt, tag, include, and a column of bytes."""
ROWS = [
    ("a cat", {"tag": "x", "include": [{"class": "cat", "count": 1}]}),
    ('a sign "OPEN"', {"include": []}),
    ("a dog", {"tag": "y", "include": [{"class": "dog", "count": 2}]}),
]


def content(path: Path, column: str = "prompt") -> list[tuple[str, Any]]:
    return [(prompt.text, dict(prompt.metadata)) for prompt in load_prompts(path, column)]


def refusal(path: Path, column: str = "prompt") -> str:
    with pytest.raises(DataError) as caught:
        load_prompts(path, column)
    assert str(path) in str(caught.value)
    return str(caught.value)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def text(path: Path, count: int) -> Path:
    path.write_text("".join(f"{path.stem} {k}\n" for k in range(count)))
    return path


# --- tables of columns ---


@pytest.mark.parametrize("name", ["shards", "splits/train"])
def test_a_saved_data_set_is_read_in_order_with_its_columns_as_metadata_but_no_bytes(name: str) -> None:
    assert content(SAVED / name) == ROWS
    assert [prompt.id for prompt in load_prompts(SAVED / name)] == [0, 1, 2]


def test_a_folder_of_splits_is_refused_with_the_folders_to_choose_from() -> None:
    assert f"has several splits; allowed: {SAVED}/splits/train, {SAVED}/splits/test" in refusal(SAVED / "splits")


def test_a_selection_that_was_not_written_out_is_refused(tmp_path: Path) -> None:
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "b.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert "flatten_indices" in refusal(tmp_path)


def test_parquet_arrow_and_folders_of_them_read_as_the_same_rows(tmp_path: Path) -> None:
    table = pa.table({"caption": ["a", "b\u2028c", " d "], "n": [1, None, 3]})
    expected = [("a", {"n": 1}), ("b\u2028c", {}), ("d", {"n": 3})]
    pq.write_table(table, tmp_path / "whole.parquet", row_group_size=2)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(table.slice(2), folder / "train-00001-of-00002.parquet")
    pq.write_table(table.slice(0, 2), folder / "train-00000-of-00002.parquet")
    for path in (tmp_path / "whole.parquet", tmp_path / "file.arrow", folder):
        assert content(path, "caption") == expected


def test_a_row_without_a_prompt_is_refused_by_its_number(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", None, "b", " "]}), tmp_path / "holes.parquet")
    message = refusal(tmp_path / "holes.parquet")
    assert "row 2: no key 'prompt'" in message
    assert "row 4: 'prompt' is empty" in message


def test_a_wrong_column_is_refused_once_with_the_columns_that_can_be_read(tmp_path: Path) -> None:
    table = pa.table({"Prompt": ["a"], "image": [{"bytes": b"\0", "path": None}], "raw": [b"x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert "data.column: got 'prompt'. Did you mean 'Prompt'? Allowed: Prompt." in refusal(tmp_path / "a.parquet")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"broken.{ending}"
    path.write_bytes(b"PAR1 and no more")
    assert f"broken.{ending} is not {ending}, or damaged" in refusal(path)
    assert "cannot be read: No such file" in refusal(tmp_path / f"none.{ending}")


def test_without_pyarrow_it_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "find_spec", lambda name: None)
    assert "needs pyarrow: pip install 'digen[data]'" in refusal(SAVED / "verl_omni.parquet")


# --- what a row may hold ---


def test_parquet_as_verl_omni_writes_it_gives_text_negative_prompt_and_target() -> None:
    prompts = load_prompts(SAVED / "verl_omni.parquet")
    assert [p.text for p in prompts] == [f'a sign that says "{word}"' for word in ("OPEN", "SUN", "CAT")]
    assert {p.negative for p in prompts} == {" "}
    assert prompts[1].metadata["data_source"] == "flow_grpo/ocr"
    assert prompts[1].metadata["messages"][0]["role"] == "system"
    assert prompts[1].metadata["extra_info"] == {"split": "train", "index": 1}
    assert [target_of(p.text, p.metadata) for p in prompts] == ["OPEN", "SUN", "CAT"]


def test_the_target_is_the_rows_own_then_its_ground_truth_then_what_is_quoted(tmp_path: Path) -> None:
    rule = {"style": "rule", "ground_truth": "TRUTH"}
    rows = [{"prompt": 'a "QUOTE"', "reward_model": rule, "target": "OWN"}, {"prompt": 'a "QUOTE"'}]
    rows += [{"prompt": 'a "QUOTE"', "reward_model": rule}, {"prompt": "a", "reward_model": {"ground_truth": 3}}]
    prompts = load_prompts(jsonl(tmp_path / "a.jsonl", *rows))
    assert [target_of(p.text, p.metadata) for p in prompts] == ["OWN", "QUOTE", "TRUTH", None]


def test_of_a_chat_the_last_message_of_the_user_is_the_prompt(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": " two "}, {"type": "image", "image": "x.png"}, {"type": "text", "text": "cats"}]
    chat = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "no"}]
    (prompt,) = load_prompts(jsonl(tmp_path / "a.jsonl", {"prompt": [*chat, {"role": "user", "content": parts}]}))
    assert prompt.text == "two cats"
    assert prompt.metadata["messages"][0] == {"role": "user", "content": "a dog"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": [{"role": "system", "content": "x"}]}, "'prompt' must be a text, or a chat with a message of the"),
        ({"prompt": [{"role": "user", "content": 3}]}, "'prompt' must be a text, or a chat"),
        ({"prompt": [{"role": "user", "content": "  "}]}, "'prompt' is empty"),
        ({"prompt": {"text": "a"}}, "'prompt' must be a text; got"),
        ({"prompt": "a", "negative_prompt": 7}, "'negative_prompt' must be a text; got 7"),
        ({"prompt": "a", "negative_prompt": "x\0"}, "'negative_prompt' has a NUL"),
    ],
)
def test_what_is_neither_text_nor_chat_is_refused(tmp_path: Path, row: object, problem: str) -> None:
    assert f"line 1: {problem}" in refusal(jsonl(tmp_path / "a.jsonl", row))


def test_a_negative_prompt_is_kept_to_the_letter_and_a_missing_one_stays_missing(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "negative_prompt": value} for value in ("blurry", " ", "", None)]
    assert [p.negative for p in load_prompts(jsonl(tmp_path / "a.jsonl", *rows))] == ["blurry", " ", "", None]
    (tmp_path / "a.csv").write_text("prompt,negative_prompt\na,blurry\nb,\nc\n")
    prompts = load_prompts(tmp_path / "a.csv")
    assert [p.negative for p in prompts] == ["blurry", None, None]
    assert not any(p.metadata for p in prompts)


# --- several sources ---


@pytest.mark.parametrize(
    ("shares", "per_step", "counts"),
    [
        ([1], 5, [5]),
        ([3, 1], 12, [9, 3]),
        ([0.7, 0.3], 10, [7, 3]),
        ([2, 1], 4, [3, 1]),
        ([1, 1, 1], 4, [2, 1, 1]),
        ([1000, 1, 1], 5, [3, 1, 1]),
        ([0.1, 0.1, 0.1], 3, [1, 1, 1]),
    ],
)
def test_a_step_is_shared_out_in_whole_prompts(shares: list[float], per_step: int, counts: list[int]) -> None:
    assert counts_of(dict(enumerate(shares)), per_step) == counts


@given(
    shares=st.lists(st.floats(0.01, 100, allow_nan=False).map(lambda x: round(x, 2)), min_size=1, max_size=6),
    more=st.integers(0, 60),
)
def test_shares_are_met_to_within_one_prompt_wherever_every_source_can_have_one(shares: list[float], more: int) -> None:
    per_step = len(shares) + more
    counts = counts_of(dict(enumerate(shares)), per_step)
    assert sum(counts) == per_step
    assert min(counts) >= 1
    exact = [per_step * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, exact, strict=True))


def test_shares_that_do_not_come_out_even_are_said() -> None:
    assert rounded_shares({"a": 3, "b": 1}, 12) is None
    assert rounded_shares({"a": 0.1, "b": 0.2}, 3) is None
    text = "data.prompts asks for 2 : 1; of the 4 prompts of a step it is 3 : 1"
    assert rounded_shares({"a": 2, "b": 1}, 4) == text


def test_every_step_mixes_the_sources_evenly_and_each_has_its_own_epochs(tmp_path: Path) -> None:
    shares = {text(tmp_path / "few.txt", 4): 1.0, text(tmp_path / "many.txt", 30): 3.0}
    sampler, again = (Sources(shares, "prompt").step_prompts(8, shuffle=True, seed=5) for _ in range(2))
    steps = [[prompt.text.split()[0] for prompt in sampler(step)] for step in range(5)]
    assert steps == [["many", "few", "many", "many", "many", "few", "many", "many"]] * 5
    assert len({prompt.id for prompt in sampler.prompts}) == 34
    few = [prompt.id for step in (2, 3) for prompt in sampler(step) if prompt.text.startswith("few")]
    assert sorted(few) == [0, 1, 2, 3]  # its second epoch
    many = [prompt.id for step in range(5) for prompt in sampler(step) if prompt.text.startswith("many")]
    assert sorted(many) == list(range(4, 34))
    assert sampler.steps_per_epoch == 5  # until the larger one was passed
    assert again(3) == sampler(3)


def test_the_first_source_has_the_order_that_it_has_alone(tmp_path: Path) -> None:
    path, other = text(tmp_path / "a.txt", 12), text(tmp_path / "b.txt", 12)
    alone = Sources({path: 1.0}, "prompt").step_prompts(2, shuffle=True, seed=3)
    both = Sources({path: 1.0, other: 1.0}, "prompt").step_prompts(4, shuffle=True, seed=3)
    assert [p.id for p in both(4) if p.id < 12] == [p.id for p in alone(4)]
    assert [p.id - 12 for p in both(4) if p.id >= 12] != [p.id for p in alone(4)]


def test_the_same_prompt_in_two_sources_is_two_prompts(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a cat\n")
    sampler = Sources({tmp_path / "a.txt": 1, tmp_path / "b.txt": 1}, "prompt").step_prompts(2, shuffle=True, seed=0)
    assert [(p.id, p.text) for p in sampler(0)] == [(0, "a cat"), (1, "a cat")]


def run_with(*settings: str) -> Any:
    return resolve("flowgrpo", "glyph", None, ["data.prompts_per_step=4", *settings], {})


def test_sources_are_named_on_the_command_line_and_read_back_from_the_runs_file(tmp_path: Path) -> None:
    a, b = text(tmp_path / "a.txt", 5), jsonl(tmp_path / "b.jsonl", *({"prompt": f"b {k}"} for k in range(3)))
    config = run_with(f"data.prompts={{{a}: 2, {b}: 1}}")
    assert dict(prompt_sources(config).shares) == {a: 2.0, b: 1.0}
    assert doubts(config)[0].startswith("data.prompts asks for 2 : 1;")
    (tmp_path / "config.yaml").write_text(dump(config))
    again = load(tmp_path / "config.yaml", [], {})
    assert [step_prompts(again)(k) for k in range(3)] == [step_prompts(config)(k) for k in range(3)]
    replaced = load(tmp_path / "config.yaml", [f"data.prompts={a}"], {})
    assert dict(prompt_sources(replaced).shares) == {a: 1.0}
    assert list(load(tmp_path / "config.yaml", [f"data.prompts={{{b}: 1, {a}: 1}}"], {}).data.prompts) == [
        str(b),
        str(a),
    ]


def test_sources_that_cannot_be_had_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    a, b = text(tmp_path / "a.txt", 5), text(tmp_path / "b.txt", 2)
    for value, message in (
        (f"{{{a}: 1, {tmp_path}/none.txt: 1}}", "none.txt does not exist"),
        (f"{{{a}: 1, {b}: 3}}", "a step takes 3 prompts of it, but there are only 2"),
        (f"{{{a}: 1, {b}: 0}}", "allowed: a number > 0"),
        (f"{{{SAVED}/splits: 1}}", "has several splits"),
    ):
        with pytest.raises(ConfigError) as caught:
            run_with(f"data.prompts={value}")
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="allowed: 2 or more, the number of sources"):
        run_with(f"data.prompts={{{a}: 1, {b}: 1}}", "data.prompts_per_step=1")


def test_a_change_in_any_source_or_share_changes_the_fingerprint_and_a_move_does_not(tmp_path: Path) -> None:
    a, b = text(tmp_path / "a.txt", 5), text(tmp_path / "b.txt", 2)
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(b.read_bytes())
    known = Sources({a: 1.0, b: 1.0}, "prompt").fingerprint()
    assert Sources({a: 1.0, moved: 1.0}, "prompt").fingerprint() == known
    others = [{a: 1.0, b: 2.0}, {b: 1.0, a: 1.0}, {a: 1.0}, {SAVED / "shards": 1.0}]
    assert len({known, *(Sources(shares, "prompt").fingerprint() for shares in others)}) == 5
    b.write_text("b 0\nb one\n")
    assert Sources({a: 1.0, b: 1.0}, "prompt").fingerprint() != known


# --- to the samples ---


def test_a_prompts_own_negative_prompt_is_what_guidance_leads_it_away_from(make_config, make_worker) -> None:
    from digen.backends.generation.diffusers import DiffusersGenerator

    asked = ("sampling.guidance=4", "sampling.eval_guidance=4", "sampling.negative_prompt=blurry")
    generator = make_worker(DiffusersGenerator, make_config(*asked))

    def sampled(*negatives: str | None) -> torch.Tensor:
        prompts = tuple(Prompt(k, "a sign", {}, negative) for k, negative in enumerate(negatives))
        rollout = generator.sampler.rollout(MicroBatch(0, 0, prompts, 2, 0), range(4))[0]["next_latents"]
        single = generator.sampler.evaluate(["a sign"] * 2, [0, 1], 0, negatives)[0]
        assert torch.equal(single[0] == single[1], torch.zeros_like(single[0], dtype=torch.bool))
        return rollout

    default, own, both = sampled(None, None), sampled(None, 'the word "NO"'), sampled('the word "NO"', "blurry")
    torch.testing.assert_close(default[:2], own[:2], rtol=0, atol=1e-5)
    assert not torch.allclose(default[2:], own[2:], atol=1e-4)
    torch.testing.assert_close(both[2:], default[2:], rtol=0, atol=1e-5)
    assert not torch.allclose(both[:2], default[:2], atol=1e-4)


def test_columns_of_the_prompt_file_reach_the_reward_of_a_run(tmp_path: Path, tiny_run: Callable[..., Path]) -> None:
    data = jsonl(tmp_path / "a.jsonl", *({"prompt": f"p{k}", "weight": k, "tags": ["x", k]} for k in range(4)))
    (tmp_path / "own.py").write_text(
        "import json, pathlib\n\n\ndef seen(media, prompts, metadata):\n"
        f"    with open('{tmp_path}/seen', 'a') as file:\n"
        "        [file.write(json.dumps([p, dict(m)]) + '\\n') for p, m in zip(prompts, metadata)]\n"
        "    return [float(media[k].mean()) for k in range(len(media))]\n"
    )
    tiny_run(f"data.prompts={data}", "data.prompts_per_step=4", reward=f"{tmp_path}/own.py:seen")
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 8
    assert all(row == {"weight": int(prompt[1]), "tags": ["x", int(prompt[1])]} for prompt, row in seen)


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., Path]:
    """One step of two samples per prompt, all in this process."""
    from rich.console import Console

    from digen.run import run

    def start(*settings: str, reward: str) -> Path:
        small = ("engine.name=inline", "algorithm.samples_per_prompt=2", "sampling.num_steps=4", "steps=1")
        folder = tmp_path / "run"
        words = (*small, "observe.tensorboard=false", f'reward={{"{reward}": {{}}}}', f"run_dir={folder}", *settings)
        run(resolve("flowgrpo", "glyph", None, list(words), {}), console=Console(quiet=True))
        return folder

    return start
