"""Samples that move: MP4 (H.264) where PyAV is installed, GIF elsewhere, and never one where the other was asked for.

Invariant: a file is there whole or not at all (rule R20); a format that is asked for by name and cannot be had is an
error before anything is loaded (R16). Legend of shapes: K samples, F frames, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from PIL import Image

from digen.config import RunConfig
from digen.errors import ConfigError
from digen.observe.files import replacing
from digen.observe.grid import PAPER, Pixels, sample_grid, sized

Format = Literal["mp4", "gif"]
EDGE: Final = 256
"""Longest edge in pixels of a video among others."""
SHOWN: Final = 16
"""Videos in one picture that moves."""
GAP: Final = 4
_INSTALL: Final = "pip install 'digen[video]'"


def video_format(config: RunConfig[Any]) -> Format:
    """What `observe.video` stands for here. Raises ConfigError when that is mp4 and PyAV is not installed."""
    wanted = config.observe.video
    if wanted == "mp4" and not find_spec("av"):
        raise ConfigError(f"observe.video=mp4 needs PyAV ({_INSTALL}); allowed without it: gif, auto")
    return ("mp4" if find_spec("av") else "gif") if wanted == "auto" else wanted


def video_notes(config: RunConfig[Any]) -> list[str]:
    """What a person is told before videos are written. Raises ConfigError as `video_format`."""
    if config.model.num_frames == 1 or video_format(config) == config.observe.video or find_spec("av"):
        return []
    return [f"videos of samples are written as GIF, for MP4 {_INSTALL}"]


def draw(media: Pixels, captions: Sequence[str], path: Path, columns: int, kind: Format, rate: float) -> None:
    """Write a grid of samples, as `sample_grid`, and of videos a moving one beside it. rate: frames a second."""
    sample_grid(media, captions, path, columns=columns)
    if media.ndim == 5 and media.shape[1] > 1:
        write_video(together(media, columns), path.with_suffix(f".{kind}"), rate)


def together(videos: Pixels, columns: int | None = None) -> Pixels:
    """Up to 16 videos (K, F, H, W, 3) as one (F, H', W', 3), in rows; small ones are enlarged, large ones reduced."""
    videos = videos[:SHOWN]
    columns = min(columns or math.ceil(math.sqrt(len(videos))), len(videos))
    shown = [[np.asarray(sized(Image.fromarray(frame), None, EDGE)) for frame in video] for video in videos]
    height, width = shown[0][0].shape[:2]
    rows = math.ceil(len(videos) / columns)
    size = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    paper = np.full((videos.shape[1], *size, 3), Image.new("RGB", (1, 1), PAPER).getpixel((0, 0)), np.uint8)
    for k, video in enumerate(shown):
        top, left = k // columns * (height + GAP), k % columns * (width + GAP)
        paper[:, top : top + height, left : left + width] = video
    return paper


def beside(left: Pixels, right: Pixels) -> Pixels:
    """Pairs of samples (K, ..., H, W, 3) as one each, (K, ..., H, 2 W, 3)."""
    return np.concatenate([left, right], axis=-2)


def write_video(video: Pixels, path: Path, rate: float) -> None:
    """Write a video (F, H, W, 3) as the path's ending says, `.mp4` or `.gif`. rate: frames a second."""
    with replacing(path) as temporary:
        (_mp4 if path.suffix == ".mp4" else _gif)(video, temporary, rate)


def _gif(video: Pixels, path: Path, rate: float) -> None:
    first, *rest = map(Image.fromarray, video)
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=round(1000 / rate), loop=0)


def _mp4(video: Pixels, path: Path, rate: float) -> None:
    """Colours are kept for 2x2 pixels together, so an odd last row or column is shown twice."""
    import av

    height, width = (edge + edge % 2 for edge in video.shape[1:3])
    even = np.pad(video, ((0, 0), (0, height - video.shape[1]), (0, width - video.shape[2]), (0, 0)), mode="edge")
    with av.open(str(path), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=Fraction(rate).limit_denominator(1001), options={"crf": "17"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in even:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
