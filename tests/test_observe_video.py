"""Videos of samples as files: what is written where, and that no format is taken for another without a word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from digen import plugins
from digen.errors import ConfigError
from digen.observe import video
from digen.observe.video import beside, draw, together, video_format, video_notes, write_video

av: Any = pytest.importorskip("av")


def clips(count: int, frames: int = 5, height: int = 32, width: int = 48) -> Any:
    """Each frame of each clip of one grey of its own."""
    grey = (30 * np.arange(count)[:, None] + 20 * np.arange(frames)).astype(np.uint8)
    return np.broadcast_to(grey[:, :, None, None, None], (count, frames, height, width, 3)).copy()


def frames_of(path: Path) -> list[Any]:
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


@pytest.fixture
def without_av(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "find_spec", lambda _: None)


@pytest.mark.parametrize("ending", ["mp4", "gif"])
@pytest.mark.parametrize("size", [(32, 48), (33, 47)])
def test_a_video_is_written_frame_by_frame_at_the_models_rate(
    ending: str, size: tuple[int, int], tmp_path: Path
) -> None:
    clip = clips(1, 6, *size)[0]
    path = tmp_path / f"clip.{ending}"
    write_video(clip, path, 16.0)
    found = frames_of(path)
    assert len(found) == 6
    for frame, expected in zip(found, clip, strict=True):
        assert abs(frame[: size[0], : size[1]].astype(int) - expected).max() <= 6
    with av.open(str(path)) as file:
        assert float(file.streams.video[0].average_rate) == pytest.approx(16, rel=0.06)  # a GIF counts hundredths
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_clips_together_keep_their_places_and_their_time() -> None:
    sheet = together(clips(5, 4), columns=3)
    height, width = 32 * 3, 48 * 3  # enlarged
    assert sheet.shape == (4, 2 * height + video.GAP, 3 * width + 2 * video.GAP, 3)
    for k in range(5):
        top, left = k // 3 * (height + video.GAP), k % 3 * (width + video.GAP)
        place = sheet[:, top : top + height, left : left + width]
        assert [set(frame.flatten().tolist()) for frame in place] == [{30 * k + 20 * f} for f in range(4)]
    assert set(sheet[:, height + video.GAP :, -width:].flatten().tolist()) == {255}  # nobody's place


def test_many_and_large_clips_do_not_make_a_large_file() -> None:
    sheet = together(clips(40, 2, 480, 832))
    assert sheet.shape[0] == 2
    assert max(sheet.shape[1:3]) <= 4 * (video.EDGE + video.GAP)


def test_a_grid_of_videos_is_a_sheet_of_frames_and_a_moving_one_and_of_images_the_sheet_alone(tmp_path: Path) -> None:
    draw(clips(2), ["a", "b"], tmp_path / "videos.png", 2, "mp4", 8.0)
    draw(clips(2)[:, 0], ["a", "b"], tmp_path / "images.png", 2, "mp4", 8.0)
    draw(clips(2)[:, :1], ["a", "b"], tmp_path / "stills.png", 2, "mp4", 8.0)
    assert {p.name for p in tmp_path.iterdir()} == {"videos.png", "videos.mp4", "images.png", "stills.png"}
    assert len(frames_of(tmp_path / "videos.mp4")) == 5


def test_pairs_stand_side_by_side() -> None:
    left, right = clips(2), 255 - clips(2)
    pairs = beside(left, right)
    assert pairs.shape == (2, 5, 32, 96, 3)
    assert np.array_equal(pairs[..., :48, :], left)
    assert np.array_equal(pairs[..., 48:, :], right)


def test_what_is_asked_for_by_name_is_had_or_refused_and_auto_says_what_it_took(
    make_config: Callable[..., Any], without_av: None
) -> None:
    with pytest.raises(ConfigError, match=r"observe.video=mp4 needs PyAV \(pip install 'digen\[video\]'\)"):
        video_format(make_config("observe.video=mp4"))
    moving = ("model.num_frames=5",)
    assert video_format(make_config("observe.video=auto")) == "gif"
    assert video_notes(make_config(*moving)) == [
        "videos of samples are written as GIF, for MP4 pip install 'digen[video]'"
    ]
    assert video_notes(make_config(*moving, "observe.video=gif")) == []
    assert video_notes(make_config()) == []  # images


def test_with_pyav_auto_is_mp4_without_a_word(make_config: Callable[..., Any]) -> None:
    assert video_format(make_config()) == "mp4"
    assert video_format(make_config("observe.video=gif")) == "gif"
    assert video_notes(make_config("model.num_frames=5")) == []


def test_a_run_that_cannot_write_what_was_asked_for_ends_before_it_begins(
    make_config: Callable[..., Any], without_av: None, tmp_path: Path
) -> None:
    from rich.console import Console

    from digen.run import run

    with pytest.raises(ConfigError, match=r"observe\.video=mp4"):
        run(make_config("observe.video=mp4", f"run_dir={tmp_path / 'run'}"), console=Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_every_family_of_videos_says_how_fast_they_are_shown() -> None:
    rates = {name: plugins.attribute("models", name, "frame_rate") for name in ("wan2.1-14b", "tiny-hunyuan-video")}
    assert rates == {"wan2.1-14b": 16.0, "tiny-hunyuan-video": 24.0}
    assert plugins.attribute("models", "glyph", "frame_rate") == 8.0


@pytest.mark.slow
def test_samples_and_evaluations_of_videos_are_videos_and_sheets(tmp_path: Path, monkeypatch: Any, warm: Any) -> None:
    """The whole way, on a miniature; the driver's process reads no tensor of the run, and sends none."""
    import pickle

    from rich.console import Console

    from digen.engines.store import SharedStore
    from digen.evaluate import evaluate, sample
    from digen.presets import resolve
    from digen.run import run

    replies: list[Any] = []
    group: Any = plugins.load(f"{Path(__file__).parent}/warm.py:WarmGroup")
    plain_call, plain_get = group.call, SharedStore.get

    async def call(self: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
        found = await plain_call(self, method, *args, **kwargs)
        replies.append((method, len(pickle.dumps((args, found)))))
        return found

    def refuse(self: SharedStore, ref: Any) -> Any:
        raise AssertionError(f"the driver read {ref}")

    monkeypatch.setattr(group, "call", call)
    monkeypatch.setattr(SharedStore, "get", refuse)
    folder = tmp_path / "run"
    settings = (
        f"engine.name={Path(__file__).parent}/warm.py:WarmEngine", "steps=1", "observe.grid_every=1",
        "observe.tensorboard=false", f"run_dir={folder}", "model.num_frames=9", "model.height=64", "model.width=64",
    )  # fmt: skip
    run(resolve("flowgrpo", "tiny-wan", None, settings, {}), console=Console(quiet=True))
    largest = {method: max(size for name, size in replies if name == method) for method, _ in replies}
    for texts in ("num_cut", "encode"):  # the prompts of a run, once
        largest.pop(texts)
    assert {"generate", "score", "draw", "accumulate"} <= largest.keys()
    assert max(largest.values()) < 4096, largest  # a sample alone has 9 x 64 x 64 x 3 bytes
    assert {p.name for p in (folder / "samples").iterdir()} == {"step_000000.png", "step_000000.mp4"}

    monkeypatch.setattr(SharedStore, "get", plain_get)
    held = tmp_path / "held.txt"
    held.write_text("a cat\na dog")
    paths = sample(str(folder), ["a cat"], tmp_path / "out")
    assert [p.name for p in paths] == ["000.mp4", "frames.png"]
    assert len(frames_of(paths[0])) == 9
    text = (folder / "config.yaml").read_text().replace("heldout: null", f"heldout: {held}")
    (folder / "config.yaml").write_text(text)
    report = evaluate(folder, console=Console(quiet=True))
    assert report.video == folder / "eval.mp4"
    assert len(frames_of(report.video)) == 9
    with Image.open(report.picture) as picture:
        assert picture.width > 200
