"""From one value per rank to one value of the whole group: what the driver does with the answer to a call.

Invariant: every row of a micro-batch is there exactly once, by its number and never by its place in a list, so that no
missing sample can shift another group's rewards. Paper section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from digen.errors import WorkerError
from digen.types import MicroBatch, Rollout, Scores, Shard, Version


def rollout(
    microbatch: MicroBatch, version: Version, rows: Sequence[int], shards: Sequence[Shard], worker: str
) -> Rollout:
    """What these ranks generated of these rows. Raises WorkerError when a row is missing or there twice."""
    _check_rows("generate", rows, worker, (row for shard in shards for row in shard.rows))
    return Rollout(microbatch, version, tuple(shards), worker)


def scores(microbatch: MicroBatch, parts: Sequence[Scores], worker: str) -> Scores:
    """The scores of all ranks in row order. Raises WorkerError when rows or reward names do not fit together."""
    _check_rows("score", range(microbatch.num_samples), worker, (row for part in parts for row in part.rows))
    names = {part.names for part in parts if part.rows}
    if len(names) != 1:
        raise WorkerError(worker, 0, "score", f"ranks name different rewards: {sorted(names)}")
    values = {row: value for part in parts for row, value in zip(part.rows, part.values, strict=True)}
    rows = tuple(range(microbatch.num_samples))
    return Scores(names.pop(), rows, tuple(values[row] for row in rows))


def failed(scores: Scores) -> list[tuple[int, str]]:
    """(row, reward name) of every value that is not a finite number."""
    return [
        (row, name)
        for row, values in zip(scores.rows, scores.values, strict=True)
        for name, value in zip(scores.names, values, strict=True)
        if not math.isfinite(value)
    ]


def mend(old: Scores, new: Scores) -> Scores:
    """`old` with its failed values replaced by those of a second attempt."""
    values = tuple(
        tuple(a if math.isfinite(a) else b for a, b in zip(first, second, strict=True))
        for first, second in zip(old.values, new.values, strict=True)
    )
    return Scores(old.names, old.rows, values)


def _check_rows(method: str, asked: Sequence[int], worker: str, rows: Iterable[int]) -> None:
    got = sorted(rows)
    if got != list(asked):
        expected = f"each of {asked[0]}..{asked[-1]} once"
        raise WorkerError(worker, 0, method, f"the ranks together returned rows {got}, expected {expected}")
