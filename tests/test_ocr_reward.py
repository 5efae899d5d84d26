"""The OCR reward: targets and distances by hand, reading with the real models."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from digen.data.prompts import load_prompts
from digen.rewards.ocr import Ocr, edit_distance, target_of, text_score

FILES = Path(__file__).parent / "prompts"
WORDS = ("OPEN", "CAT", "RLL", "CAFE", "73", "SALE", "JJ", "EXAM", "4496", "TF")
COLOURS = (((15, 15, 15), (250, 250, 250)), ((200, 25, 30), (250, 225, 95)), ((25, 55, 200), (250, 190, 210)))


class Scripted(Ocr):
    """Reads what it is told, one text per image, in order."""

    def __init__(self, *texts: str, **options: Any) -> None:
        super().__init__(**options)
        self.texts = texts
        self.shape: tuple[int, ...] = ()

    def read(self, images: NDArray[np.uint8]) -> list[str]:
        self.shape = images.shape
        assert len(images) == len(self.texts)
        return list(self.texts)

    def score(self, *prompts: str, frames: int | None = None, metadata: Mapping[str, Any] | None = None) -> list[float]:
        axes = (len(prompts), 8, 8, 3) if frames is None else (len(prompts), frames, 8, 8, 3)
        return self(np.zeros(axes, np.uint8), list(prompts), [metadata or {}] * len(prompts))


def drawn(
    text: str, ink: tuple[int, ...] = (15, 15, 15), ground: tuple[int, ...] = (250, 250, 250), side: int = 32
) -> Any:
    """One centred line in Pillow's built-in font, at most 29/32 of the image wide; RGB."""
    image = Image.new("RGB", (side, side), ground)
    size = 12.5 * side / 32
    size = min(size, size * side * 29 / 32 / ImageFont.load_default(size).getlength(text))
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text((side / 2, side / 2), text, font=font, fill=ink, anchor="mm")
    return np.asarray(image)


@pytest.fixture(scope="module")
def line_reader() -> Ocr:
    ocr = Ocr(detect=False)
    ocr.load()
    return ocr


@pytest.fixture(scope="module")
def reader() -> Ocr:
    ocr = Ocr()
    ocr.load()
    return ocr


@pytest.fixture(scope="module")
def glyphs() -> NDArray[np.uint8]:
    return np.stack([drawn(word, *COLOURS[k % 3]) for k, word in enumerate(WORDS)])


# --- targets ---


def test_p48_the_target_of_every_line_of_a_real_prompt_file_is_what_stands_between_its_quotes() -> None:
    prompts = [prompt.text for prompt in load_prompts(FILES / "ocr_test.txt")]
    targets = [prompt.split('"')[1] for prompt in prompts]
    assert [target_of(prompt, {}) for prompt in prompts] == targets
    assert Scripted(*targets).score(*prompts) == [1.0] * 1018
    assert Scripted(*[""] * 1018).score(*prompts) == [0.0] * 1018


def test_p48_the_target_of_prompts_with_odd_quotes_is_as_documented() -> None:
    prompts = load_prompts(FILES / "edge" / "ocr_quotes.txt")
    assert [target_of(p.text, p.metadata) for p in prompts] == ["OPEN", "Grand Sale", None, None, None, "FIRST", None]


@pytest.mark.parametrize("prompt", ['two lines "A\nB"', 'blank "  " quotes', '5" screen', "closing ” before “"])
def test_further_odd_quotes(prompt: str) -> None:
    assert target_of(prompt, {}) == ("A\nB" if "lines" in prompt else None)


def test_metadata_may_name_the_target() -> None:
    assert target_of('a "CAT"', {"target": "DOG"}) == "DOG"
    assert target_of("a cat", {"target": "CAT"}) == "CAT"
    assert target_of('a "CAT"', {"target": ""}) is None
    assert target_of('a "CAT"', {"target": 7}) is None
    assert Scripted("dog").score("a cat", metadata={"target": "DOG"}) == [1.0]


def test_a_prompt_without_a_target_fails_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ocr = Scripted("wall", "open")
    for _ in range(2):
        wall, door = ocr.score("a wall", 'a door "OPEN"')
        assert math.isnan(wall)
        assert door == 1.0
    assert [record.getMessage() for record in caplog.records] == ["ocr: nothing is quoted in 'a wall'; no score"]


def test_the_whole_prompt_can_be_the_target_where_nothing_is_quoted(caplog: pytest.LogCaptureFixture) -> None:
    ocr = Scripted("a wall", "a", without_target="prompt")
    assert ocr.score("a wall", "a wall") == [1.0, pytest.approx(1 / 5)]
    assert "its whole text is the target" in caplog.text


# --- distances ---


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distances_by_hand(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance == edit_distance(b, a)


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("OPEN", "open", 1.0),
        ("We are O P E N now", "Open", 1.0),
        ("OPIN", "OPEN", 0.75),
        ("OP", "OPEN", 0.5),
        ("", "OPEN", 0.0),
        ("something else", "OPEN", 0.0),
        ("Cafe\u0301", "CAFÉ", 1.0),
        ("GrandSale", "Grand  Sale", 1.0),
    ],
)
def test_scores_by_hand(read: str, target: str, score: float) -> None:
    assert text_score(read, target) == score


CASES = {
    "quotes missing": ("a wall", {}, ["anything"], None),
    "quotes missing, target in the metadata": ("a wall", {"target": "WALL"}, ["wall"], 1.0),
    "a quote left open": ('a sign "OPEN', {}, ["OPEN"], None),
    "single quotes": ("a sign 'OPEN'", {}, ["OPEN"], None),
    "empty target": ('a mug ""', {}, [""], None),
    "blank target": ('a mug " \t "', {}, [" "], None),
    "curly quotes": ("a sign “OPEN”", {}, ["open"], 1.0),
    "case": ('a sign "Open Late"', {}, ["oPEN lATE"], 1.0),
    "case of another script": ('a sign "ΣΟΦΙΑ"', {}, ["σοφια"], 1.0),
    "spaces in the picture": ('a sign "OPEN"', {}, ["O P  E\tN"], 1.0),
    "spaces in the target": ('a sign "O P E N"', {}, ["OPEN"], 1.0),
    "composed and decomposed": ('a sign "CAFÉ"', {}, ["Cafe\u0301"], 1.0),
    "an accent too few": ('a sign "CAFÉ"', {}, ["cafe"], 0.75),
    "another script": ('a sign "営業中"', {}, ["営業巾"], 2 / 3),
    "beyond the basic plane": ('a sign "A🎉B"', {}, ["A🎉C"], 2 / 3),
    "target longer than what is read": ('a sign "OPEN LATE"', {}, ["OPEN"], 0.5),
    "target shorter than what is read": ('a sign "OPEN"', {}, ["WE ARE OPEN"], 1.0),
    "other text, far longer": ('a sign "OPEN"', {}, ["closed until further notice"], 0.0),
    "several lines in the picture": ('a sign "GRAND SALE"', {}, ["GRAND\nSALE"], 1.0),
    "several lines in the target": ('a sign "GRAND\nSALE"', {}, ["grand sale"], 1.0),
    "several quoted texts": ('a "FIRST" and a "SECOND"', {}, ["first"], 1.0),
    "nothing read": ('a sign "OPEN"', {}, [""], 0.0),
}
"""What is in the prompt, in its metadata and in the picture; the score, None where there is none."""


@pytest.mark.parametrize("case", CASES)
def test_p48_scores_of_odd_prompts_and_pictures(case: str) -> None:
    prompt, metadata, texts, expected = CASES[case]
    (found,) = Scripted(*texts).score(prompt, metadata=metadata)
    assert math.isnan(found) if expected is None else found == pytest.approx(expected)


def test_one_good_frame_among_bad_ones_scores_low_unless_the_rule_of_flow_grpo_is_asked_for() -> None:
    frames = ["OPEN", *["zzzz"] * 7]
    assert Scripted(*frames, frame_stride=1).score('a "OPEN"', frames=8) == [1 / 8]
    assert Scripted(*frames, frame_stride=1, video="flow_grpo").score('a "OPEN"', frames=8) == [1.0]


def test_without_the_substring_rule_text_around_the_target_costs() -> None:
    assert text_score("OPENS", "OPEN", substring=False) == 0.75


# --- videos ---


def test_of_a_video_every_fourth_frame_is_read_and_the_mean_is_over_all_of_them() -> None:
    ocr = Scripted("OPEN", "", "OP", "OPEN", "xx", "xx")
    assert ocr.score('a "OPEN"', 'b "OPEN"', frames=9) == [0.5, pytest.approx(1 / 3)]
    assert ocr.shape == (6, 8, 8, 3)


def test_the_rule_of_flow_grpo_counts_only_frames_above_zero() -> None:
    ocr = Scripted("OPENS", "", "OP", "zzzz", "", "", video="flow_grpo")
    assert ocr.score('a "OPEN"', 'b "OPEN"', frames=9) == [pytest.approx((0.75 + 0.5) / 2), 0.0]


def test_the_frame_stride_is_an_option() -> None:
    ocr = Scripted(*["OPEN"] * 3, frame_stride=1)
    assert ocr.score('a "OPEN"', frames=3) == [1.0]


# --- reading ---


def test_single_lines_of_32_pixels_are_read_in_many_colours(line_reader: Ocr, glyphs: NDArray[np.uint8]) -> None:
    assert line_reader.read(glyphs) == list(WORDS)
    prompts = [f'a sign that says "{word}"' for word in WORDS]
    assert line_reader(glyphs, prompts, [{}] * len(WORDS)) == [1.0] * len(WORDS)
    wrong = line_reader(glyphs, prompts[1:] + prompts[:1], [{}] * len(WORDS))
    assert max(wrong) < 0.5


def test_text_is_found_and_read_in_small_and_large_images(reader: Ocr, glyphs: NDArray[np.uint8]) -> None:
    assert reader.read(glyphs[:4]) == list(WORDS[:4])
    assert reader.read(np.stack([drawn("HELLO WORLD", side=256)])) == ["HELLO WORLD"]


def test_several_lines_are_joined(reader: Ocr) -> None:
    image = Image.fromarray(np.full((128, 128, 3), 250, np.uint8))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(28)
    draw.text((64, 35), "GRAND", font=font, fill=(0, 0, 0), anchor="mm")
    draw.text((64, 95), "SALE", font=font, fill=(0, 0, 0), anchor="mm")
    assert reader(np.asarray(image)[None], ['a poster "Grand Sale"'], [{}]) == [1.0]


def test_an_image_without_text_reads_as_nothing(reader: Ocr, line_reader: Ocr) -> None:
    grey = np.full((1, 32, 32, 3), 128, np.uint8)
    assert reader.read(grey) == line_reader.read(grey) == [""]
    assert reader(grey, ['"OPEN"'], [{}]) == [0.0]


def test_a_score_does_not_depend_on_company_or_threads(line_reader: Ocr, glyphs: NDArray[np.uint8]) -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    hard = np.clip(glyphs + rng.normal(0, 45, glyphs.shape), 0, 255).astype(np.uint8)
    together = line_reader.read(hard)
    assert together != list(WORDS)
    assert [line_reader.read(image[None])[0] for image in hard] == together
    parallel = Ocr(detect=False, threads=2)
    parallel.load()
    assert parallel.read(hard) == together


def test_images_may_be_read_only_and_are_not_changed(reader: Ocr, glyphs: NDArray[np.uint8]) -> None:
    frozen = glyphs[:2].copy()
    frozen.flags.writeable = False
    reader.read(frozen)
    assert (frozen == glyphs[:2]).all()


def test_loading_and_reading_print_and_log_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ocr = Ocr()
    ocr.load()
    ocr.read(np.full((1, 32, 32, 3), 128, np.uint8))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
