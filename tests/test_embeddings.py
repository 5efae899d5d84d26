"""Text encoders run once per prompt, whoever needs it: what is kept, what is dropped, what is made again."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from rich.console import Console

from digen.backends.conditions import Conditions
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.config import ModelConfig
from digen.engines.base import WorkerContext, WorkerSpec
from digen.engines.store import MemoryStore
from digen.evaluate import evaluate, sample
from digen.models import embeddings, tiny
from digen.models.embeddings import Embeddings, cache_dir, identity
from digen.models.qwen_image import QwenImage, TinyQwenImage
from digen.observe.files import read_rows
from digen.presets import payload, resolve
from digen.run import run

TEXTS = ("a cat", 'a sign that says "OPEN"', "")
ENTRY = {"embeds": torch.arange(12.0).view(1, 3, 4), "mask": torch.ones(1, 3, dtype=torch.bool)}
BIG = 1e9
WORKER = f"{Path(__file__).parent}/workers_for_embeddings.py:Encoder"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digen" / "embeddings"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every prompt that an encoder of Qwen-Image's kind is run on, in this process."""
    prompts: list[str] = []
    plain = QwenImage.encode

    def counted(self: QwenImage, prompt: str) -> Any:
        prompts.append(prompt)
        return plain(self, prompt)

    monkeypatch.setattr(QwenImage, "encode", counted)
    return prompts


def conditions(gigabytes: float = 1.0, **settings: Any) -> Conditions:
    from digen.models.glyph import Glyph

    model = Glyph(ModelConfig(name="glyph", embedding_cache_gb=gigabytes, **settings))
    return Conditions(model, "cpu", torch.float32)


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.safetensors"))


def fail(prompt: str) -> Any:
    raise AssertionError(f"encoded {prompt!r}")


# --- what is kept ---


def test_what_is_read_from_disk_is_bit_equal_to_what_the_encoder_gives(cache: Path, encoded: list[str]) -> None:
    fresh = conditions(0.0).of(TEXTS)
    assert not cache.exists()
    first, second = conditions().of(TEXTS), conditions().of(TEXTS)
    assert encoded == [*TEXTS, *TEXTS]  # once without the disk and once with it
    assert len(entries(cache)) == len(TEXTS)
    for found in (first, second):
        assert found.keys() == fresh.keys()
        assert all(found[name].dtype == fresh[name].dtype for name in fresh)
        assert all(torch.equal(found[name], fresh[name]) for name in fresh)


def test_no_encoder_is_loaded_where_all_prompts_are_known(cache: Path) -> None:
    conditions().ahead(TEXTS)
    second = conditions()
    second.ahead(TEXTS)
    second.model.load("cpu", torch.float32, text_encoder=False, tokenizer=True, decoder=False)
    second.of(TEXTS)
    assert second.model.pipeline.text_encoder is None
    assert second.model.pipeline.tokenizer is not None
    second.of(["something new"])
    assert second.model.pipeline.text_encoder is not None


def test_a_pipeline_that_gets_its_encoders_later_is_that_which_has_them_at_once(tmp_path: Path) -> None:
    """Some pipelines note limits of their tokenizers when they are put together."""
    from digen.models.sd3 import SD3

    tiny.build("sd3", tmp_path / "sd3")
    config = ModelConfig(name="sd3", path=str(tmp_path / "sd3"), height=64, width=64, shift=5.0, embedding_cache_gb=0)
    at_once, later = SD3(config), SD3(config)
    at_once.load("cpu", torch.float32, text_encoder=True, decoder=True)
    later.load("cpu", torch.float32, text_encoder=False, decoder=True)
    decoder = later.pipeline.vae
    later.load_encoders("cpu", torch.float32)
    assert later.pipeline.vae is decoder
    for text in (*TEXTS, "words " * 90):
        a, b = at_once.encode(text), later.encode(text)
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(at_once.sigmas(7), later.sigmas(7))


@pytest.mark.slow
def test_processes_that_need_the_same_prompts_at_once_encode_each_once(warm: Any, tmp_path: Path) -> None:
    prompts = ["x" * k for k in range(40)]
    ask = warm().begin(WorkerSpec("trainer", WORKER, str(tmp_path / "log"), ranks=2), "encoders")
    found = ask("work", tmp_path / "shared", prompts)
    assert found == ([float(k) for k in range(40)],) * 2
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(prompts)


def test_a_prompt_that_another_worker_is_at_is_left_for_later_or_waited_for(cache: Path) -> None:
    store, entered, leave = Embeddings(cache, b"m", BIG), Barrier(2), Barrier(2)

    def slow(_: str) -> Any:
        entered.wait(10)
        leave.wait(10)
        return ENTRY

    other = Thread(target=store.of, args=("a cat", slow))
    other.start()
    entered.wait(10)
    assert Embeddings(cache, b"m", BIG).of("a cat", fail, patience_s=0) is None
    waiting = Thread(target=store.of, args=("a cat", fail))  # a failure would end up as a warning, which is an error
    waiting.start()
    leave.wait(10)
    waiting.join(10)
    other.join(10)
    found = store.of("a cat", fail)
    assert found is not None
    assert torch.equal(found["embeds"], ENTRY["embeds"])


def test_whoever_holds_a_prompt_for_ever_is_not_waited_for_for_ever(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "PATIENCE_S", 0.05)
    store = Embeddings(cache, b"m", BIG)
    with store._alone("a cat", 0):
        assert store.of("a cat", lambda _: ENTRY, patience_s=0.05) is ENTRY


# --- what is dropped ---


def test_beyond_the_bound_what_was_used_longest_ago_is_dropped(cache: Path) -> None:
    Embeddings(cache, b"m", BIG).put("size", ENTRY)
    size = entries(cache)[0].stat().st_size
    store = Embeddings(cache, b"m", 3.5 * size)
    for age, prompt in enumerate(("size", "a", "b")):
        store.put(prompt, ENTRY)
        os.utime(store.path(prompt), (age, age))
    assert store.get("size") is not None  # used now
    store.put("c", ENTRY)
    assert [prompt for prompt in ("size", "a", "b", "c") if store.path(prompt).exists()] == ["size", "b", "c"]
    store.put("d", ENTRY)
    assert not store.path("b").exists()
    assert sum(path.stat().st_size for path in entries(cache)) <= store.limit


def test_what_a_killed_process_left_half_written_goes(cache: Path) -> None:
    store = Embeddings(cache, b"m", BIG)
    store.put("a", ENTRY)
    old, new = (store.path("a").with_name(f".{name}.tmp") for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    Embeddings(cache, b"m", BIG).put("b", ENTRY)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("content", [b"", b"not safetensors", None])
def test_a_broken_file_is_made_again_and_said(
    content: bytes | None, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Embeddings(cache, b"m", BIG)
    store.put("a", ENTRY)
    path = store.path("a")
    path.write_bytes(path.read_bytes()[:-5] if content is None else content)
    calls: list[str] = []
    with caplog.at_level(logging.WARNING):
        store.of("a", lambda prompt: calls.append(prompt) or ENTRY)
    assert calls == ["a"]
    assert "is encoded again" in caplog.text
    found = store.get("a")
    assert found is not None
    assert torch.equal(found["embeds"], ENTRY["embeds"])


def test_a_place_that_cannot_be_written_costs_the_cache_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = Embeddings(tmp_path / "file" / "embeddings", b"m", BIG)
    with caplog.at_level(logging.WARNING):
        assert store.of("a", lambda _: ENTRY) is ENTRY
        assert store.of("b", lambda _: ENTRY) is ENTRY
    assert caplog.text.count("cannot be kept") == 1


def test_ahead_of_a_run_no_more_is_encoded_than_fits(encoded: list[str], cache: Path) -> None:
    conditions().ahead(TEXTS[:1])
    size = entries(cache)[0].stat().st_size
    encoded.clear()
    conditions(2.5 * size / 1e9).ahead([f"{k} cats" for k in range(9)])
    assert 2 <= len(encoded) <= 4


# --- what an entry is for ---


def test_whatever_changes_the_result_changes_the_identity(tmp_path: Path) -> None:
    tiny.build("qwen_image", tmp_path / "model")
    settings = {"name": "tiny-qwen-image", "path": str(tmp_path / "model")}

    def of(device: str = "cpu", dtype: torch.dtype = torch.float32, kind: Any = TinyQwenImage, **more: Any) -> bytes:
        return identity(kind(ModelConfig(**{**settings, **more})), device, dtype)

    plain = of()
    assert plain == of() == of(embedding_cache_gb=3)
    assert plain != of(max_text_tokens=40)
    assert plain != of(dtype=torch.bfloat16)
    assert plain != of(kind=QwenImage)
    (tmp_path / "elsewhere").mkdir()
    before = plain
    for file in ("tokenizer/tokenizer_config.json", "text_encoder/config.json", "text_encoder/model.safetensors"):
        path = tmp_path / "model" / file
        path.write_bytes(path.read_bytes() + b" ")
        after = of()
        assert after != before
        before = after
    (tmp_path / "model" / "transformer" / "config.json").write_text("{}")  # is trained, and encodes nothing
    assert of() == before


def test_prompts_and_identities_never_share_an_entry(cache: Path) -> None:
    stores = [Embeddings(cache, made_by, BIG) for made_by in (b"m", b"n")]
    paths = {store.path(prompt) for store in stores for prompt in ("a", "a ", "", "\ud800")}
    assert len(paths) == 8
    stores[0].put("a", ENTRY)
    assert stores[1].get("a") is None


def test_the_place_is_where_a_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/digen")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path.home() / ".cache" / "digen"


# --- runs ---

SMALL = (
    "engine.name=inline", "schedule.tag=static(1)", "steps=2", "data.prompts_per_step=3", "sampling.num_steps=3",
    "algorithm.samples_per_prompt=2", "algorithm.steps={type: all-but-last}", "sampling.guidance=2",
    "reward={jpeg-compressibility: {}}", "observe.tensorboard=false", "observe.grid_every=0",
)  # fmt: skip


def start(folder: Path, *overrides: str) -> list[Any]:
    run(resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {}), console=Console(quiet=True))
    return read_rows(folder / "metrics.jsonl")


def test_a_run_encodes_each_prompt_once_for_all_its_workers_and_the_next_run_none(
    encoded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator and a trainer that assists, prompts of two steps and the negative one; same numbers without."""
    numbers = ("reward/mean", "grad_norm", "loss/mean")
    rows = start(tmp_path / "first")
    assert len(encoded) == len(set(encoded)) == 2 * 3 + 1
    encoded.clear()
    monkeypatch.setattr(QwenImage, "load_encoders", lambda *_: fail("anything"))
    again = start(tmp_path / "again")
    assert not encoded
    monkeypatch.undo()
    without = start(tmp_path / "without", "model.embedding_cache_gb=0")
    for name in numbers:
        assert [row[name] for row in rows] == [row[name] for row in again] == [row[name] for row in without]


def test_evaluation_and_sampling_encode_each_prompt_once_too(encoded: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "held.txt"
    prompts.write_text("\n".join(TEXTS[:2]))
    start(tmp_path / "run", "steps=1", f"data.heldout={prompts}")
    encoded.clear()
    evaluate(tmp_path / "run", console=Console(quiet=True))
    assert sorted(encoded) == sorted(TEXTS[:2])  # for the base and the trained model
    sample(str(tmp_path / "run"), TEXTS[:2], tmp_path / "out")
    assert len(encoded) == 2


def test_a_worker_that_generates_nothing_encodes_nothing(cache: Path, make_config: Callable[..., Any]) -> None:
    from digen.backends.training.local import LocalTrainer

    config = make_config("schedule.tag=none", "schedule.assist=none")
    for kind, count in ((LocalTrainer, 0), (DiffusersGenerator, 2)):
        worker = kind({**payload(config), "reward": {}}, WorkerContext("w", 0, 1, "cpu", MemoryStore()))
        worker.encode(TEXTS[:2])
        assert len(entries(cache)) == count
