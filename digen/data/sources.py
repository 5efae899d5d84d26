"""Several sources of prompts in one run: how much of each a global step takes.

Invariant: every step takes the same number of prompts from each source (`shares.py`); ids run on from one source to the
next, so no two prompts of a run share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from digen.data.columns import files_of
from digen.data.prompts import load_prompts
from digen.data.sampler import StepPrompts
from digen.data.shares import counts_of
from digen.errors import DataError
from digen.types import Prompt


@dataclass(frozen=True, slots=True)
class Sources:
    """Where prompts come from: path -> share, of any scale, in the order in which ids are given."""

    shares: Mapping[Path, float]
    column: str

    def step_prompts(self, prompts_per_step: int, *, shuffle: bool, seed: int) -> StepPrompts:
        """Read all of them. Raises DataError when one cannot be read, or is too small for its part of a step."""
        counts = counts_of(self.shares, prompts_per_step)
        prompts: list[Prompt] = []
        sizes: list[tuple[int, int]] = []
        for path, count in zip(self.shares, counts, strict=True):
            found = load_prompts(path, self.column, first_id=len(prompts))
            if len(self.shares) > 1 and count > len(found):
                raise DataError(f"{path}: a step takes {count} prompts of it, but there are only {len(found)}")
            prompts += found
            sizes.append((len(found), count))
        return StepPrompts(prompts, prompts_per_step, shuffle=shuffle, seed=seed, sources=tuple(sizes))

    def fingerprint(self) -> str:
        """A hash of all that is read: of a single file's bytes, else of the bytes and shares of every one."""
        files = {path: files_of(path) for path in self.shares}
        if [*files.values()] == [tuple(self.shares)]:
            return sha256(next(iter(self.shares)).read_bytes()).hexdigest()
        digest = sha256()
        for path, share in self.shares.items():
            digest.update(f"{len(files[path])} files, share {share!r}\n".encode())
            for file in files[path]:
                digest.update(sha256(file.read_bytes()).digest())
        return digest.hexdigest()
