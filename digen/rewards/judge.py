"""A vision-language model as the judge: any server that speaks OpenAI's chat completions, e.g. `vllm serve`. The user
starts it, or the run does (`serve`, digen/rewards/judge_server.py).

Two modes. `score`: the judge rates the sample against the prompt on a scale, and the value is where its rating lies
between the scale's ends, 0 to 1. `text`: the judge transcribes the sample and the value is the formula of the reward
`ocr` for what it read (transcription, then distance, as verl-omni scores text).

Invariant: the judge is asked at temperature 0 and answers in the form of a JSON schema; an answer that is cut off, of
another form or off the scale is a failure, never rounded to a value (rule R17).
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from digen.errors import RewardError
from digen.rewards.frames import spread
from digen.rewards.http import Endpoint, Limits
from digen.rewards.judge_server import ModelServer, Served
from digen.rewards.ocr import target_of, text_score
from digen.rewards.wire import png

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]

RATE = (
    "Here is what was made for the prompt below. How well does it show what the prompt asks for, and how good does it "
    "look? Rate it with a number from {low:g} (nothing of it) to {high:g} (all of it, without a flaw).\n\n"
    "Prompt: {prompt}"
)
TRANSCRIBE = "Write down all text that can be read here, exactly as it is written, in reading order, and nothing else."


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message
    finish_reason: Literal["stop"]


class _Completion(BaseModel):
    """What is read of a chat completion: one answer that ended by itself."""

    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Rating(_Answer):
    score: FiniteFloat


class Transcript(_Answer):
    text: str


class Judge:
    """What a vision-language model on an OpenAI-compatible server thinks of the sample, from 0 to 1."""

    name = "judge"

    def __init__(
        self,
        model: str,
        url: str = "",
        serve: Served = None,
        mode: Literal["score", "text"] = "score",
        instruction: str | None = None,
        low: FiniteFloat = 1.0,
        high: FiniteFloat = 5.0,
        frames: Count = 4,
        max_tokens: Count = 512,
        concurrency: Count = 8,
        timeout_s: Seconds = 120.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        token_env: str = "",
    ) -> None:
        """Options of the term.

        model: as the server calls it. url: of the API, e.g. http://127.0.0.1:8000/v1.
        serve: instead of a URL: the run starts the server, and stops it. `model` is then a folder or an id on the hub.
        mode: `score`, or `text` (transcription, then distance).
        instruction: other words for the judge; {prompt}, {low} and {high} are filled in.
        low, high: ends of the scale that the judge rates on.
        frames: of a video so many are shown, at equal distances, the first and the last among them.
        concurrency: requests under way at once, for each rank that scores; one request is one sample.
        timeout_s: for one attempt. retries: further attempts, with growing waits between them.
        token_env: the environment variable that holds the API key, if the server wants one.
        """
        if not low < high:
            raise ValueError(f"low={low:g} must be below high={high:g}")
        if bool(url) == bool(serve):
            raise ValueError("url is required, or serve=true for a server that the run starts; got both or neither")
        self.served_by = ModelServer(model, serve) if serve else None
        limits = Limits(concurrency=concurrency, timeout_s=timeout_s, retries=retries)
        self.endpoint = Endpoint(url or "http://not-started", limits, token_env)
        self._model, self._mode, self._low, self._high = model, mode, low, high
        self._instruction = instruction or (RATE if mode == "score" else TRANSCRIBE)
        self._frames, self._max_tokens = frames, max_tokens
        self._words("")  # a brace too many is better found now

    def missing(self) -> str | None:
        """What must be on this machine before the server can be started."""
        return self.served_by.missing(self.name) if self.served_by else None

    def load(self) -> None:
        """See that the server is there and has the model. Raises RewardError when not."""
        if self.served_by:
            raise RewardError(f"{self.name}: serve is for runs and their evaluation; start the server and set url")
        try:
            models = [entry["id"] for entry in json.loads(self.endpoint.get("/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(f"{self.endpoint.url}/models is no OpenAI-compatible API: {error!r}") from error
        if self._model not in models:
            raise RewardError(f"{self.endpoint.url} has no model {self._model!r}; it has: {', '.join(models)}")

    def __call__(
        self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]
    ) -> list[float | None]:
        targets = [target_of(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        asked = [k for k in range(len(media)) if self._mode == "score" or targets[k] is not None]
        if len(asked) < len(media):
            log.warning("judge: nothing is quoted in %d of %d prompts; no score", len(media) - len(asked), len(media))
        bodies = [json.dumps(self.question(media[k], prompts[k])).encode() for k in asked]

        def read(k: int, body: bytes) -> float:
            return self.value(_Completion.model_validate_json(body).choices[0].message.content, targets[asked[k]])

        values = self.endpoint.ask_all("/chat/completions", bodies, read)
        found = dict(zip(asked, values, strict=True))
        return [found.get(k) for k in range(len(media))]

    def question(self, sample: NDArray[np.uint8], prompt: str) -> dict[str, Any]:
        """The request for one sample: its pictures, the instruction, and the form of the answer."""
        frames = [sample] if sample.ndim == 3 else [sample[k] for k in spread(len(sample), self._frames)]
        content = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        return {
            "model": self._model,
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": self._words(prompt)}]}],
            **self.form(),
        }

    def form(self) -> dict[str, Any]:
        """What asks the server for a structured answer."""
        kind = Rating if self._mode == "score" else Transcript
        schema = {"name": self._mode, "strict": True, "schema": kind.model_json_schema()}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def value(self, answer: str, target: str | None) -> float:
        """From the judge's answer to a value. Raises ValueError for an answer of another form or off the scale."""
        if self._mode == "text":
            return text_score(Transcript.model_validate_json(answer).text, target or "")
        return self.on_scale(Rating.model_validate_json(answer).score)

    def on_scale(self, rating: float) -> float:
        """(rating - low) / (high - low)."""
        if not self._low <= rating <= self._high:
            raise ValueError(f"rating {rating:g} is not between {self._low:g} and {self._high:g}")
        return (rating - self._low) / (self._high - self._low)

    def _words(self, prompt: str) -> str:
        try:
            return self._instruction.format(prompt=prompt, low=self._low, high=self._high)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"instruction: {error!r}; allowed in braces: prompt, low, high ({{{{ for a brace)"
            ) from error


def _data_url(pixels: NDArray[np.uint8]) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"
