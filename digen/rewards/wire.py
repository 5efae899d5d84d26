"""How samples and scores travel between `remote` and a reward service: JSON, or msgpack, with pictures as PNG.

Invariant: nothing is unpickled (rule R19); pixels arrive as they were sent; a score belongs to a sample by its id,
which no other request has, so that neither the order of an answer nor an answer to somebody else can shift a score.
Anything that is not exactly one score for every id is refused as a whole. docs/rewards.md describes the messages.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROTOCOL: Final = 1
Form = Literal["json", "msgpack"]
TYPES: Final[Mapping[Form, str]] = {"json": "application/json", "msgpack": "application/msgpack"}
"""Content types."""

MOST_PIXELS: Final = 1 << 28
"""Of all frames of a sample: a small file can claim to be a huge picture."""

M = TypeVar("M", bound=BaseModel)


def _bytes(value: object) -> object:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Png = Annotated[
    bytes, BeforeValidator(_bytes), PlainSerializer(lambda b: base64.b64encode(b).decode(), when_used="json")
]
"""A PNG file; in JSON its base64 text."""


class Message(BaseModel):
    """Base of all messages. Further keys are allowed and mean nothing: a newer side may say more."""

    model_config = ConfigDict(frozen=True, strict=True)


class SentSample(Message):
    """One sample to score."""

    id: str
    prompt: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    frames: Annotated[list[Png], Field(min_length=1)]
    """All of one size: one for an image, all of them for a video."""
    video: bool = False


class Request(Message):
    protocol: Literal[1] = PROTOCOL
    samples: Annotated[list[SentSample], Field(min_length=1)]


class SentScore(Message):
    """One score; higher is better. None: there is none, and `error` may say why."""

    id: str
    score: float | None
    error: str = ""


class Answer(Message):
    protocol: Literal[1] = PROTOCOL
    scores: list[SentScore]


class Health(Message):
    """What a service says of itself."""

    protocol: Literal[1] = PROTOCOL
    reward: str
    version: str
    """Of digen, or of what else serves it."""


def pack(message: Message, form: Form) -> bytes:
    """Raises ValueError or TypeError for metadata that this form cannot carry."""
    if form == "json":
        return message.model_dump_json().encode()
    import msgpack

    packed: bytes = msgpack.packb(message.model_dump())
    return packed


def unpack(kind: type[M], body: bytes, form: Form) -> M:
    """Raises ValueError for what is not such a message."""
    if form == "json":
        return kind.model_validate_json(body)
    import msgpack

    return kind.model_validate(msgpack.unpackb(body))


def request(
    media: NDArray[np.uint8], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], first: int = 0
) -> Request:
    """Samples as `RewardFn` is given them, under ids of their own; `first` is the number of the first one."""
    own, video = token_hex(8), media.ndim == 5
    return Request(
        samples=[
            SentSample(
                id=f"{own}-{first + k}",
                prompt=prompts[k],
                metadata=dict(metadata[k]),
                frames=[png(frame) for frame in (sample if video else [sample])],
                video=video,
            )
            for k, sample in enumerate(media)
        ]
    )


def scores(answer: Answer, ids: Sequence[str]) -> list[float | None]:
    """Scores in the order of `ids`; None where there is none or it is not finite.

    Raises ValueError unless there is exactly one for each.
    """
    found = {score.id: score.score for score in answer.scores}
    if len(answer.scores) != len(ids) or found.keys() != set(ids):
        raise ValueError(f"{len(answer.scores)} scores that do not belong one to one to the {len(ids)} samples")
    values = (found[k] for k in ids)
    return [value if value is not None and math.isfinite(value) else None for value in values]


def png(pixels: NDArray[np.uint8]) -> bytes:
    """An RGB image (height, width, 3) as a PNG file, which loses nothing; packed fast rather than small."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", compress_level=1)
    return file.getvalue()


def pixels(sample: SentSample) -> NDArray[np.uint8]:
    """A sample as it was: (height, width, 3), of a video (frames, height, width, 3). ValueError for other files."""
    import numpy as np

    try:
        files = [Image.open(BytesIO(file), formats=["PNG"]) for file in sample.frames]
        if (count := sum(file.width * file.height for file in files)) > MOST_PIXELS:
            raise ValueError(f"sample {sample.id}: {count} pixels; allowed: {MOST_PIXELS}")
        frames = [np.asarray(file.convert("RGB")) for file in files]
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"sample {sample.id}: no PNG file: {error}") from error
    if len({frame.shape for frame in frames}) > 1 or (len(frames) > 1 and not sample.video):
        raise ValueError(f"sample {sample.id}: frames are for videos, and all of one size")
    return np.stack(frames) if sample.video else frames[0]
