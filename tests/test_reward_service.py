"""The reward service: what `remote` gets from it is what the reward gives, and what it cannot do it refuses."""

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

import digen
from digen.config import RewardTerm
from digen.rewards import service as module
from digen.rewards import wire
from digen.rewards.base import RewardSet
from digen.rewards.remote import Remote
from digen.rewards.served import GenEval, VideoAlign
from digen.rewards.service import Service, server

MEDIA: NDArray[np.uint8] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (6, 16, 16, 3), np.uint8)
PROMPTS = [f"prompt {k}" for k in range(6)]
METADATA: list[Mapping[str, Any]] = [{"row": k} for k in range(6)]
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a reward in this process; its URL."""
    with contextlib.ExitStack() as exits:

        def start(name: str, token: str = "", batch_size: int = 32, **options: Any) -> str:
            rewards = RewardSet({name: RewardTerm.model_validate(options)}, 60.0)
            rewards.load()
            http, bound = server(Service(name, rewards, batch_size, token), "127.0.0.1", 0)
            thread = threading.Thread(target=http.run, kwargs={"sockets": [bound]})
            thread.start()
            exits.callback(bound.close)
            exits.callback(thread.join, 30)
            exits.callback(setattr, http, "should_exit", True)
            return f"http://127.0.0.1:{bound.getsockname()[1]}"

        yield start


HEAD = "import threading\n\ncalls, gate = [], threading.Event()\n\ndef score(media, prompts, metadata):\n    "


def own(folder: Path, body: str) -> str:
    """A reward of this body, in a file."""
    path = folder / f"own{len(list(folder.iterdir()))}.py"
    path.write_text(f"{HEAD}{body}\n")
    return f"{path}:score"


def names(name: str) -> Any:
    """The module of such a file."""
    from digen import plugins

    return sys.modules[plugins.find("rewards", name).__module__]  # type: ignore[attr-defined]


def together(url: str, name: str, asks: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return, when the first is being scored while all others come and wait."""
    calls, gate = names(name).calls, names(name).gate
    limit = time.monotonic() + 60
    with ThreadPoolExecutor(len(asks)) as pool:
        asked = [pool.submit(asks[0])]
        while not calls and time.monotonic() < limit:
            time.sleep(0.01)
        asked += [pool.submit(ask) for ask in asks[1:]]
        while httpx2.get(url + "/health").json()["waiting"] < len(asks) - 1 and time.monotonic() < limit:
            time.sleep(0.01)
        gate.set()
        return [found.result() for found in asked]


# --- the same scores ---


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_scores_of_images_and_videos_are_bit_equal_to_those_of_the_reward_itself(serve: Serve, form: wire.Form) -> None:
    reward = Remote(serve("jpeg-incompressibility"), batch_size=4, form=form)
    reward.load()
    own = RewardSet({"jpeg-incompressibility": RewardTerm()}, 60.0)
    own.load()
    for media in (MEDIA, MEDIA.reshape(3, 2, 16, 16, 3), MEDIA[:1, None]):
        (expected,) = own.score(media, PROMPTS[: len(media)], METADATA[: len(media)]).values()
        assert reward(media, PROMPTS[: len(media)], METADATA[: len(media)]) == list(expected)


def test_the_reward_is_given_prompts_metadata_and_read_only_pixels(serve: Serve, tmp_path: Path) -> None:
    body = "assert not media.flags.writeable; return [len(p) * 100 + m['row'] for p, m in zip(prompts, metadata)]"
    reward = Remote(serve(own(tmp_path, body)), batch_size=6)
    assert reward(MEDIA, PROMPTS, METADATA) == [800.0 + k for k in range(6)]


def test_health_names_reward_protocol_and_version(serve: Serve) -> None:
    found = httpx2.get(serve("jpeg-compressibility") + "/health").json()
    expected = {
        "status": "ok",
        "reward": "jpeg-compressibility",
        "version": digen.__version__,
        "protocol": 1,
        "waiting": 0,
    }
    assert found == expected


# --- batching ---

GATED = "calls.append(len(media)); len(calls) > 1 or gate.wait(30); return [float(m['row']) for m in metadata]"


def asking(url: str, k: int, media: NDArray[np.uint8] = MEDIA[:1]) -> Callable[[], Any]:
    return partial(Remote(url, retries=0), media, PROMPTS[:1], METADATA[k : k + 1])


def test_requests_that_wait_are_scored_together_up_to_the_batch_size_and_each_gets_its_own(
    serve: Serve, tmp_path: Path
) -> None:
    name = own(tmp_path, GATED)
    url = serve(name, batch_size=4)
    assert together(url, name, [asking(url, k) for k in range(6)]) == [[float(k)] for k in range(6)]
    assert names(name).calls == [1, 4, 1]


def test_samples_of_another_size_are_scored_in_another_call(serve: Serve, tmp_path: Path) -> None:
    name = own(tmp_path, GATED)
    url = serve(name)
    media = [MEDIA[:1], MEDIA[1:2], MEDIA[2:3, :8], MEDIA[3:4].repeat(2, 1)]
    found = together(url, name, [asking(url, k, pixels) for k, pixels in enumerate(media)])
    assert found == [[float(k)] for k in range(4)]
    assert names(name).calls == [1, 1, 1, 1]


def test_a_request_that_spoils_a_batch_spoils_only_itself(serve: Serve, tmp_path: Path) -> None:
    name = own(tmp_path, GATED.replace("return", "assert 3 not in [m['row'] for m in metadata]; return"))
    url = serve(name)
    expected = [[None if k == 3 else float(k)] for k in range(5)]
    assert together(url, name, [asking(url, k) for k in range(5)]) == expected
    assert names(name).calls == [1, 4, 1, 1, 1, 1]


# --- what it cannot do ---


def test_a_sample_without_a_score_fails_alone(serve: Serve, tmp_path: Path) -> None:
    reward = Remote(serve(own(tmp_path, "return [None, float('nan'), float('inf'), 3.0, 4.0, 5.0]")), batch_size=6)
    assert reward(MEDIA, PROMPTS, METADATA) == [None, None, None, 3.0, 4.0, 5.0]


def test_a_reward_that_is_broken_is_a_status_and_no_score(serve: Serve, tmp_path: Path) -> None:
    url = serve(own(tmp_path, "return [1.0]"))
    reward = Remote(url, batch_size=6, retries=0)
    assert reward(MEDIA, PROMPTS, METADATA) == [None] * 6
    assert reward.endpoint.failures == {"status 500": 1}
    found = httpx2.post(url + "/score", content=wire.pack(wire.request(MEDIA, PROMPTS, METADATA), "json"))
    assert "must return 6 numbers, one per sample; got 1" in found.json()["error"]


def changed(**sample: Any) -> bytes:
    whole = json.loads(wire.pack(wire.request(MEDIA[:2], PROMPTS[:2], METADATA[:2]), "json"))
    whole["samples"][0] |= sample
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{}", "Field required"),
        (b"[" * 100_000, "recursion"),
        (pickle.dumps({"samples": []}), "Invalid JSON"),
        (changed(frames=["bm8gcGljdHVyZQ=="]), "no PNG file"),
        (changed(frames=["%%%"]), "Only base64 data is allowed"),
        (changed(frames=[]), "at least 1 item"),
        (changed(prompt=7), "valid string"),
        (b'{"protocol": 2, "samples": []}', "Input should be 1"),
        (changed(id=json.loads(changed())["samples"][1]["id"]), ""),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(serve: Serve, body: bytes, reason: str) -> None:
    found = httpx2.post(serve("jpeg-compressibility") + "/score", content=body)
    assert found.status_code in {200, 422}
    assert found.status_code == 422 or not reason
    assert reason in found.text


def test_two_samples_of_the_same_id_or_of_two_sizes_are_refused(serve: Serve) -> None:
    url = serve("jpeg-compressibility") + "/score"
    whole = json.loads(changed())
    whole["samples"][1]["id"] = whole["samples"][0]["id"]
    assert "two samples have the same id" in httpx2.post(url, json=whole).text
    other = json.loads(wire.pack(wire.request(MEDIA[:1, :8], PROMPTS[:1], METADATA[:1]), "json"))["samples"][0]
    whole["samples"][1] = other
    assert "must all be of one size" in httpx2.post(url, json=whole).text


def test_too_large_and_too_many_requests_are_refused_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve("jpeg-compressibility")
    monkeypatch.setattr(module, "LARGEST_REQUEST", 100)
    assert httpx2.post(url + "/score", content=changed()).status_code == 413
    monkeypatch.setattr(module, "MOST_WAITING", 0)
    assert httpx2.post(url + "/score", content=changed()).status_code == 503


def test_without_the_right_token_nothing_is_scored(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve("jpeg-compressibility", token="right")
    assert httpx2.post(url + "/score", content=changed()).status_code == 401
    monkeypatch.setenv("TOKEN", "wrong")
    assert Remote(url, token_env="TOKEN")(MEDIA, PROMPTS, METADATA) == [None] * 6
    monkeypatch.setenv("TOKEN", "right")
    assert None not in Remote(url, token_env="TOKEN")(MEDIA, PROMPTS, METADATA)


# --- the command ---


def command(*words: str) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "digen", "reward", "serve", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_serves_on_loopback_until_it_is_interrupted() -> None:
    process = command("jpeg-incompressibility", "--port", "0")
    assert process.stdout
    line = process.stdout.readline()
    name, _, url = line.strip().partition(" at ")
    assert (name, url.rpartition(":")[0]) == ("jpeg-incompressibility", "http://127.0.0.1")
    assert None not in Remote(url)(MEDIA, PROMPTS, METADATA)
    taken = command("jpeg-incompressibility", "--port", url.rpartition(":")[2])
    assert f"--port {url.rpartition(':')[2]}: Address already in use" in taken.communicate(timeout=60)[1]
    assert taken.returncode == 2
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "reward: got 'nothing'"),
        (("ocr", "detekt=no"), "reward.ocr.detekt: unknown option"),
        (("ocr", "a.b=no"), "got a.b=...; allowed: OPTION=VALUE"),
        (("ocr", "--token-env", "NO_SUCH_VARIABLE"), "environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(words: tuple[str, ...], message: str) -> None:
    from typer.testing import CliRunner

    from digen.cli import app

    result = CliRunner().invoke(app, ["reward", "serve", *words])
    assert result.exit_code == 2
    assert message in result.stderr


# --- rewards that are always served ---


def test_geneval_sends_prompts_with_its_metadata_and_has_no_score_for_others(serve: Serve, tmp_path: Path) -> None:
    body = "return [float(m['include'][0]['count']) for m in metadata]"
    url = serve(own(tmp_path, body))
    asked = {"tag": "counting", "include": [{"class": "cat", "count": 3}]}
    rows = [asked, {}, {"tag": "counting"}, {**asked, "include": [{"class": "cat", "count": 2}]}]
    assert GenEval(url)(MEDIA[:4], PROMPTS[:4], rows) == [3.0, None, None, 2.0]
    assert GenEval(url)(MEDIA[:1], PROMPTS[:1], [{}]) == [None]


def test_video_align_takes_videos_alone(serve: Serve, tmp_path: Path) -> None:
    url = serve(own(tmp_path, "return [float(media.ndim)] * len(media)"))
    assert VideoAlign(url)(MEDIA[None], PROMPTS[:1], METADATA[:1]) == [5.0]
    with pytest.raises(ValueError, match="video-align scores videos"):
        VideoAlign(url)(MEDIA, PROMPTS, METADATA)


def test_the_example_of_a_service_without_digen_scores_for_remote() -> None:
    example = Path(__file__).parent.parent / "examples" / "reward_server.py"
    assert "digen" not in example.read_text().split('"""', 2)[2]
    program = [sys.executable, str(example), "--port", "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout
            reward = Remote(process.stdout.readline().strip())
            reward.load()
            black, white = np.zeros((2, 1, 8, 8, 3), np.uint8)
            white += 255
            assert reward(np.concatenate([black, white]), PROMPTS[:2], METADATA[:2]) == [0.0, 1.0]
            assert reward(np.stack([black, white], 1), PROMPTS[:1], METADATA[:1]) == [0.5]
        finally:
            process.kill()
