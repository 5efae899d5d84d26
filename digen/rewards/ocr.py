"""Is the quoted text of the prompt to be read in the sample? Read by rapidocr, whose models come inside its wheel.

Formula of flow_grpo (https://arxiv.org/abs/2505.05470): with t the target and r all that was read, both in lower case
and without white space, d = 0 if t is part of r, else the edit distance of r and t, at most |t|; score 1 - d / |t|.

Invariant: every image is read by itself on one thread, so its score does not depend on what else is scored with it, on
how a step is cut into micro-batches, or on the number of threads.
"""

from __future__ import annotations

import logging
import math
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

QUOTED = re.compile('"([^"]*)"|“([^”]*)”')
LINE_HEIGHT = 48
"""Pixels; the height that the recogniser works at."""
LINE_STRETCH = 4 / 3
"""Without detection a line is widened by this: the recogniser takes a step per 8 px, too few for 4 letters at 48 px."""


def target_of(prompt: str, metadata: Mapping[str, Any]) -> str | None:
    """The text to be read: metadata `target` if there is one, else what stands in the first pair of double quotes.

    Straight and curly quotes count, single quotes do not (they are apostrophes). None when there is no pair, when one
    is left open or when nothing stands in it.
    """
    found = QUOTED.search(prompt)
    text = metadata.get("target", (found[1] or found[2]) if found else None)
    return text if isinstance(text, str) and _plain(text) else None


def text_score(read: str, target: str, substring: bool = True) -> float:
    """1 - d / |target| (see the module), in [0, 1]. `substring`: text around the target costs nothing."""
    read, target = _plain(read), _plain(target)
    if substring and target in read:
        return 1.0
    return 1.0 - min(edit_distance(read, target), len(target)) / len(target)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).lower().split())


class Ocr:
    """Share of the quoted text that can be read in the sample, from 0 to 1."""

    def __init__(
        self,
        detect: bool = True,
        detect_side: Annotated[int, Field(ge=32)] = 64,
        frame_stride: Annotated[int, Field(ge=1)] = 4,
        video: Literal["mean", "flow_grpo"] = "mean",
        without_target: Literal["fail", "prompt"] = "fail",
        threads: Annotated[int, Field(ge=1)] = 1,
    ) -> None:
        """Options of the term `ocr`.

        detect: False when every image is one line of text and nothing else; three times as fast.
        detect_side: images whose shorter side has fewer pixels are enlarged to it before text is looked for.
        frame_stride: of a video every so many frames are read.
        video: mean over the frames read; or as flow_grpo, the mean over those above 0 without the substring rule, which
          one good frame among bad ones satisfies.
        without_target: a prompt with nothing quoted has no score (it fails), or its whole text is the target.
        threads: so many images are read at once, each on one CPU thread.
        """
        self._detect = detect
        self._detect_side = detect_side
        self._frame_stride = frame_stride
        self._video = video
        self._without_target = without_target
        self._threads = min(threads, os.cpu_count() or 1)
        self._told: set[str] = set()
        self._engine: Any = None

    def load(self) -> None:
        """Load the reading models, 0.5 s."""
        from rapidocr import RapidOCR

        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,
                "Global.use_det": self._detect,
                "Global.use_cls": False,
                "Det.limit_side_len": self._detect_side,
                "Rec.rec_img_shape": [3, LINE_HEIGHT, round(LINE_HEIGHT * LINE_STRETCH)],
                "Rec.rec_batch_num": 1,
                # One thread per image: no pool that could spin, and the same bits for any number of threads.
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def __call__(self, media: NDArray[np.uint8], prompts: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:
        """Scores in [0, 1]; NaN where a prompt has no target."""
        targets = [self._target(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        frames = media[:, :: self._frame_stride] if media.ndim == 5 else media[:, None]
        texts = iter(self.read(frames.reshape(-1, *frames.shape[2:])))
        rows = [[next(texts) for _ in sample] for sample in frames]
        return [self._score(read, target, media.ndim == 5) for read, target in zip(rows, targets, strict=True)]

    def read(self, images: NDArray[np.uint8]) -> list[str]:
        """What is written in each image (N, height, width, 3): all lines joined, "" when there is none."""
        if self._threads == 1:
            return [self._read(image) for image in images]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._read, images))

    def _read(self, image: NDArray[np.uint8]) -> str:
        found = self._engine(image[:, :, ::-1] if self._detect else _line(image))
        return "".join(found.txts or ())

    def _target(self, prompt: str, metadata: Mapping[str, Any]) -> str | None:
        target = target_of(prompt, metadata)
        if target is None:
            fallback = prompt if self._without_target == "prompt" else None
            if prompt not in self._told:
                self._told.add(prompt)
                log.warning(
                    "ocr: nothing is quoted in %r; %s",
                    prompt,
                    "its whole text is the target" if fallback else "no score",
                )
            return fallback
        return target

    def _score(self, texts: Sequence[str], target: str | None, is_video: bool) -> float:
        if target is None:
            return math.nan
        if is_video and self._video == "flow_grpo":
            above = [score for text in texts if (score := text_score(text, target, substring=False)) > 0]
            return fmean(above) if above else 0.0
        return fmean(text_score(text, target) for text in texts)


def _line(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB image of one line of text -> BGR, of the recogniser's height and widened."""
    import numpy as np
    from PIL import Image

    width = math.ceil(LINE_HEIGHT * LINE_STRETCH * image.shape[1] / image.shape[0])
    line = Image.fromarray(image).resize((width, LINE_HEIGHT), Image.Resampling.BICUBIC)
    return np.asarray(line)[:, :, ::-1]
