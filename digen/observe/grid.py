"""Samples as one PNG with a caption under each: small images enlarged without smoothing, videos as strips of frames.

Invariant: the pixels of an enlarged sample are the sample's own (nearest neighbour), and the file is there whole or not
at all (rule R20). Legend of shapes: K samples, F frames, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from digen.observe.files import replacing

Pixels = npt.NDArray[np.uint8]

SMALLEST, LARGEST = 144, 512
"""Edges in pixels that a shown image is brought between."""
FRAMES = 8
"""Frames of a video that are shown."""
GAP, MARGIN = 16, 20
FONT_SIZE, LINE = 13, 17
PROMPT_LINES = 3
PAPER, INK, PALE, EDGE = "#ffffff", "#1b1f24", "#57606a", "#d0d7de"


def sample_grid(
    images: Pixels, captions: Sequence[str], path: Path, columns: int | None = None, scale: int | None = None
) -> None:
    """Write a grid of samples.

    images: uint8 (K, H, W, 3), or videos (K, F, H, W, 3), of which up to 8 frames are shown. captions: K texts; the
    last line of a caption with several lines (the reward) stands out. columns: None for about a square (videos: one).
    scale: whole factor of enlargement; None brings small images to 144 pixels and large ones down to 512.
    Raises ValueError when shapes or counts do not fit.
    """
    cells = [_Cell((_shown(sample, scale),), caption) for sample, caption in _pairs(images, captions)]
    default = 1 if images.ndim == 5 else min(math.ceil(math.sqrt(len(cells))), 8)
    _save(_sheet(cells, columns or default), path)


def side_by_side(
    left: Pixels,
    right: Pixels,
    captions: Sequence[str],
    path: Path,
    titles: tuple[str, str] = ("base", "trained"),
    columns: int | None = None,
) -> None:
    """Write pairs of samples of one prompt and seed, `titles` above them. Shapes and errors as in `sample_grid`."""
    if left.shape != right.shape:
        raise ValueError(f"left and right: expected one shape, got {left.shape} and {right.shape}")
    pairs = zip(_pairs(left, captions), right, strict=True)
    cells = [_Cell((_shown(a, None), _shown(b, None)), caption, titles) for (a, caption), b in pairs]
    default = 1 if left.ndim == 5 else min(math.ceil(math.sqrt(len(cells) / 2)), 4)
    _save(_sheet(cells, columns or default), path)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One place of a sheet: images side by side, a title above each, a caption below all."""

    images: tuple[Image.Image, ...]
    caption: str
    titles: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return sum(image.width for image in self.images) + 4 * (len(self.images) - 1)

    @property
    def image_height(self) -> int:
        return self.images[0].height + (LINE if self.titles else 0)


def _pairs(samples: Pixels, captions: Sequence[str]) -> list[tuple[Pixels, str]]:
    if samples.dtype != np.uint8 or samples.ndim not in {4, 5} or samples.shape[-1] != 3 or not samples.size:
        raise ValueError(
            f"samples: expected uint8 (K, H, W, 3) or (K, F, H, W, 3), got {samples.dtype} {samples.shape}"
        )
    if len(samples) != len(captions):
        raise ValueError(f"captions: expected one for each of {len(samples)} samples, got {len(captions)}")
    return list(zip(samples, captions, strict=True))


def _shown(sample: Pixels, scale: int | None) -> Image.Image:
    """An image, or a video's frames in a row, at the size at which it is shown."""
    if sample.ndim == 3:
        return sized(Image.fromarray(sample), scale)
    chosen = np.unique(np.linspace(0, len(sample) - 1, min(FRAMES, len(sample))).round().astype(int))
    frames = [sized(Image.fromarray(sample[frame]), scale) for frame in chosen]
    strip = Image.new("RGB", (sum(f.width for f in frames) + 2 * (len(frames) - 1), frames[0].height), PAPER)
    for index, frame in enumerate(frames):
        strip.paste(frame, (index * (frame.width + 2), 0))
    return strip


def sized(image: Image.Image, scale: int | None, largest: int = LARGEST) -> Image.Image:
    """An image `scale` times as large, or (None) with its longest edge brought between 144 pixels and `largest`."""
    longest = max(image.size)
    if scale is None and longest > largest:
        return image.resize(
            (max(1, image.width * largest // longest), max(1, image.height * largest // longest)),
            Image.Resampling.LANCZOS,
        )
    factor = math.ceil(SMALLEST / longest) if scale is None else scale
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _sheet(cells: Sequence[_Cell], columns: int) -> Image.Image:
    """Cells row by row on white paper; every row is as high as its longest caption."""
    font = ImageFont.load_default(FONT_SIZE)
    width, height = max(cell.width for cell in cells), max(cell.image_height for cell in cells)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    texts = [[_wrapped(cell.caption, font, width) for cell in row] for row in rows]
    heights = [height + 6 + LINE * max(len(lines) for lines in row) + GAP for row in texts]
    across = 2 * MARGIN + columns * width + (columns - 1) * GAP
    sheet = Image.new("RGB", (across, 2 * MARGIN + sum(heights) - GAP), PAPER)
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for row, lines, row_height in zip(rows, texts, heights, strict=True):
        for column, (cell, caption) in enumerate(zip(row, lines, strict=True)):
            _place(draw, sheet, cell, caption, (MARGIN + column * (width + GAP), top), font)
        top += row_height
    return sheet


def _place(
    draw: ImageDraw.ImageDraw,
    sheet: Image.Image,
    cell: _Cell,
    caption: Sequence[str],
    corner: tuple[int, int],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    x, y = corner
    for index, image in enumerate(cell.images):
        if cell.titles:
            draw.text((x, y), cell.titles[index], fill=PALE, font=font)
        top = y + (LINE if cell.titles else 0)
        sheet.paste(image, (x, top))
        draw.rectangle((x - 1, top - 1, x + image.width, top + image.height), outline=EDGE)
        x += image.width + 4
    last = len(caption) - 1 if "\n" in cell.caption else -1
    for index, line in enumerate(caption):
        fill = INK if index == last or last < 0 else PALE
        draw.text((corner[0], y + cell.image_height + 6 + index * LINE), line, fill=fill, font=font)


def _wrapped(caption: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Lines that fit `width`. Each line of the caption gets up to three, the rest of it is cut."""
    lines: list[str] = []
    for part in caption.splitlines():
        wrapped = _words(part[: PROMPT_LINES * width], font, width)  # no more can fit: a letter is a pixel wide
        if len(wrapped) > PROMPT_LINES:
            wrapped = [*wrapped[: PROMPT_LINES - 1], _cut(" ".join(wrapped[PROMPT_LINES - 1 :]), font, width)]
        lines += wrapped
    return lines


def _words(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(joined) > width:
            lines.append(word)
        else:
            lines[-1] = joined
    return [line if font.getlength(line) <= width else _cut(line, font, width) for line in lines]


def _cut(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    text = text[:width]
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def _save(image: Image.Image, path: Path) -> None:
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", optimize=True)
