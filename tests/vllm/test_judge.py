"""The judge of a run on the real `vllm serve`: a tiny random model, on the CPU, started and stopped by digen."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray
from rich.console import Console

from digen import plugins, presets
from digen.config import RewardTerm
from digen.observe.files import read_rows
from digen.rewards.judge import Judge
from digen.rewards.judge_server import serving
from digen.run import run

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="make vllm installs it")]

PICTURES: NDArray[np.uint8] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (6, 4, 4, 3), np.uint8)
MEDIA: NDArray[np.uint8] = PICTURES.repeat(16, axis=1).repeat(16, axis=2)
PROMPTS = [f'a sign "{word}"' for word in ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX")]
METADATA: list[Mapping[str, Any]] = [{}] * len(PROMPTS)
ARGS = [
    "--dtype=float32", "--enforce-eager", "--max-model-len=2048", "--max-num-seqs=4",
    '--limit-mm-per-prompt={"image": 4, "video": 0}',
]  # fmt: skip
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
"""A gigabyte is enough; what is installed for the generator does not concern the judge. By its version, which it looks
for under the name `vllm`, the server knows that it is one for CPUs; `vllm-cpu` has another name (PYTHONPATH)."""


def tiny(name: str) -> Any:
    return plugins.load(f"{Path(__file__).parent}/tiny_vlm.py:{name}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm")
    tiny("build")(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that a run's own code starts; it must be gone, with all its children, when the run is."""
    terms = {"judge": RewardTerm.model_validate({"model": str(model), "serve": {"args": ARGS, "ready_s": 600}})}
    before = set(psutil.Process().children(recursive=True))
    named = tmp_path_factory.mktemp("named") / "vllm-0.30.0+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n")
    with pytest.MonkeyPatch.context() as patch, start_blocking_portal() as portal:
        for name, value in {**ENVIRONMENT, "PYTHONPATH": str(named.parent)}.items():
            patch.setitem(os.environ, name, value)
        up = serving(terms, tmp_path_factory.mktemp("logs"), [].append)
        with portal.wrap_async_context_manager(up) as found:
            started = set(psutil.Process().children(recursive=True)) - before
            yield (found["judge"].model_extra or {})["url"]
    assert len(started) > 2  # keeper, server, engine
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def judge(url: str, model: Path) -> Judge:
    made = Judge(str(model), url, retries=0)
    made.load()
    return made


def test_each_score_is_the_digit_that_the_models_own_forward_pass_says(judge: Judge, model: Path) -> None:
    said = [tiny("rating")(model, MEDIA[k], judge._words(PROMPTS[k])) for k in range(len(MEDIA))]
    assert len(set(said)) > 1
    assert judge(MEDIA, PROMPTS, METADATA) == [(digit - 1) / 4 for digit in said]
    assert not judge.endpoint.failures


def test_the_same_question_has_the_same_answer_alone_and_among_others(judge: Judge) -> None:
    together = judge(MEDIA, PROMPTS, METADATA)
    assert None not in together
    assert [judge(MEDIA[k : k + 1], PROMPTS[k : k + 1], METADATA[:1])[0] for k in range(len(MEDIA))] == together


def test_a_video_is_shown_as_several_pictures_and_a_transcript_is_a_text(url: str, model: Path) -> None:
    (score,) = Judge(str(model), url, frames=3)(MEDIA[None], PROMPTS[:1], METADATA[:1])
    assert score in {0, 0.25, 0.5, 0.75, 1}
    text = Judge(str(model), url, mode="text")
    assert text(MEDIA[:2], PROMPTS[:2], METADATA[:2]) == [0, 0]  # it says nothing, in the form that is asked for
    assert not text.endpoint.failures


def test_what_the_server_refuses_has_no_score(judge: Judge) -> None:
    question = judge.question(MEDIA[0], PROMPTS[0])
    question["messages"][0]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
    (found,) = judge.endpoint.ask_all("/chat/completions", [json.dumps(question).encode()], lambda _, body: body)
    assert found is None
    assert judge.endpoint.failures == {"status 400": 1}
    assert all(value is not None and math.isfinite(value) for value in judge(MEDIA, PROMPTS, METADATA))


def test_a_run_trains_on_what_it_says(url: str, model: Path, tmp_path: Path) -> None:
    words = (
        "engine.name=inline", "steps=1", "data.prompts_per_step=2", "algorithm.samples_per_prompt=4",
        "sampling.num_steps=4", "observe.tensorboard=false", "observe.grid_every=0", f"run_dir={tmp_path}/run",
        f"reward={{judge: {{url: '{url}', model: '{model}'}}}}",
    )  # fmt: skip
    run(presets.resolve("flowgrpo", "glyph", None, words, {}), console=Console(quiet=True))
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert row["reward/failed"] == 0
    assert 0 <= row["reward/mean"] <= 1
