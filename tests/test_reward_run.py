"""Whole runs of the bundled model whose rewards are scored elsewhere, watched, or only evaluated."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from digen import plugins, presets
from digen.config import RewardTerm
from digen.evaluate import evaluate
from digen.observe.files import read_rows
from digen.rewards import wire
from digen.rewards.base import RewardSet
from digen.rewards.jpeg import JpegIncompressibility
from digen.rewards.service import Service, server
from digen.run import run

JPEG = "jpeg-incompressibility"
SMALL = (
    "engine.name=inline",
    "steps=2",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=4",
    "sampling.eval_num_steps=4",
    "observe.tensorboard=false",
    "observe.grid_every=0",
    "schedule.ordered=true",
)


def start(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True))
    return [dict(row) for row in read_rows(folder / "metrics.jsonl")]


def weights(folder: Path) -> Any:
    (path,) = (folder / "checkpoints").glob("*/weights.safetensors")
    return load_file(path)


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that scores with the JPEG reward in its own process."""
    folder = tmp_path_factory.mktemp("own") / "run"
    start(folder, f"reward={{{JPEG}: {{}}}}")
    return folder


@contextmanager
def service() -> Iterator[str]:
    rewards = RewardSet({JPEG: RewardTerm()}, 60.0)
    rewards.load()
    http, bound = server(Service(JPEG, rewards), "127.0.0.1", 0)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(30)
        bound.close()


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_reward_behind_the_service_trains_the_very_weights_of_the_same_reward_in_process(
    form: str, own: Path, tmp_path: Path
) -> None:
    with service() as url:
        rows = start(tmp_path / "run", f"reward={{remote: {{url: '{url}', form: {form}, batch_size: 3}}}}")
    assert same_weights(own, tmp_path / "run")
    expected = [row["reward/mean"] for row in read_rows(own / "metrics.jsonl")]
    assert [row["reward/mean"] for row in rows] == expected
    assert all(row["reward/failed"] == 0 for row in rows)


def load(name: str) -> Any:
    return plugins.load(f"{Path(__file__).parent}/faulty_server.py:{name}")


def scored(body: bytes) -> Any:
    samples = wire.unpack(wire.Request, body, "json").samples
    media = np.stack([wire.pixels(sample) for sample in samples])
    values = JpegIncompressibility()(media, [""] * len(media), [{}] * len(media))
    return {"protocol": 1, "scores": [{"id": s.id, "score": v} for s, v in zip(samples, values, strict=True)]}


def test_a_run_on_a_service_with_every_fault_trains_the_very_weights_of_one_without(own: Path, tmp_path: Path) -> None:
    """What fails is asked again, until it is sound; nothing of a faulty answer is trained on."""
    faults = [act for act, cause in load("FAULTS").values() if cause != "timed out"]
    acts = [act for fault in [*faults, load("hang")] for act in (fault, load("answer")(scored))]
    page = {"protocol": 1, "reward": "x", "version": "1"}
    with load("serving")(scored, page, *acts) as faulty:
        options = f"url: '{faulty.url}', batch_size: 1, concurrency: 1, retries: 2, timeout_s: 5"
        rows = start(tmp_path / "run", f"reward={{remote: {{{options}}}}}")
        assert faulty.asked == 16 + len(faults) + 1
    assert all(row["reward/failed"] == 0 for row in rows)
    assert same_weights(own, tmp_path / "run")


def test_groups_that_a_service_never_scores_are_dropped_and_counted_and_change_no_other(tmp_path: Path) -> None:
    asked: list[str] = []

    def unsound_for_the_first(handler: Any, body: bytes) -> None:
        prompt = wire.unpack(wire.Request, body, "json").samples[0].prompt
        asked.append(prompt)
        load("status")(500)(handler, body) if prompt == asked[0] else load("answer")(scored)(handler, body)

    page = {"protocol": 1, "reward": "x", "version": "1"}
    with load("serving")(scored, page, always=unsound_for_the_first) as faulty:
        options = f"url: '{faulty.url}', batch_size: 4, concurrency: 1, retries: 0"
        (row,) = start(tmp_path / "run", f"reward={{remote: {{{options}}}}}", "schedule.retries=1", "steps=1")
    assert (row["reward/failed"], row["groups_dropped"], row["trained_samples"]) == (4, 1, 4)
    assert asked.count(asked[0]) == 2
    assert all(np.isfinite(value).all() for value in weights(tmp_path / "run").values())


def test_a_watched_reward_is_in_the_metrics_and_changes_nothing(own: Path, tmp_path: Path) -> None:
    watched = "jpeg-compressibility: {weight: 0, required: false}"
    rows = start(tmp_path / "run", f"reward={{{JPEG}: {{}}, {watched}}}")
    assert same_weights(own, tmp_path / "run")
    for row in rows:
        assert row["reward/jpeg-compressibility/mean"] == pytest.approx(-row["reward/mean"] / 500)
        assert row["reward/jpeg-compressibility/pull"] == pytest.approx(-1.0)


def test_rewards_of_evaluation_alone_are_in_its_report_and_not_in_its_sum(tmp_path: Path) -> None:
    words = ["eval_reward.small.plugin=jpeg-compressibility", f"reward={{{JPEG}: {{weight: 2}}}}", "steps=1"]
    (row,) = start(tmp_path / "run", *words)
    assert not [key for key in row if "small" in key]
    report = evaluate(tmp_path / "run", console=Console(quiet=True))
    assert report.rewards.keys() == {JPEG, "small"}
    assert report.rewards["small"][0] == pytest.approx(-report.rewards[JPEG][0] / 500)
    assert report.base_reward == pytest.approx(2 * report.rewards[JPEG][0])
