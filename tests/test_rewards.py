"""Rewards: what they are given, what becomes of a failed one, how mistakes in options and functions are told."""

import io
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from digen.config import RewardTerm
from digen.errors import ConfigError, PluginError, RewardError
from digen.rewards.base import RewardSet
from digen.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from digen.rewards.total import total
from digen.types import Scores

EXAMPLE = Path(__file__).parent.parent / "examples" / "my_reward.py"
IMAGES: NDArray[np.uint8] = np.arange(4 * 8 * 8 * 3, dtype=np.uint32).reshape(4, 8, 8, 3).astype(np.uint8)
PROMPTS = [f"prompt {k}" for k in range(4)]
METADATA: list[Mapping[str, Any]] = [{"row": k} for k in range(4)]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file with this body under `def score(media, prompts, metadata)`; what the config calls that reward."""

    def write(body: str, signature: str = "def score(media, prompts, metadata)") -> str:
        path = tmp_path / f"own{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"import time, math\nimport numpy as np\n\n{signature}:\n    {body}\n")
        return f"{path}:score"

    return write


def loaded(*names: str, timeout_s: float = 30.0, **options: object) -> RewardSet:
    rewards = RewardSet({name: RewardTerm.model_validate(options) for name in names}, timeout_s)
    rewards.load()
    return rewards


def scores(rewards: RewardSet) -> list[float]:
    (values,) = rewards.score(IMAGES, PROMPTS, METADATA).values()
    return list(values)


# --- the sum of several ---


@pytest.mark.parametrize(
    ("weights", "expected"), [((0.7, 0.3), (0.7 * 0.5 + 0.3 * 10, 0.7 * 0.25 - 0.3 * 2)), ((1, -0.5), (-4.5, 1.25))]
)
def test_p50_the_total_is_the_weighted_sum_of_the_raw_values(
    weights: tuple[float, float], expected: tuple[float, float]
) -> None:
    terms = {"easy": RewardTerm(weight=weights[0]), "hard": RewardTerm(weight=weights[1])}
    values = Scores(("easy", "hard"), (0, 1), ((0.5, 10.0), (0.25, -2.0)))
    assert total(values, terms) == pytest.approx(expected, abs=1e-12)


def test_a_sample_with_one_failed_reward_has_no_total_and_the_others_keep_theirs() -> None:
    terms = {"a": RewardTerm(), "b": RewardTerm(weight=0.0)}
    values = total(Scores(("a", "b"), (0, 1), ((1.0, math.nan), (1.0, 3.0))), terms)
    assert math.isnan(values[0])
    assert values[1] == 1.0


def test_a_set_scores_every_reward_by_its_name() -> None:
    rewards = RewardSet({"jpeg-compressibility": RewardTerm(), "jpeg-incompressibility": RewardTerm(weight=-1)}, 30.0)
    rewards.load()
    values = rewards.score(IMAGES, PROMPTS, METADATA)
    assert list(values) == ["jpeg-compressibility", "jpeg-incompressibility"]
    for small, large in zip(*values.values(), strict=True):
        assert small == pytest.approx(-large / 500)


# --- what a reward is given ---


def test_p54_media_are_read_only_uint8_rgb_and_prompts_and_metadata_come_along(write: Write) -> None:
    body = (
        "assert media.dtype == np.uint8 and media.shape == (4, 8, 8, 3) and not media.flags.writeable; "
        "assert type(prompts) is list and prompts[2] == 'prompt 2' and metadata[3] == {'row': 3}; "
        "return media[:, 0, 0, 0]"
    )
    assert scores(loaded(write(body))) == [0.0, 192.0, 128.0, 64.0]
    assert IMAGES.flags.writeable


def test_p54_a_video_has_one_more_axis(write: Write) -> None:
    rewards = loaded(write("assert media.shape == (4, 2, 8, 8, 3); return [1.0] * 4"))
    (values,) = rewards.score(np.stack([IMAGES, IMAGES], 1), PROMPTS, METADATA).values()
    assert values == (1.0,) * 4


def test_p54_black_white_and_grey_arrive_as_0_255_and_128(write: Write) -> None:
    media = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (0, 255, 128)])
    (values,) = loaded(write("return media.reshape(3, -1).mean(1)")).score(media, ["p"] * 3, [{}] * 3).values()
    assert values == (0.0, 255.0, 128.0)


@pytest.mark.parametrize(
    "media", [IMAGES.astype(np.float32) / 255, IMAGES.transpose(0, 3, 1, 2), IMAGES[0], IMAGES[..., :1]]
)
def test_media_of_another_type_or_shape_are_refused_before_a_reward_sees_them(media: NDArray[Any]) -> None:
    with pytest.raises(RewardError, match="must be uint8"):
        loaded("jpeg-compressibility").score(media, PROMPTS, METADATA)


def test_samples_prompts_and_metadata_must_be_as_many() -> None:
    with pytest.raises(RewardError, match="got 4 samples, 3 prompts and 4 rows"):
        loaded("jpeg-compressibility").score(IMAGES, PROMPTS[:3], METADATA)


# --- what becomes of a failed one ---


def test_p51_nan_none_and_infinity_fail_alone_and_are_logged_with_the_sample(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    values = scores(loaded(write("return [1.0, None, math.inf, math.nan]")))
    assert values[0] == 1.0
    assert all(math.isnan(value) for value in values[1:])
    assert "no finite score for 3 of 4 samples; the first is sample 1, prompt 'prompt 1'" in caplog.text


def test_an_exception_fails_the_call_and_is_logged_once_with_its_cause(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = RewardSet(
        {write("raise OSError('server gone')"): RewardTerm(), "jpeg-compressibility": RewardTerm()}, 30.0
    )
    rewards.load()
    broken, sound = rewards.score(IMAGES, PROMPTS, METADATA).values()
    assert all(math.isnan(value) for value in broken)
    assert all(math.isfinite(value) for value in sound)
    assert len(caplog.records) == 1
    assert "failed for 4 samples (the first prompt is 'prompt 0'): OSError: server gone" in caplog.text


def test_even_a_reward_that_exits_only_fails(write: Write) -> None:
    assert all(math.isnan(value) for value in scores(loaded(write("raise SystemExit(3)"))))


def test_a_stuck_reward_fails_at_the_time_limit_and_does_not_hold_up_the_others(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = write("time.sleep(1.0 if metadata[0]['row'] == 0 else 0.0); return [7.0] * 4")
    rewards = RewardSet({stuck: RewardTerm(), "jpeg-compressibility": RewardTerm()}, 0.2)
    rewards.load()
    begin = time.perf_counter()
    values = rewards.score(IMAGES, PROMPTS, METADATA)
    assert time.perf_counter() - begin < 0.8
    assert all(math.isnan(value) for value in values[stuck])
    assert all(math.isfinite(value) for value in values["jpeg-compressibility"])
    assert "no answer within 0.2 s" in caplog.text


def test_after_a_stuck_call_ends_the_reward_answers_again(write: Write) -> None:
    rewards = loaded(write("time.sleep(0.3 if metadata[0]['row'] == 0 else 0.0); return [7.0] * 4"), timeout_s=0.2)
    assert math.isnan(scores(rewards)[0])
    (values,) = rewards.score(IMAGES, PROMPTS, METADATA[::-1]).values()
    assert values == (7.0,) * 4


def test_p53_calls_that_wait_behind_a_stuck_one_do_not_pile_up(write: Write, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # whoever opens it to read waits until somebody writes
    name = write(f"open({str(gate)!r}).close(); return [7.0] * 4")
    rewards = loaded(name, timeout_s=0.05)
    for _ in range(5):
        assert math.isnan(scores(rewards)[0])

    def waiting() -> int:
        return sum(thread.name == f"reward-{name}" for thread in threading.enumerate())

    limit = time.monotonic() + 10
    while waiting() > 1 and time.monotonic() < limit:
        time.sleep(0.01)
    assert waiting() == 1
    gate.write_text("")


def test_p52_a_stuck_reward_does_not_keep_the_process_from_exiting(write: Write) -> None:
    program = (
        "import numpy as np\nfrom digen.config import RewardTerm\nfrom digen.rewards.base import RewardSet\n"
        f"rewards = RewardSet({{{write('time.sleep(1e6)')!r}: RewardTerm()}}, 0.1)\nrewards.load()\n"
        "print(rewards.score(np.zeros((1, 8, 8, 3), np.uint8), ['p'], [{}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "(nan,)" in done.stdout


def test_rewards_run_side_by_side(write: Write) -> None:
    barrier = "import threading; threading.current_thread().name.startswith('reward-') or 1/0; "
    slow = [write(f"{barrier}time.sleep(0.5); return [1.0] * 4") for _ in range(4)]
    rewards = loaded(*slow)
    begin = time.perf_counter()
    rewards.score(IMAGES, PROMPTS, METADATA)
    assert time.perf_counter() - begin < 1.5


# --- a user's own ---


@pytest.mark.parametrize(
    "body",
    [
        "return (1, 2.0, True, np.float32(3))",
        "return np.array([1, 2, 1, 3])",
        "import torch; return torch.tensor([1.0, 2.0, 1.0, 3.0])",
        "import torch; return [torch.tensor(x) for x in (1.0, 2.0, 1.0, 3.0)]",
    ],
)
def test_numbers_arrays_and_tensors_are_all_scores(write: Write, body: str) -> None:
    assert scores(loaded(write(body))) == [1.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("return [1.0, 2.0]", "got 2: [1.0, 2.0]"),
        ("return 1.0", "got float 1.0"),
        ("return 'good'", "got str 'good'"),
        ("return None", "got NoneType None"),
        ("return [0.0, 'good', 0.0, 0.0]", "got str 'good' for sample 1"),
        ("return np.zeros((4, 2))", "got list [0.0, 0.0] for sample 0"),
        ("return {k: 0.0 for k in range(4)}", "got dict {0: 0.0"),
        ("yield 1.0", "got generator"),
    ],
)
def test_p56_what_is_not_one_number_per_sample_is_an_error_that_names_function_expected_and_got(
    write: Write, body: str, got: str
) -> None:
    name = write(body)
    with pytest.raises(RewardError) as caught:
        scores(loaded(name))
    message = str(caught.value)
    assert "\n" not in message
    assert f"reward {name!r} (score) must return 4 numbers, one per sample; {got}" in message


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("def score(media, prompts)", "must take (media, prompts, metadata); got score(media, prompts): too many"),
        ("def score()", "must take (media, prompts, metadata); got score()"),
        ("async def score(media, prompts, metadata)", "is async; make it a plain function"),
        ("class score", "must take (media, prompts, metadata)"),
    ],
)
def test_p56_a_wrong_signature_is_refused_before_anything_loads(write: Write, signature: str, reason: str) -> None:
    body = "def __call__(self, media): ..." if signature.startswith("class") else "return [0.0] * 4"
    name = write(body, signature)
    with pytest.raises(PluginError) as caught:
        RewardSet({name: RewardTerm()}, 1.0).check()
    assert reason in str(caught.value)


def test_a_class_without_call_or_a_constant_is_no_reward(write: Write) -> None:
    with pytest.raises(PluginError, match="has no __call__"):
        RewardSet({write("pass", "class score"): RewardTerm()}, 1.0).check()
    with pytest.raises(PluginError, match="must be a class or a function; got tuple"):
        RewardSet({f"{EXAMPLE}:COLOURS": RewardTerm()}, 1.0).check()


def test_p50_p56_unknown_names_files_and_functions_are_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"Did you mean 'jpeg-compressibility'.*Allowed: .*ocr"):
        RewardSet({"jpeg-compresibility": RewardTerm()}, 1.0).check()
    with pytest.raises(PluginError, match="does not exist"):
        RewardSet({f"{tmp_path}/none.py:score": RewardTerm()}, 1.0).check()
    with pytest.raises(PluginError, match="Did you mean 'named_colour'"):
        RewardSet({f"{EXAMPLE}:named_color": RewardTerm()}, 1.0).check()


def test_p56_a_reward_may_be_given_as_a_module_too() -> None:
    assert scores(loaded("digen.rewards.jpeg:JpegIncompressibility")) == scores(loaded("jpeg-incompressibility"))


def test_the_example_scores_the_colour_that_a_prompt_names() -> None:
    media = np.zeros((3, 4, 4, 3), np.uint8)
    media[0, ..., 0] = 255
    media[1, :2, :, 2] = 255
    prompts, metadata = ["a Red cube", "a blue cube", "a cube"], [{}, {}, {"colour": "green"}]
    (values,) = loaded(f"{EXAMPLE}:named_colour").score(media, prompts, metadata).values()
    assert values[:2] == (1.0, 0.5)
    assert math.isnan(values[2])
    (values,) = loaded(f"{EXAMPLE}:named_colour", key="colour").score(media, prompts, metadata).values()
    assert values == (1.0, 0.5, 0.0)


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"detekt": False},
            "reward.ocr.detekt: unknown option: got 'detekt'. Did you mean 'detect'? Allowed: detect, ",
        ),
        ({"detect": "perhaps"}, "reward.ocr.detect: Input should be a valid boolean"),
        ({"frame_stride": 0}, "reward.ocr.frame_stride: Input should be greater than or equal to 1; got 0"),
        ({"video": "median"}, "reward.ocr.video: Input should be 'mean' or 'flow_grpo'; got 'median'"),
    ],
)
def test_wrong_options_are_refused_before_anything_loads(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardSet({"ocr": RewardTerm.model_validate(options)}, 1.0).check()
    assert message in str(caught.value)


def test_a_reward_without_options_refuses_any() -> None:
    with pytest.raises(ConfigError, match=r"reward.jpeg-compressibility.quality: unknown option.*Allowed: nothing"):
        loaded("jpeg-compressibility", quality=3)


def test_a_functions_options_are_its_parameters_after_the_third(write: Write) -> None:
    name = write("return [scale * k for k in range(4)]", "def score(a, b, c, scale: float)")
    assert scores(loaded(name, scale="2.5")) == [0.0, 2.5, 5.0, 7.5]
    with pytest.raises(ConfigError, match=r"\.scale is required"):
        loaded(name)
    with pytest.raises(ConfigError, match=r"\.scale: Input should be a valid number.*got 'x'"):
        loaded(name, scale="x")


CLASS = """class score:
    log = []
    def __init__(self, size: int, threads: int = 0, **more):
        if size < 0: raise ValueError("size must not be negative")
        self.size, self.threads, self.more = size, threads, more
        self.log.append("made")
    def check(self): self.log.append("checked")
    def load(self): self.log.append("loaded")
    def __call__(self, media, prompts, metadata):
        return [self.size, self.threads, len(self.more), self.log.index("loaded")]
"""


def test_a_class_is_made_checked_and_then_loaded_and_is_told_its_threads(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CLASS)
    name = f"{tmp_path}/own.py:score"
    rewards = RewardSet({name: RewardTerm.model_validate({"size": "5", "other": 1})}, 30.0, threads=3)
    rewards.check()
    with pytest.raises(RuntimeError, match="before load"):
        RewardSet({name: RewardTerm()}, 30.0).score(IMAGES, PROMPTS, METADATA)
    rewards.load()
    assert scores(rewards) == [5.0, 3.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match="size must not be negative"):
        RewardSet({name: RewardTerm.model_validate({"size": -1})}, 1.0).check()


def test_checking_rewards_and_summing_them_import_neither_torch_nor_onnxruntime() -> None:
    program = (
        "import sys\nfrom digen.config import RewardTerm\nfrom digen.rewards.base import RewardSet\n"
        "import digen.rewards.total\nRewardSet({'ocr': RewardTerm()}, 1.0).check()\n"
        "print([m for m in ('torch', 'onnxruntime', 'rapidocr', 'cv2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# --- JPEG ---


def noisy(strength: int) -> NDArray[np.uint8]:
    noise = np.random.Generator(np.random.PCG64(0)).integers(-strength, strength + 1, (64, 64, 3))
    return (128 + noise).astype(np.uint8)


def test_jpeg_rewards_are_the_kilobytes_of_a_quality_95_file() -> None:
    media = np.stack([noisy(0), noisy(20), noisy(90)])
    expected = []
    for image in media:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95)
        expected.append(len(file.getvalue()) / 1000)
    assert JpegIncompressibility()(media, PROMPTS[:3], METADATA[:3]) == expected
    assert expected[0] < 1 < expected[1] < expected[2] < 64 * 64 * 3 / 1000
    assert JpegCompressibility()(media, PROMPTS[:3], METADATA[:3]) == [-kb / 500 for kb in expected]


def test_the_size_of_a_video_is_the_mean_of_its_frames() -> None:
    frames = np.stack([noisy(0), noisy(90)])
    alone: Sequence[float] = JpegIncompressibility()(frames, PROMPTS[:2], METADATA[:2])
    assert JpegIncompressibility()(frames[None], PROMPTS[:1], METADATA[:1]) == [pytest.approx(sum(alone) / 2)]
