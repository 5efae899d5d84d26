"""The state of a run as a person sees it, and the live view as a pure function of that state.

Invariant: `Progress` is frozen and its size does not grow with the number of steps (rule R4); `draw` reads any row,
whatever keys it lacks, and fits 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from digen.observe.base import StepRow
from digen.observe.show import bar, cut, duration, number, share, sparkline
from digen.types import Span

KEPT_REWARDS = 40
KEPT_TIMES = 10
KEPT_NOTES = 3
SHOWN_GROUPS = 6
SHOWN_REWARDS = 6


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a view says above the numbers. `num_steps` counts the global steps from 0 to the end of the run."""

    algorithm: str
    model: str
    seed: int
    run_dir: Path
    num_steps: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything a view shows: the last row and a bounded past."""

    info: RunInfo
    row: StepRow = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    first_reward: float = math.nan
    best_reward: float = math.nan
    step_times: tuple[float, ...] = ()
    ended: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """(step, kind) -> pieces of work that ended, for steps that are not done."""
    notes: tuple[str, ...] = ()
    num_notes: int = 0

    @property
    def done(self) -> int:
        """Global steps that ended (rows count from 0)."""
        return int(self.row["step"]) + 1 if "step" in self.row else 0

    @property
    def eta_s(self) -> float:
        """Seconds to the end at the pace of the last steps; NaN when there is none."""
        if not self.step_times:
            return math.nan
        return sum(self.step_times) / len(self.step_times) * max(self.info.num_steps - self.done, 0)

    def after_span(self, span: Span) -> Progress:
        key = (span.step, span.kind)
        return replace(self, ended={**self.ended, key: self.ended.get(key, 0) + 1})

    def after_step(self, row: StepRow) -> Progress:
        reward, time_s = row.get("reward/mean", math.nan), row.get("step_time_s", math.nan)
        first = self.first_reward if math.isfinite(self.first_reward) else reward
        best = max((value for value in (self.best_reward, reward) if math.isfinite(value)), default=math.nan)
        times = (*self.step_times, time_s) if math.isfinite(time_s) else self.step_times
        return replace(
            self,
            row=dict(row),
            rewards=(*self.rewards, reward)[-KEPT_REWARDS:],
            first_reward=first,
            best_reward=best,
            step_times=times[-KEPT_TIMES:],
            ended={key: count for key, count in self.ended.items() if key[0] > row["step"]},
        )

    def after_note(self, message: str) -> Progress:
        return replace(self, notes=(*self.notes, message)[-KEPT_NOTES:], num_notes=self.num_notes + 1)


def reward_terms(row: StepRow) -> Iterator[tuple[str, float, float | None]]:
    """(name, mean, std) of every single reward of a row."""
    for key, value in row.items():
        parts = key.split("/")
        if len(parts) > 2 and parts[0] == "reward" and parts[-1] == "mean":
            name = "/".join(parts[1:-1])
            yield name, value, row.get(f"reward/{name}/std")


def busy_groups(row: StepRow) -> dict[str, float]:
    """Worker group -> share of the step in which it worked."""
    return {key.removeprefix("busy/"): value for key, value in row.items() if key.startswith("busy/")}


def kl_of(row: StepRow) -> tuple[str, float | None]:
    """The divergence that the run has: from the base model if it is measured, else from the rollout's policy."""
    if "kl/mean" in row:
        return "KL", row["kl/mean"]
    return "approx KL", row.get("approx_kl/mean")


def draw(progress: Progress, elapsed_s: float) -> Panel:
    """The live view. `elapsed_s`: seconds since the start."""
    info = progress.info
    parts: list[RenderableType] = [
        _steps(progress, elapsed_s),
        Text(),
        *_rewards(progress),
        Text(),
        _numbers(progress.row),
    ]
    groups = busy_groups(progress.row)
    if groups:
        parts += [Text(), _busy(groups)]
    if progress.notes:
        parts += [Text(), *_notes(progress)]
    title = Text.assemble("digen  ", (info.algorithm, "bold"), f"  {info.model}  seed {info.seed}")
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=Text(str(info.run_dir)), subtitle_align="left"
    )


def _steps(progress: Progress, elapsed_s: float) -> Group:
    line = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None):
        line.add_column(ratio=ratio, no_wrap=True)
    total = progress.info.num_steps
    line.add_row(
        Text(f"step {progress.done}/{total}", style="bold"),
        ProgressBar(total=max(total, 1), completed=progress.done),
        Text(f"{duration(elapsed_s)}  ETA {duration(progress.eta_s)}"),
    )
    return Group(line, Text(_now(progress), style="dim", overflow="ellipsis", no_wrap=True))


def _now(progress: Progress) -> str:
    """What ended in the step that is under way: the sign of life between two rows."""
    if progress.done >= progress.info.num_steps:
        return "done"
    ended = progress.ended.items()
    work = [f"{count} {kind}" for (step, kind), count in ended if step == progress.done and kind != "load"]
    if not progress.done and not progress.ended:
        return "loading models"
    return f"in step {progress.done + 1}: {', '.join(work) or 'nothing'} finished"


def _rewards(progress: Progress) -> Iterator[Text]:
    reward, terms = progress.row.get("reward/mean"), list(reward_terms(progress.row))
    width = max(len(cut(name, 24)) for name in ["reward", *(name for name, *_ in terms[:SHOWN_REWARDS])])
    line = Text.assemble((f"{'reward':<{width}}  ", "dim"), (number(reward), "bold green"), "  ")
    line.append(sparkline(progress.rewards, KEPT_REWARDS), style="green")
    if progress.done > 1 and reward is not None:
        line.append(f"  {reward - progress.first_reward:+.4f}  best {number(progress.best_reward)}")
    yield _one_line(line)
    for name, mean, std in terms[:SHOWN_REWARDS]:
        spread = "" if std is None else f" ± {number(std)}"
        yield _one_line(Text.assemble((f"{cut(name, 24):<{width}}  ", "dim"), f"{number(mean)}{spread}"))
    if len(terms) > SHOWN_REWARDS:
        yield Text(f"and {len(terms) - SHOWN_REWARDS} more in metrics.jsonl", style="dim")


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _numbers(row: StepRow) -> Table:
    """Three columns of label and value: what says whether the run is sound."""
    kl_name, kl = kl_of(row)
    samples, time_s = row.get("samples"), row.get("step_time_s")
    cells = [
        ("max |ratio-1|", number(row.get("ratio/max_error"))),
        ("clip share", share(row.get("clip_fraction/mean"))),
        (kl_name, number(kl)),
        ("grad norm", number(row.get("grad_norm"))),
        ("learning rate", number(row.get("learning_rate"))),
        ("log-prob gap", number(row.get("log_prob_gap/max"))),
        ("stale samples", share(row.get("stale_share"))),
        ("groups dropped", number(row.get("groups_dropped"))),
        ("samples/s", number(samples / time_s if samples is not None and time_s else None)),
    ]
    table = Table.grid(padding=(0, 2))
    for start in range(0, len(cells), 3):
        table.add_row(
            *(
                Text(part, style)
                for cell in cells[start : start + 3]
                for part, style in zip(cell, ("dim", ""), strict=True)
            )
        )
    return table


def _busy(groups: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    shown = dict(list(groups.items())[:SHOWN_GROUPS])
    rest = [value for name, value in groups.items() if name not in shown]
    if rest:
        shown[f"mean of {len(rest)} more"] = sum(rest) / len(rest)
    for index, (name, value) in enumerate(shown.items()):
        table.add_row(
            Text("busy" if index == 0 else "", style="dim"),
            cut(name, 24),
            Text(bar(value, 24), style="cyan"),
            share(value),
        )
    return table


def _notes(progress: Progress) -> Iterator[Text]:
    yield Text(f"notes ({progress.num_notes}, all in logs/driver.log)", style="dim")
    for note in progress.notes:
        yield _one_line(Text("  " + " ".join(note.split()), style="yellow"))
