"""Comparing a trained model with its base, and drawing single images: `digen eval` and `digen sample`.

Invariant: base and trained model get the same prompts, the same initial noise and no step noise, so that what differs
between the two is the training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
from PIL import Image
from rich.console import Console
from rich.table import Table

from digen import plugins, presets
from digen.config import RunConfig
from digen.data.prompts import load_prompts
from digen.engines.base import WorkerGroup
from digen.engines.together import all_at_once
from digen.errors import ConfigError
from digen.observe.files import write_atomic
from digen.observe.grid import sample_grid, side_by_side
from digen.observe.video import beside, together, video_format, video_notes, write_video
from digen.preflight import check_weights
from digen.rewards.judge_server import serving
from digen.rewards.total import total
from digen.run import check_rewards, load, make_engine, spec
from digen.trained import Kind, Trained, find
from digen.types import Prompt, Ref, Scores

SEED = 0
"""Of the evaluation's initial noise: the same for every run, so that runs can be compared."""
SHOWN = 12
"""Prompts in the picture."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Mean rewards over the held-out prompts; `rewards` has (base, trained) of every single reward."""

    run_dir: Path
    checkpoint: Path
    num_prompts: int
    base_reward: float
    trained_reward: float
    rewards: Mapping[str, tuple[float, float]]
    picture: Path
    weights: Kind = "live"
    """Which weights of the checkpoint `trained` stands for."""
    video: Path | None = None
    """The picture in motion, for models of video."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "run_dir": str(self.run_dir),
            "checkpoint": str(self.checkpoint),
            "weights": self.weights,
            "num_prompts": self.num_prompts,
            "base_reward": self.base_reward,
            "trained_reward": self.trained_reward,
            "gain": self.trained_reward - self.base_reward,
            "rewards": {name: {"base": base, "trained": trained} for name, (base, trained) in self.rewards.items()},
            "picture": str(self.picture),
            **({"video": str(self.video)} if self.video else {}),
        }


def evaluate(run_dir: Path, weights: Kind | None = None, *, console: Console) -> EvalReport:
    """Score base and trained model on the held-out prompts; writes `eval.json` and `eval.png` into the folder.

    The folder is that of a run or of an export; `weights` None: the average (`trainer.ema`) where there is one. Raises
    ConfigError when there are no such weights, and what workers raise.
    """
    trained = find(run_dir, weights)
    config = with_eval_rewards(trained.config)
    trained = replace(trained, config=config)
    check_rewards(config)
    check_weights(config.model)
    video_format(config)  # to be refused now, if at all
    prompts = load_prompts(presets.prompt_file(config, "heldout"), config.data.column)
    report = anyio.run(partial(_with_servers, trained, prompts, console))
    write_atomic(run_dir / "eval.json", json.dumps(report.as_dict(), indent=2) + "\n")
    _print(report, trained.label, console)
    return report


def with_eval_rewards(config: RunConfig[Any]) -> RunConfig[Any]:
    """The rewards of `eval_reward` beside those that were trained on, without a share in their sum."""
    watched = {
        name: term.model_copy(update={"weight": 0.0, "required": False}) for name, term in config.eval_reward.items()
    }
    here = config.scoring.model_copy(update={"devices": None})
    return config.model_copy(update={"reward": {**config.reward, **watched}, "eval_reward": {}, "scoring": here})


async def _with_servers(found: Trained, prompts: Sequence[Prompt], console: Console) -> EvalReport:
    """The evaluation, with the servers that its rewards want."""
    logs = found.folder / "logs" if found.path.is_file() else None
    note = partial(console.print, highlight=False, soft_wrap=True)
    async with serving(found.config.reward, logs, note) as rewards:
        config = found.config.model_copy(update={"reward": rewards})
        return await _evaluate(replace(found, config=config), prompts)


async def _evaluate(found: Trained, prompts: Sequence[Prompt]) -> EvalReport:
    config = found.config
    engine = make_engine(config)
    results: dict[str, tuple[Scores, Ref]] = {}

    async def one(group: WorkerGroup) -> None:
        if group.name == "trained":
            await group.call("load_weights", found.path)
        results[group.name] = (await group.call("evaluate", tuple(prompts), SEED, True))[0]

    target = plugins.target("generators", config.generator.backend)
    placement = config.generator.model_copy(update={"ranks": 1})
    logs = found.folder / "logs" if found.path.is_file() else None  # an export is no place for them
    specs = [spec(config, name, target, placement, logs) for name in ("base", "trained")]
    async with engine.open(specs) as groups:
        await load(groups, prompts=[prompt.text for prompt in prompts])
        await all_at_once(partial(one, group) for group in groups.values())
        media = {name: engine.store.get(ref)["media"][:SHOWN].numpy() for name, (_, ref) in results.items()}
        picture = found.folder / "eval.png"
        captions = _captions(config, prompts, results)
        side_by_side(media["base"], media["trained"], captions[:SHOWN], picture)
        video = _in_motion(config, beside(media["base"], media["trained"]), picture)
    base, trained = results["base"][0], results["trained"][0]
    single = {
        name: (_mean([row[j] for row in base.values]), _mean([row[j] for row in trained.values]))
        for j, name in enumerate(base.names)
    }
    sums = [_mean(total(scores, terms=config.reward)) for scores in (base, trained)]
    where = (found.folder, found.checkpoint)
    return EvalReport(*where, len(prompts), sums[0], sums[1], single, picture, found.weights, video)


def _captions(
    config: RunConfig[Any], prompts: Sequence[Prompt], results: Mapping[str, tuple[Scores, Ref]]
) -> list[str]:
    base, trained = (total(results[name][0], terms=config.reward) for name in ("base", "trained"))
    rows = zip(prompts, base, trained, strict=True)
    return [f"{prompt.text}\nreward {a:.2f} / {b:.2f}" for prompt, a, b in rows]


def _mean(values: Sequence[float]) -> float:
    """Mean of those that did not fail; NaN when all did."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def _print(report: EvalReport, label: str, console: Console) -> None:
    console.print(f"{report.num_prompts} held-out prompts, one sample each, no step noise")
    table = Table()
    for title in ("reward", "base", "trained", "gain"):
        table.add_column(title, justify="left" if title == "reward" else "right")
    for name, (base, trained) in report.rewards.items():
        table.add_row(name, f"{base:.3f}", f"{trained:.3f}", f"{trained - base:+.3f}")
    if len(report.rewards) > 1:
        base, trained = report.base_reward, report.trained_reward
        table.add_row("weighted sum", f"{base:.3f}", f"{trained:.3f}", f"{trained - base:+.3f}")
    console.print(table)
    console.print(f"trained: {label}", highlight=False, soft_wrap=True)
    console.print(f"side by side: {report.picture}", highlight=False, soft_wrap=True)


def sample(
    run_or_model: str,
    prompts: Sequence[str],
    out: Path,
    seed: int = 0,
    num_steps: int | None = None,
    weights: Kind | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Draw one sample per prompt, without step noise: with a run's trained model, an exported one, or a model as it is.

    Writes `out/000.png`, ... and returns the paths. Videos are `000.mp4` or `000.gif`, ... (`observe.video`), and a
    sheet of their frames comes last, `frames.png`. `weights` as for `evaluate`. Raises ConfigError for what is none of
    the three.
    """
    trained = find(Path(run_or_model), weights) if Path(run_or_model).is_dir() else None
    if trained is None and weights is not None:
        raise ConfigError(f"--weights={weights}: {run_or_model} is no folder of a run or an export")
    if trained and console:
        console.print(trained.label, highlight=False, soft_wrap=True)
    config = trained.config if trained else presets.for_model(run_or_model)
    if num_steps is not None:
        sampling = config.sampling.model_copy(update={"eval_num_steps": num_steps})
        config = config.model_copy(update={"sampling": sampling})
    check_weights(config.model)
    for note in video_notes(config):
        (console or Console(quiet=True)).print(note, highlight=False, soft_wrap=True)
    media = anyio.run(partial(_sample, config, trained.path if trained else None, tuple(prompts), seed))
    out.mkdir(parents=True, exist_ok=True)
    kind = "png" if media.ndim == 4 else video_format(config)
    paths = [out / f"{k:03d}.{kind}" for k in range(len(media))]
    if media.ndim == 4:
        for pixels, path in zip(media, paths, strict=True):
            Image.fromarray(pixels).save(path)
        return paths
    for video, path in zip(media, paths, strict=True):
        write_video(video, path, _frame_rate(config))
    sample_grid(media, prompts, out / "frames.png")
    return [*paths, out / "frames.png"]


def _in_motion(config: RunConfig[Any], videos: Any, picture: Path) -> Path | None:
    """Videos (K, F, H, W, 3) as one beside a picture of them; nothing of images."""
    if videos.ndim == 4:
        return None
    path = picture.with_suffix(f".{video_format(config)}")
    write_video(together(videos), path, _frame_rate(config))
    return path


def _frame_rate(config: RunConfig[Any]) -> float:
    """Frames a second, as the model says."""
    rate = plugins.attribute("models", config.model.name, "frame_rate")
    return float(rate) if isinstance(rate, int | float) else 8.0


async def _sample(config: RunConfig[Any], trained: Path | None, prompts: tuple[str, ...], seed: int) -> Any:
    """Media (K, H, W, 3) or (K, F, H, W, 3) of these prompts."""
    engine = make_engine(config)
    placement = config.generator.model_copy(update={"ranks": 1})
    worker = spec(config, "generator", plugins.target("generators", config.generator.backend), placement, None)
    rows = tuple(Prompt(k, text) for k, text in enumerate(prompts))
    async with engine.open([replace(worker, payload={**worker.payload, "reward": {}})]) as groups:
        await load(groups, prompts=prompts)
        group = groups["generator"]
        if trained is not None:
            await group.call("load_weights", trained)
        _, ref = (await group.call("evaluate", rows, seed, False))[0]
        return engine.store.get(ref)["media"].numpy().copy()
