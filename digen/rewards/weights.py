"""Where the weights of a reward are: a folder, or the hub's cache; never downloaded by a run, never unpickled.

Invariant: what is missing is named, with the command that gets it, before a worker starts and without importing torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from digen.errors import RewardError
from digen.preflight import cached

PREPROCESSOR = ("preprocessor_config.json",)
TOKENIZER = ("tokenizer*",)
MODEL = ("config.json", "*.safetensors")


@dataclass(frozen=True, slots=True)
class Repository:
    """A folder in transformers' format, or the id of one on the hub, and the files that are read of it (patterns)."""

    path: str
    option: str
    """The reward's option that it is the value of."""
    files: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it is here. Raises RewardError when it is not."""
        if found := self._find():
            return found
        raise RewardError(f"{self.path} is neither a folder nor in the hub's cache")

    def missing(self, reward: str) -> str | None:
        """What is not here and how to get it; None: all is here."""
        found = self._find()
        absent = [pattern for pattern in self.files if found is None or not _whole(found, pattern)]
        if not absent:
            return None
        if found is not None and Path(self.path).expanduser().is_dir():
            return f"{reward}: {self.option}={self.path} is not complete; missing: {', '.join(absent)}"
        from huggingface_hub.constants import HF_HUB_CACHE

        patterns = " ".join(f"--include '{pattern}'" for pattern in self.files)
        return "\n".join(
            [
                f"the weights of {reward} are not on this machine",
                f"  looked for  {self.path} in {HF_HUB_CACHE} (HF_HOME or HF_HUB_CACHE moves it)",
                f"  missing     {', '.join(absent)}",
                f"  get them    hf download {self.path} {patterns}",
                f"  or          set the option {self.option} to a folder that has them",
            ]
        )

    def _find(self) -> Path | None:
        local = Path(self.path).expanduser()
        return local if local.is_dir() else cached(self.path)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file that is made of a published one by hand: `commands` say how."""

    path: str
    option: str
    commands: tuple[str, ...]

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()

    def missing(self, reward: str) -> str | None:
        """That it is not here and how to make it; None: it is here."""
        if self.file.is_file():
            return None
        made = [f"  get it      {command}" for command in self.commands]
        here = f"  looked for  {self.file.absolute()} (option {self.option})"
        return "\n".join([f"the weights of {reward} are not on this machine", here, *made])


def all_missing(reward: str, sources: Sequence[Repository | WeightFile]) -> str | None:
    """What of all these is not here; None: all is."""
    found = [sentence for source in sources if (sentence := source.missing(reward))]
    return "\n".join(found) or None


def to_safetensors(source: str, made: str) -> str:
    """The command that turns a file of torch into one that cannot run code."""
    return (
        f'python -c "import torch, safetensors.torch as s; s.save_file({{k: v.contiguous().clone() for k, v in '
        f"torch.load('{source}', map_location='cpu', weights_only=True).items()}}, '{made}')\""
    )


def _whole(folder: Path, pattern: str) -> bool:
    """Whether a file is there; of weights in several files, all that their index lists."""
    if pattern != "*.safetensors":
        return any(folder.glob(pattern))
    listed = set(_listed(folder))
    return all((folder / name).is_file() for name in listed) and (bool(listed) or any(folder.glob(pattern)))


def _listed(folder: Path) -> Iterator[str]:
    for index in folder.glob("*.safetensors.index.json"):
        yield from json.loads(index.read_text("utf-8"))["weight_map"].values()
