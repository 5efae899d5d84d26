"""Sample grids, side-by-side sheets and curves, down to single pixels."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops, ImageFont

from digen.observe import grid
from digen.observe.curves import plot_curves, ticks
from digen.observe.grid import sample_grid, side_by_side

RNG = np.random.default_rng(0)


def noise(*shape: int) -> grid.Pixels:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.convert("RGB")


def test_every_sample_is_in_the_grid_enlarged_without_smoothing(tmp_path: Path) -> None:
    images = noise(5, 32, 32, 3)
    sample_grid(images, ["a\nreward 0.5"] * 5, tmp_path / "grid.png", columns=3, scale=4)
    sheet = opened(tmp_path / "grid.png")
    row = 128 + 6 + 2 * grid.LINE + grid.GAP
    assert sheet.size == (2 * grid.MARGIN + 3 * 128 + 2 * grid.GAP, 2 * grid.MARGIN + 2 * row - grid.GAP)
    for index, image in enumerate(images):
        x, y = grid.MARGIN + index % 3 * (128 + grid.GAP), grid.MARGIN + index // 3 * row
        pixels = np.asarray(sheet.crop((x, y, x + 128, y + 128)))
        np.testing.assert_array_equal(pixels, image.repeat(4, axis=0).repeat(4, axis=1))


@pytest.mark.parametrize(("size", "shown"), [(32, 160), (100, 200), (300, 300), (1024, 512)])
def test_small_samples_are_enlarged_by_whole_factors_and_large_ones_shrunk(
    tmp_path: Path, size: int, shown: int
) -> None:
    sample_grid(noise(1, size, size, 3), ["one"], tmp_path / "grid.png")
    assert opened(tmp_path / "grid.png").width == shown + 2 * grid.MARGIN


def test_the_caption_is_under_its_own_image(tmp_path: Path) -> None:
    captions = ["same", "same", "other", "same"]
    sample_grid(np.full((4, 32, 32, 3), 9, np.uint8), captions, tmp_path / "grid.png", columns=4)
    sheet = opened(tmp_path / "grid.png")
    starts = [grid.MARGIN + index * (160 + grid.GAP) for index in range(4)]
    cells = [sheet.crop((x - 1, 0, x + 160, sheet.height)) for x in starts]
    assert [ImageChops.difference(cells[0], cell).getbbox() is None for cell in cells] == [True, True, False, True]


def test_a_long_caption_is_wrapped_and_cut_and_its_last_line_kept() -> None:
    font = ImageFont.load_default(grid.FONT_SIZE)
    lines = grid._wrapped("word " * 50 + "\n" + "x" * 90 + "\nreward 0.53", font, 160)
    assert len(lines) == grid.PROMPT_LINES + 1 + 1
    assert lines[grid.PROMPT_LINES - 1].endswith("...")
    assert lines[-2].endswith("xx...")
    assert lines[-1] == "reward 0.53"
    assert all(font.getlength(line) <= 160 for line in lines)


def test_an_empty_caption_is_allowed(tmp_path: Path) -> None:
    sample_grid(noise(2, 8, 8, 3), ["", ""], tmp_path / "grid.png")
    assert opened(tmp_path / "grid.png").width > 0


def test_a_video_becomes_a_row_of_its_frames_from_first_to_last(tmp_path: Path) -> None:
    videos = np.zeros((2, 17, 32, 32, 3), np.uint8)
    videos += np.arange(17, dtype=np.uint8)[None, :, None, None, None]
    sample_grid(videos, ["a", "b"], tmp_path / "grid.png", scale=2)
    sheet = opened(tmp_path / "grid.png")
    pitch = 64 + 2
    assert sheet.width == 2 * grid.MARGIN + 8 * pitch - 2
    pixels = np.asarray(sheet)[grid.MARGIN + 30, grid.MARGIN :, 0]
    for index, value in enumerate([0, 2, 5, 7, 9, 11, 14, 16]):
        assert set(pixels[index * pitch : index * pitch + 64]) == {value}
    assert set(pixels[64:pitch]) == {255}


def test_a_short_video_shows_each_frame_once(tmp_path: Path) -> None:
    sample_grid(noise(1, 3, 32, 32, 3), ["a"], tmp_path / "grid.png", scale=1)
    assert opened(tmp_path / "grid.png").width == 2 * grid.MARGIN + 3 * 32 + 2 * 2


def test_side_by_side_puts_left_and_right_of_one_prompt_together(tmp_path: Path) -> None:
    left, right = np.full((4, 32, 32, 3), 50, np.uint8), np.full((4, 32, 32, 3), 200, np.uint8)
    side_by_side(left, right, ["a\n0.1 -> 0.9"] * 4, tmp_path / "pairs.png", titles=("before", "after"))
    sheet = opened(tmp_path / "pairs.png")
    pair = 160 + 4 + 160
    assert sheet.width == 2 * grid.MARGIN + 2 * pair + grid.GAP
    y = grid.MARGIN + grid.LINE + 80
    shades = [sheet.getpixel((grid.MARGIN + x, y)) for x in (80, 244, pair + grid.GAP + 80, pair + grid.GAP + 244)]
    assert shades == [(50,) * 3, (200,) * 3, (50,) * 3, (200,) * 3]


@pytest.mark.parametrize(
    ("images", "captions", "message"),
    [
        (np.zeros((2, 8, 8, 3), np.float32), ["a", "b"], "expected uint8"),
        (np.zeros((2, 3, 8, 8), np.uint8), ["a", "b"], r"got uint8 \(2, 3, 8, 8\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), [], r"got uint8 \(0, 8, 8, 3\)"),
        (np.zeros((2, 8, 8, 3), np.uint8), ["a"], "expected one for each of 2 samples, got 1"),
    ],
)
def test_samples_of_a_wrong_shape_or_count_are_refused(
    tmp_path: Path, images: grid.Pixels, captions: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample_grid(images, captions, tmp_path / "grid.png")
    assert not (tmp_path / "grid.png").exists()


def test_pairs_of_two_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="left and right: expected one shape"):
        side_by_side(noise(2, 8, 8, 3), noise(2, 8, 9, 3), ["a", "b"], tmp_path / "pairs.png")


def test_ticks_are_round_numbers_inside_the_range() -> None:
    assert ticks(0.43, 0.81) == [0.5, 0.6, 0.7, 0.8]
    assert ticks(0, 59.9) == [0, 20, 40]
    assert ticks(-1.0, 1.0) == [-1.0, -0.5, 0.0, 0.5, 1.0]
    for high in (1e-6, 0.3, 0.99, 1.0, 7, 59.9, 60, 99.9, 1e6):
        assert 2 <= len(ticks(0, high)) <= 6


def test_curves_rise_from_left_to_right_in_their_own_colours(tmp_path: Path) -> None:
    up = [{"step": step, "reward/mean": step / 50} for step in range(50)]
    down = [{"step": step, "reward/mean": 1 - step / 50} for step in range(50)]
    plot_curves({"up": up, "down": down}, tmp_path / "curves.png", label="mean OCR reward")
    pixels = np.asarray(opened(tmp_path / "curves.png")).astype(int)
    assert pixels.shape == (800, 1440, 3)
    plot = pixels[300:, 140:]  # below the legend, right of the axis
    blue = np.argwhere(plot[..., 2] - plot[..., 0] > 120)
    red = np.argwhere(plot[..., 0] - plot[..., 2] > 120)
    assert np.corrcoef(blue.T)[0, 1] < -0.9  # image rows count downwards
    assert np.corrcoef(red.T)[0, 1] > 0.9


def test_curves_of_one_step_or_one_value_can_be_drawn(tmp_path: Path) -> None:
    plot_curves({"a": [{"step": 3, "kl/mean": 0.5}]}, tmp_path / "one.png", key="kl/mean")
    plot_curves({"a": [{"step": 0, "x": 0.0}, {"step": 1, "x": 0.0}]}, tmp_path / "flat.png", key="x")
    assert opened(tmp_path / "one.png").size == opened(tmp_path / "flat.png").size


def test_a_metric_that_a_run_lacks_is_refused_with_the_name_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'x', of which bad, empty has no finite value"):
        plot_curves(
            {"good": [{"step": 0, "x": 1.0}], "bad": [{"step": 0, "x": math.nan}], "empty": []},
            tmp_path / "x.png",
            key="x",
        )
    with pytest.raises(ValueError, match="'x', of which no run has"):
        plot_curves({}, tmp_path / "x.png", key="x")


def test_a_caption_of_a_hundred_thousand_characters_is_cut_in_no_time(tmp_path: Path) -> None:
    for caption in ("word " * 20_000, "x" * 100_000, "\n".join(["long " * 10_000] * 2)):
        start = time.process_time()
        sample_grid(np.zeros((1, 32, 32, 3), np.uint8), [caption], tmp_path / "grid.png")
        assert time.process_time() - start < 1
