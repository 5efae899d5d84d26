"""Runs under faults, all ending with the right weights or a clear error: simulated ones, and ones of real processes.

    python benchmarks/faults.py --simulated 2400 --real 200

Weights are held against those of the same seed without faults, in virtual time: processes change none. The
seeds, schedules and faults are those of digen/testing/faults.py. One JSON object on stdout, and in
docs/benchmarks/faults.json: how runs ended, which faults happened, how long it took; the first that ends wrongly is the
last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from digen.observe.files import write_atomic
from digen.testing.faults import Ended, Setup, run_to_the_end
from digen.testing.faulty_processes import run_processes

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
FIRST_REAL = 100
REAPED_S = 2.0
"""Longest time that the kernel may take to be rid of a process that was killed."""


def tried(seeds: range, run: Callable[[Setup], Ended], save: Callable[[dict[str, Any]], None]) -> None:
    """All seeds, `save`d so far after each; SystemExit with the seed where weights are wrong."""
    ends, faults, restarts, revived, compared = Counter[str](), Counter[str](), 0, 0, 0
    began, longest = time.monotonic(), 0.0
    for count, seed in enumerate(seeds, 1):
        setup, started = Setup.drawn(seed), time.monotonic()
        ended = run(setup)
        longest = max(longest, time.monotonic() - started)
        ends["weights" if ended.error is None else type(ended.error).__name__] += 1
        faults.update(fault.kind for fault in ended.happened)
        restarts += ended.restarts
        revived += sum("is started again" in note for note in ended.notes)
        if ended.error is None and not setup.schedule.get("staleness"):
            compared += 1
            if ended.weights != run_to_the_end(replace(setup, faults=())).weights:
                raise SystemExit(f"seed {seed}: the weights are not those of the undisturbed run")
        if count % 10 == 0 or count == len(seeds):
            save(
                {
                    "runs": count,
                    "ended": dict(ends),
                    "compared_with_the_undisturbed_run": compared,
                    "faults": dict(sorted(faults.items())),
                    "workers_started_again": revived,
                    "runs_begun_again": restarts,
                    "longest_s": round(longest, 1),
                    "seconds": round(time.monotonic() - began, 1),
                }
            )


def real(folder: Path, setup: Setup) -> Ended:
    """One of processes; SystemExit when it leaves one, or a folder of shared tensors."""
    ended = run_processes(setup, folder / "run")
    limit = time.monotonic() + REAPED_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < limit:
        time.sleep(0.01)
    if left:
        raise SystemExit(f"seed {setup.seed}: processes are left: {left}")
    if left := [path.name for path in (folder / "run").glob("*digen-*")]:
        raise SystemExit(f"seed {setup.seed}: folders are left: {left}")
    shutil.rmtree(folder / "run")
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", type=int, default=2400)
    parser.add_argument("--real", type=int, default=200)
    parser.add_argument("--out", type=Path, default=DOCS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {}

    def save(kind: str, found: dict[str, Any]) -> None:
        document[kind] = found
        write_atomic(given.out / "faults.json", json.dumps(document, indent=1) + "\n")

    tried(range(given.simulated), run_to_the_end, partial(save, "simulated"))
    with TemporaryDirectory() as folder:
        seeds = range(FIRST_REAL, FIRST_REAL + given.real)
        tried(seeds, partial(real, Path(folder)), partial(save, "real"))
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
