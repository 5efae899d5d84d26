"""Rewards that are scored elsewhere, against a real HTTP server that fails in every way: no wrong score, no hang."""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from digen import plugins
from digen.config import RewardTerm
from digen.errors import ConfigError, RewardError
from digen.rewards import wire
from digen.rewards.base import RewardSet
from digen.rewards.http import Breaker, Endpoint, Limits
from digen.rewards.remote import Remote

MEDIA: NDArray[np.uint8] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (6, 8, 8, 3), np.uint8)
PROMPTS = [f"prompt {k}" for k in range(6)]
METADATA = [{"row": k} for k in range(6)]
RIGHT = [float(image[0, 0, 0]) for image in MEDIA]


def load(name: str) -> Any:
    return plugins.load(f"{Path(__file__).parent}/faulty_server.py:{name}")


answer, status, hang, late = load("answer"), load("status"), load("hang"), load("late")


def scored(body: bytes, value: Callable[[int, float], object] = lambda _, right: right) -> dict[str, Any]:
    """A sound answer, in which `value(k, right)` stands for the k-th score."""
    samples = wire.unpack(wire.Request, body, "json").samples
    found = [(s.id, value(k, float(wire.pixels(s)[0, 0, 0]))) for k, s in enumerate(samples)]
    return {"protocol": 1, "scores": [{"id": name, "score": score} for name, score in found]}


def reordered(body: bytes) -> Any:
    return {**(whole := scored(body)), "scores": whole["scores"][::-1]}


def without(n: int) -> Callable[[bytes], Any]:
    return lambda body: {**(whole := scored(body)), "scores": whole["scores"][n:]}


def doubled(body: bytes) -> Any:
    return {**(whole := scored(body)), "scores": [whole["scores"][0], *whole["scores"]]}


another = answer(lambda _: scored(wire.pack(wire.request(MEDIA, PROMPTS, METADATA), "json")))
FAULTS = {
    **load("FAULTS"),
    "a score too few": (answer(without(1)), "unsound answer"),
    "no scores": (answer(without(9)), "unsound answer"),
    "a score twice": (answer(doubled), "unsound answer"),
    "scores of another request": (another, "unsound answer"),
    "text for a score": (answer(lambda body: scored(body, lambda _, r: str(r))), "unsound answer"),
    "true for a score": (answer(lambda body: scored(body, lambda _, r: True)), "unsound answer"),
    "scores without ids": (answer(lambda body: [s["score"] for s in scored(body)["scores"]]), "unsound answer"),
    "another protocol": (answer(lambda body: {**scored(body), "protocol": 2}), "unsound answer"),
}
serving = partial(load("serving"), scored, {"protocol": 1, "reward": "test", "version": "1"})


def remote(url: str, *, timeout_s: float = 30.0, retries: int = 0, batch_size: int = 2, **options: Any) -> Remote:
    reward = Remote(url, batch_size, timeout_s=timeout_s, retries=retries, **options)
    limits = reward.endpoint.limits
    reward.endpoint.limits = Limits(limits.concurrency, timeout_s, retries, back_off_s=0.01)
    return reward


def ask(reward: Remote) -> list[float | None]:
    return reward(MEDIA, PROMPTS, METADATA)


# --- what is right ---


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_pixels_prompts_and_metadata_arrive_as_they_were_and_scores_come_back(form: wire.Form) -> None:
    video = np.stack([MEDIA, MEDIA[::-1]], 1)
    for media in (MEDIA, video, video[:, :1]):
        sent = wire.unpack(wire.Request, wire.pack(wire.request(media, PROMPTS, METADATA), form), form)
        assert [s.prompt for s in sent.samples] == PROMPTS
        assert [s.metadata for s in sent.samples] == METADATA
        assert all((wire.pixels(s) == media[k]).all() for k, s in enumerate(sent.samples))
        assert wire.pixels(sent.samples[0]).shape == media[0].shape
        back = wire.Answer(scores=[wire.SentScore(id=s.id, score=k / 7) for k, s in enumerate(sent.samples)])
        found = wire.scores(wire.unpack(wire.Answer, wire.pack(back, form), form), [s.id for s in sent.samples])
        assert found == [k / 7 for k in range(6)]


def test_scores_of_several_requests_stand_in_the_order_of_the_samples() -> None:
    with serving() as server:
        reward = remote(server.url)
        reward.load()
        assert ask(reward) == RIGHT
        assert server.asked == 3
        assert not reward.endpoint.failures


def test_an_answer_in_another_order_is_put_in_order_by_its_ids() -> None:
    with serving(always=answer(reordered)) as server:
        assert ask(remote(server.url)) == RIGHT


def test_requests_under_way_are_bounded() -> None:
    with serving(always=late(0.05)) as server:
        assert ask(remote(server.url, batch_size=1, concurrency=2)) == RIGHT
        assert server.most_busy == 2


def test_a_slow_answer_within_the_limit_counts() -> None:
    with serving(always=late(0.2)) as server:
        assert ask(remote(server.url)) == RIGHT


# --- what is wrong ---


@pytest.mark.parametrize("fault", FAULTS)
def test_of_a_fault_only_its_own_samples_have_no_score_and_it_is_counted(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    act, cause = FAULTS[fault]
    with serving(act) as server:
        reward = remote(server.url, timeout_s=2.0 if cause == "timed out" else 30.0, concurrency=1)
        assert ask(reward) == [None, None, *RIGHT[2:]]
        assert reward.endpoint.failures == {cause: 1}
    assert f"1 of 3 requests to {server.url}/score got no sound answer: 1 x {cause}" in caplog.text


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "a byte now and then"])
def test_after_a_fault_the_request_is_made_again(fault: str) -> None:
    act, cause = FAULTS[fault]
    with serving(act) as server:
        reward = remote(server.url, timeout_s=2.0 if cause == "timed out" else 30.0, retries=1)
        assert ask(reward) == RIGHT
        assert reward.endpoint.failures == {cause: 1}
        assert server.asked == 4


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "null"])
def test_a_score_that_is_no_number_fails_alone(number: str) -> None:
    def bad(handler: Any, body: bytes) -> None:
        whole = json.dumps(scored(body, lambda k, right: "HERE" if k == 1 else right))
        handler.reply(whole.replace('"HERE"', number).encode())

    with serving(always=bad) as server:
        assert ask(remote(server.url, batch_size=6)) == [RIGHT[0], None, *RIGHT[2:]]


def test_what_is_wrong_with_the_request_is_not_asked_again() -> None:
    with serving(status(413)) as server:
        reward = remote(server.url, batch_size=6, retries=5)
        assert ask(reward) == [None] * 6
        assert server.asked == 1


def test_retries_end_and_every_attempt_is_counted() -> None:
    with serving(always=status(500)) as server:
        reward = remote(server.url, batch_size=6, retries=3)
        assert ask(reward) == [None] * 6
        assert server.asked == 4
        assert reward.endpoint.failures == {"status 500": 4}


def test_a_server_that_is_not_there_is_a_failure_and_load_says_so() -> None:
    with serving() as server:
        url = server.url
    reward = remote(url, batch_size=6)
    assert ask(reward) == [None] * 6
    assert reward.endpoint.failures == {"connection failed": 1}
    with pytest.raises(RewardError, match=f"{url}/health does not answer: .*connection failed"):
        reward.load()


def test_a_server_that_fails_in_a_row_is_left_alone_and_tried_again_after_a_rest() -> None:
    with serving(*[status(500)] * 4) as server:
        reward = remote(server.url, batch_size=1, concurrency=1)
        reward.endpoint.breaker = Breaker(4, 30.0, lambda: clock[0])
        clock = [100.0]
        assert ask(reward) == [None] * 6
        assert server.asked == 4
        assert reward.endpoint.failures == {"status 500": 4, "not asked": 2}
        clock[0] += 29.0
        assert ask(reward) == [None] * 6
        assert server.asked == 4
        clock[0] += 2.0
        assert ask(reward) == RIGHT


def test_after_a_rest_one_request_tries_for_all() -> None:
    clock = [0.0]
    breaker = Breaker(2, 10.0, lambda: clock[0])
    breaker.record(ok=False)
    assert breaker.allows()
    breaker.record(ok=False)
    assert not breaker.allows()
    clock[0] = 10.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.record(ok=False)
    assert not breaker.allows()
    clock[0] = 20.0
    assert breaker.allows()
    breaker.record(ok=True)
    assert [breaker.allows(), breaker.allows()] == [True, True]


def test_a_hanging_server_holds_up_a_reward_set_no_longer_than_its_limits() -> None:
    with serving(always=hang) as server:
        options = {"url": server.url, "timeout_s": 0.2, "retries": 0}
        rewards = RewardSet({"remote": RewardTerm.model_validate(options)}, 60.0)
        rewards.load()
        begin = time.monotonic()
        (values,) = rewards.score(MEDIA, PROMPTS, METADATA).values()
        assert all(math.isnan(value) for value in values)
        assert time.monotonic() - begin < 30.0


# --- settings ---


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "ftp://host", "http://", ""])
def test_what_is_no_url_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reward.remote: url: got .*; allowed: http://HOST:PORT"):
        RewardSet({"remote": RewardTerm.model_validate({"url": url})}, 1.0).check()


def test_a_token_goes_along_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def see(handler: Any, body: bytes) -> None:
        seen.append(handler.headers["authorization"])
        answer(scored)(handler, body)

    with serving(always=see) as server:
        reward = remote(server.url, batch_size=6, token_env="SCORES_TOKEN")
        with pytest.raises(RewardError, match="environment variable SCORES_TOKEN, for its token, is not set"):
            reward.load()
        monkeypatch.setenv("SCORES_TOKEN", "secret")
        assert ask(reward) == RIGHT
    assert seen == ["Bearer secret"]


def test_a_server_of_another_kind_is_named_at_load() -> None:
    with serving() as server:
        reward = Remote(server.url)
        reward.endpoint = Endpoint(server.url, Limits())
        reward.endpoint.get = lambda _: b'{"status": "ok"}'  # type: ignore[method-assign]
        with pytest.raises(RewardError, match="is no reward service of protocol 1"):
            reward.load()


def test_metadata_that_cannot_travel_are_an_error_that_says_so() -> None:
    with pytest.raises((ValueError, TypeError), match="serialize"):
        wire.pack(wire.request(MEDIA[:1], ["p"], [{"a": object()}]), "json")


@pytest.mark.parametrize("file", [b"no picture", b"\x89PNG\r\n\x1a\n broken", b"\xff\xd8\xff\xe0 JPEG"])
def test_what_is_no_png_is_refused(file: bytes) -> None:
    with pytest.raises(ValueError, match="sample a: no PNG file"):
        wire.pixels(wire.SentSample(id="a", prompt="p", frames=[file]))
