"""Where trained weights are: in a checkpoint of a run, or in a folder that `digen export` made.

Invariant: what is found is whole (its last-written file is there) and labelled: live weights, or their average.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from pydantic import ValidationError

from digen import presets
from digen.config import RunConfig
from digen.errors import ConfigError, one_of
from digen.observe.files import ABOUT, RunFolder
from digen.types import Version

Kind = Literal["live", "ema"]
"""live: what the last step left; ema: the average over steps (`trainer.ema`)."""
WEIGHTS: Final = "weights.safetensors"
EMA: Final = f"ema/{WEIGHTS}"
"""In a folder of its own: torch.distributed.checkpoint takes all files of a folder for parts of one set of tensors."""
FILES: Final[Mapping[Kind, str]] = {"live": WEIGHTS, "ema": EMA}


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained weights, and the run that made them."""

    folder: Path
    """The run's folder, or the exported one."""
    config: RunConfig[Any]
    path: Path
    """A checkpoint's file, or the exported folder: what a worker's `load_weights` takes."""
    weights: Kind
    version: Version

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder, or the exported one."""
        return self.path if self.path.is_dir() else self.path.parents[FILES[self.weights].count("/")]

    @property
    def label(self) -> str:
        """In a sentence for a reader."""
        return f"{'EMA' if self.weights == 'ema' else 'live'} weights of {self.checkpoint}"


def kind_of(text: str) -> Kind:
    """Raises ConfigError for anything but `live` and `ema`."""
    if text not in get_args(Kind):
        raise ConfigError(one_of("--weights", text, get_args(Kind)))
    return cast("Kind", text)


def find(folder: Path, weights: Kind | None = None, version: Version | None = None) -> Trained:
    """Weights of a run or of an export. None: the average where there is one; the newest checkpoint.

    Raises ConfigError when `folder` is neither, or has not what is asked for.
    """
    if (folder / ABOUT).is_file():
        return _exported(folder, weights, version)
    run = RunFolder.open(folder)
    config = presets.load(run.config)
    checkpoint = run.newest_checkpoint() if version is None else _checkpoint(run, version)
    if weights == "ema" and not (checkpoint / EMA).is_file():
        raise ConfigError(f"{checkpoint} has no {EMA}: the run had no trainer.ema; allowed: --weights live")
    kind: Kind = weights or ("ema" if (checkpoint / EMA).is_file() else "live")
    number = int(checkpoint.name.removeprefix("step_"))
    return Trained(folder, config, checkpoint / FILES[kind], kind, number)


def _checkpoint(run: RunFolder, version: Version) -> Path:
    if not (run.checkpoint(version) / WEIGHTS).is_file():
        found = (re.fullmatch(r"step_0*(\d+)", path.parent.name) for path in run.checkpoints.glob(f"*/{WEIGHTS}"))
        raise ConfigError(one_of("--checkpoint", version, (match[1] for match in found if match)))
    return run.checkpoint(version)


def _exported(folder: Path, weights: Kind | None, version: Version | None) -> Trained:
    about = _read(folder / ABOUT)
    kind, number = kind_of(about["weights"]), int(about["version"])
    for option, asked, got in (("weights", weights, kind), ("checkpoint", version, number)):
        if asked not in (None, got):
            raise ConfigError(f"--{option}={asked}: {folder} was exported with --{option}={got} and has no other")
    return Trained(folder, about["config"], folder, kind, number)


def _read(file: Path) -> dict[str, Any]:
    """What an export says of itself, `config` as a RunConfig. The files that it names are not looked for."""
    try:
        about: Mapping[str, Any] = json.loads(file.read_text("utf-8"))
        return {**about, "config": presets.rebuild(about["config"])}
    except (ValidationError, ValueError, KeyError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"{file} cannot be read by this version of digen: {first}") from error
