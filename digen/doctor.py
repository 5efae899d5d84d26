"""`digen doctor`: is a run healthy, or would one be? Reads what a run wrote, or makes two tiny steps and reads those.

Invariant: a run's folder is only read; a trial happens in a folder of its own, which is gone afterwards, with the
settings that are asked for but for their size.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from digen import presets
from digen.checks import Facts, Finding, Level, examine
from digen.config import RunConfig, doubts
from digen.errors import ConfigError
from digen.observe.files import RunFolder, read_rows, read_spans
from digen.trained import WEIGHTS

LOOKS: Final[Mapping[Level, tuple[str, str]]] = {
    "ok": ("ok", "green"), "note": ("note", "cyan"), "unknown": ("?", "yellow"), "warn": ("warn", "yellow"),
    "wrong": ("WRONG", "bold red"),
}  # fmt: skip
BROKEN: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)
"""What reading a file that is not what it should be may raise."""
TRIAL_PROMPTS: Final = 2
"""Prompts of a step of the trial; all the samples of a prompt are made."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the checks found about `target`: a run's folder, or what was tried."""

    target: str
    num_steps: int
    findings: Sequence[Finding]

    @property
    def wrong(self) -> int:
        """Findings that mean that the run does not train."""
        return sum(finding.level == "wrong" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values (docs/doctor.md)."""
        findings = [asdict(finding) for finding in self.findings]
        return {"target": self.target, "num_steps": self.num_steps, "wrong": self.wrong, "findings": findings}


def diagnose_run(path: Path) -> Report:
    """Look at what a run, finished or not, has written. Raises ConfigError for a folder that is none."""
    facts = facts_of(path, presets.load(RunFolder.open(path).config))
    return Report(str(path), len(facts.rows), [*examine(facts), *_doubts(facts.config)])


def diagnose_settings(
    algorithm: str, model: str | None, file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> Report:
    """Make the first steps of the run that these settings describe, small and on the side, and look at them.

    As many steps as one rollout is updated on, and one rollout more, so that new weights are seen to arrive. Raises
    what a run raises.
    """
    from digen.run import run

    asked = presets.resolve(algorithm, model, file, overrides, environ)
    with TemporaryDirectory(prefix="digen-doctor-") as place:
        path = Path(place) / "run"
        small = presets.resolve(algorithm, model, file, [*overrides, *_small(asked, path)], environ)
        run(small, console=Console(quiet=True))
        facts = facts_of(path, asked)
    target = f"{asked.algorithm.name} on {asked.model.name}, tried with {small.data.prompts_per_step} prompts a step"
    return Report(target, len(facts.rows), [*examine(facts), *_doubts(asked)])


def facts_of(path: Path, config: RunConfig[Any]) -> Facts:
    """What the folder of a run holds, for the checks."""
    folder = RunFolder.open(path)
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    spans = read_spans(folder.events) if folder.events.is_file() else []
    return Facts(config, rows, spans, num_weights(folder))


def num_weights(folder: RunFolder) -> int | None:
    """How many numbers a run trains, read from the head of its newest checkpoint's file; None without a sound one."""
    try:
        file = folder.newest_checkpoint() / WEIGHTS
        with file.open("rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            if length > file.stat().st_size:
                return None
            head: Mapping[str, Any] = json.loads(data.read(length))
        return sum(int(prod(entry["shape"])) for name, entry in head.items() if name != "__metadata__")
    except (ConfigError, *BROKEN):
        return None


def _small(asked: RunConfig[Any], path: Path) -> list[str]:
    """Overrides that make a run of these settings a trial: small, on policy, and watched."""
    sources = len(asked.data.prompts) if isinstance(asked.data.prompts, Mapping) else 1
    watched = {
        **{name: term.model_dump() for name, term in asked.reward.items()},
        "spread": {"weight": 0, "required": False},
    }
    settings: dict[str, Any] = {
        "steps": 2 * asked.trainer.updates_per_rollout,
        "epochs": None,
        "data.prompts_per_step": min(max(TRIAL_PROMPTS, sources), asked.data.prompts_per_step),
        "schedule.prompts_per_microbatch": 1,
        "schedule.staleness": 0,
        "checkpoint.every": 0,
        "checkpoint.best": None,
        "observe.grid_every": 0,
        "observe.tensorboard": False,
        "reward": watched,
        "run_dir": str(path),
    }
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _doubts(config: RunConfig[Any]) -> list[Finding]:
    return [Finding("settings", "note", text) for text in doubts(config)]


def show(report: Report, console: Console) -> None:
    """The findings as a table: what was looked at, how it is, what was seen, what to do."""
    steps = "1 step" if report.num_steps == 1 else f"{report.num_steps} steps"
    console.print(f"{report.target}: {steps}", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("check", "", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in report.findings:
        word, style = LOOKS[finding.level]
        table.add_row(finding.check, Text(word, style), Text(finding.found), Text(finding.advice))
    console.print(table)
    console.print(_verdict(report), highlight=False)


def _verdict(report: Report) -> str:
    warnings = sum(finding.level == "warn" for finding in report.findings)
    if report.wrong:
        return f"{report.wrong} wrong, {warnings} to improve"
    return f"nothing wrong, {warnings} to improve" if warnings else "nothing wrong"
