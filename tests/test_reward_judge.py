"""The judge against a real server of chat completions, right and wrong: formulas by hand, no wrong score."""

import base64
import io
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from digen import plugins
from digen.config import RewardTerm
from digen.errors import ConfigError, RewardError
from digen.rewards.base import RewardSet
from digen.rewards.frames import spread
from digen.rewards.http import Limits
from digen.rewards.judge import Judge
from digen.rewards.unified import UnifiedReward

MEDIA: NDArray[np.uint8] = np.stack([np.full((8, 8, 3), 40 * k, np.uint8) for k in (1, 2, 3)])
PROMPTS = ['a sign "ONE"', 'a sign "TWO"', 'a sign "THREE"']
METADATA: list[dict[str, Any]] = [{}, {}, {}]


def load(name: str) -> Any:
    return plugins.load(f"{Path(__file__).parent}/faulty_server.py:{name}")


answer = load("answer")


def pictures(request: dict[str, Any]) -> list[int]:
    """A pixel of each picture of a request."""
    (message,) = request["messages"]
    files = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    assert all(file.startswith("data:image/png;base64,") for file in files)
    images = [Image.open(io.BytesIO(base64.b64decode(file.partition(",")[2]))) for file in files]
    return [int(np.asarray(image)[0, 0, 0]) for image in images]


def said(text: Callable[[int], str], **choice: Any) -> Callable[[bytes], Any]:
    """A completion that says `text(k)` of the picture of brightness 40 k."""

    def completion(body: bytes) -> Any:
        message = {"role": "assistant", "content": text(pictures(json.loads(body))[0] // 40)}
        return {"id": "x", "choices": [{"index": 0, "finish_reason": "stop", "message": message, **choice}]}

    return completion


def rating(k: int) -> str:
    return json.dumps({"score": k + 1.5})


RIGHT = [(k + 0.5) / 4 for k in (1, 2, 3)]
serving = partial(load("serving"), said(rating), {"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})


def judge(url: str, *, timeout_s: float = 30.0, retries: int = 0, kind: type[Judge] = Judge, **options: Any) -> Judge:
    reward = kind("tiny", url, timeout_s=timeout_s, retries=retries, **options)
    limits = reward.endpoint.limits
    reward.endpoint.limits = Limits(limits.concurrency, timeout_s, retries, back_off_s=0.01)
    return reward


def ask(reward: Judge) -> list[float | None]:
    return reward(MEDIA, PROMPTS, METADATA)


# --- modes ---


def test_a_rating_is_where_it_lies_between_the_ends_of_the_scale() -> None:
    with serving() as server:
        reward = judge(server.url)
        reward.load()
        assert ask(reward) == RIGHT
        assert not reward.endpoint.failures
        assert ask(judge(server.url, low=0.0, high=10.0)) == [0.25, 0.35, 0.45]


@pytest.mark.parametrize(
    ("read", "score"), [("one", 1.0), ("ONE WAY", 1.0), ("O E", 2 / 3), ("", 0.0), ("quite another text", 0.0)]
)
def test_a_transcription_is_scored_as_the_ocr_reward_scores_what_it_reads(read: str, score: float) -> None:
    with serving(always=answer(said(lambda _: json.dumps({"text": read})))) as server:
        assert ask(judge(server.url, mode="text"))[0] == pytest.approx(score)


def test_a_prompt_without_a_text_to_read_is_not_asked_about_and_fails() -> None:
    with serving(always=answer(said(lambda k: json.dumps({"text": ("ONE", "TWO", "THREE")[k - 1]})))) as server:
        reward = judge(server.url, mode="text")
        assert reward(MEDIA, ["a sign", *PROMPTS[1:]], METADATA) == [None, 1.0, 1.0]
        assert reward(MEDIA, ["a sign", *PROMPTS[1:]], [{"target": "one"}, *METADATA[1:]]) == [1.0] * 3
        assert server.asked == 5


def test_the_judge_is_asked_at_temperature_0_for_a_structured_answer_with_picture_and_prompt() -> None:
    seen = []

    def see(handler: Any, body: bytes) -> None:
        seen.append(json.loads(body))
        answer(said(rating))(handler, body)

    with serving(always=see) as server:
        judge(server.url, instruction="{prompt}? {low:g}..{high:g} {{}}")(MEDIA[:1], PROMPTS[:1], METADATA[:1])
        judge(server.url, frames=3)(np.stack([MEDIA[k % 3] for k in range(9)])[None], PROMPTS[:1], METADATA[:1])
    request = seen[0]
    assert (request["model"], request["temperature"]) == ("tiny", 0)
    schema = request["response_format"]["json_schema"]
    assert schema["strict"]
    assert schema["schema"]["required"] == ["score"]
    assert schema["schema"]["additionalProperties"] is False
    assert request["messages"][0]["content"][-1] == {"type": "text", "text": 'a sign "ONE"? 1..5 {}'}
    assert pictures(request) == [40]
    assert pictures(seen[1]) == [40, 80, 120]  # frames 0, 4 and 8


@pytest.mark.parametrize(
    ("count", "wanted", "expected"),
    [(9, 3, [0, 4, 8]), (81, 4, [0, 27, 53, 80]), (2, 4, [0, 1]), (5, 1, [2]), (4, 4, [0, 1, 2, 3])],
)
def test_frames_are_spread_from_the_first_to_the_last(count: int, wanted: int, expected: list[int]) -> None:
    assert spread(count, wanted) == expected


# --- what is wrong ---

BAD = {
    "cut off": said(rating, finish_reason="length"),
    "refused": said(rating, finish_reason="content_filter"),
    "no content": said(rating, message={"role": "assistant", "content": None}),
    "no choice": lambda _: {"choices": []},
    "two choices": lambda body: {"choices": said(rating)(body)["choices"] * 2},
    "prose": said(lambda k: f"I would say {k}"),
    "off the scale": said(lambda _: '{"score": 7}'),
    "not a number": said(lambda _: '{"score": NaN}'),
    "infinite": said(lambda _: '{"score": 1e999}'),
    "text for a number": said(lambda _: '{"score": "4"}'),
    "true for a number": said(lambda _: '{"score": true}'),
    "half an answer": said(lambda _: '{"score": 4'),
    "of another form": said(lambda _: '{"rating": 4}'),
    "with more than was asked": said(lambda _: '{"score": 4, "text": "4"}'),
}
FAULTS = {**load("FAULTS"), **{name: (answer(make), "unsound answer") for name, make in BAD.items()}}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "a byte now and then"])
def test_of_a_fault_only_its_own_sample_has_no_score_and_it_is_counted(fault: str) -> None:
    act, cause = FAULTS[fault]
    with serving(act) as server:
        reward = judge(server.url, timeout_s=2.0 if cause == "timed out" else 30.0, concurrency=1)
        assert ask(reward) == [None, *RIGHT[1:]]
        assert reward.endpoint.failures == {cause: 1}


def test_what_failed_is_asked_again() -> None:
    with serving(*[FAULTS[name][0] for name in ("cut off", "500", "half a body")]) as server:
        reward = judge(server.url, retries=3, concurrency=1)
        assert ask(reward) == RIGHT
        assert reward.endpoint.failures == {"unsound answer": 1, "status 500": 1, "connection failed": 1}
        assert server.asked == 6


def test_a_picture_that_the_server_refuses_is_not_sent_again_and_its_reason_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(handler: Any, body: bytes) -> None:
        handler.reply(b'{"error": {"message":\n "cannot identify image"}}' + b" " * 9999, 400)

    with serving(refuse) as server:
        reward = judge(server.url, retries=3, concurrency=1)
        assert ask(reward) == [None, *RIGHT[1:]]
        assert reward.endpoint.failures == {"status 400": 1}
        assert server.asked == 3
    assert '1 x status 400: {"error": {"message": "cannot identify image"}}' in caplog.text


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing is
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving() as server:
        assert ask(judge(server.url)) == RIGHT


def test_a_transcript_is_never_taken_for_a_rating_nor_the_other_way_round() -> None:
    with serving() as server:
        assert ask(judge(server.url, mode="text")) == [None] * 3
    with serving(always=answer(said(lambda _: '{"text": "4"}'))) as server:
        assert ask(judge(server.url)) == [None] * 3


def test_a_model_that_the_server_does_not_have_and_a_server_of_another_kind_are_named_at_load() -> None:
    with serving() as server:
        with pytest.raises(RewardError, match="has no model 'huge'; it has: tiny, other"):
            Judge("huge", server.url).load()
        server.page = {"hello": "world"}
        with pytest.raises(RewardError, match="is no OpenAI-compatible API"):
            Judge("tiny", server.url).load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "tiny"}, "reward.judge: url is required, or serve=true"),
        ({"url": "http://x"}, "reward.judge.model is required"),
        ({"url": "x", "model": "tiny"}, "reward.judge: url: got 'x'"),
        ({"url": "http://x", "model": "tiny", "low": 5}, "reward.judge: low=5 must be below high=5"),
        ({"url": "http://x", "model": "tiny", "instruction": "{promt}"}, "instruction: KeyError.*allowed in braces"),
        ({"url": "http://x", "model": "tiny", "mode": "rank"}, "reward.judge.mode: Input should be 'score' or 'text'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardSet({"judge": RewardTerm.model_validate(options)}, 1.0).check()


# --- UnifiedReward ---


def test_the_value_of_unified_reward_is_its_final_score_divided_by_5() -> None:
    with serving(
        always=answer(said(lambda k: f"cat (animal): 1\nred (colour): 0\n**Final Score:** {k + 0.5}"))
    ) as server:
        assert ask(judge(server.url, kind=UnifiedReward)) == [0.3, 0.5, 0.7]
        assert "response_format" not in judge(server.url, kind=UnifiedReward).question(MEDIA[0], "p")


@pytest.mark.parametrize(
    "text", ["4", "Final Score: ", "Final Score: 9", "Final Score: -1", "Final Score: 4\nFinal Score: 2"]
)
def test_an_answer_without_one_final_score_on_the_scale_is_a_failure(text: str) -> None:
    with serving(always=answer(said(lambda _: text))) as server:
        rewards = RewardSet(
            {"unified-reward": RewardTerm.model_validate({"url": server.url, "retries": 0, "model": "tiny"})}, 30.0
        )
        rewards.load()
        (values,) = rewards.score(MEDIA, PROMPTS, METADATA).values()
        assert all(map(math.isnan, values))
