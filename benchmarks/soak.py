"""2,000 tiny steps of the bundled model, with processes: memory and open files of each, and the step time, over time.

    python benchmarks/soak.py --steps 2000

One JSON object on stdout, and in docs/benchmarks/soak.json: for the driver and every worker the resident memory after
50 steps and at the end, the open files, and the median step time of the first and of the last quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import psutil
from rich.console import Console

from digen import presets
from digen.observe.files import read_rows, write_atomic
from digen.run import run

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
WARM = 50
TINY = (
    "engine.name=process",
    "data.prompts_per_step=1",
    "algorithm.samples_per_prompt=2",
    "sampling.num_steps=2",
    "algorithm.steps={type: all-but-last}",
    "generator.threads=1",
    "trainer.threads=1",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=0",
    "checkpoint.every=500",
    "checkpoint.keep=2",
)


def measured() -> dict[str, tuple[float, int]]:
    """Resident MB and open files of this process and of its workers."""
    found = {}
    for process in (psutil.Process(), *psutil.Process().children()):
        try:
            name = process.cmdline()[-1] if process.pid != psutil.Process().pid else "driver"
            found[name] = process.memory_info().rss / 2**20, process.num_fds()
        except psutil.NoSuchProcess:
            continue
    return found


def watch(metrics: Path, over: Event, seen: list[tuple[int, dict[str, tuple[float, int]]]]) -> None:
    """Measure every few seconds, with the number of steps that are done then."""
    while not over.wait(2.0):
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        seen.append((steps, measured()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=DOCS)
    given = parser.parse_args()
    seen: list[tuple[int, dict[str, tuple[float, int]]]] = []
    over, began = Event(), time.monotonic()
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"
        watcher = Thread(target=watch, args=(folder / "metrics.jsonl", over, seen), daemon=True)
        watcher.start()
        settings = [*TINY, f"steps={given.steps}", f"run_dir={folder}"]
        run(presets.resolve("flowgrpo", "glyph", None, settings, {}), console=Console(quiet=True))
        over.set()
        times = [row["step_time_s"] for row in read_rows(folder / "metrics.jsonl")][WARM:]
    document = {
        "steps": given.steps,
        "seconds": round(time.monotonic() - began, 1),
        "workers": summary(seen),
        "step_s": {"first quarter": quarter(times, 0), "last quarter": quarter(times, 3)},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out / "soak.json", json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")


def summary(seen: list[tuple[int, dict[str, tuple[float, int]]]]) -> dict[str, Any]:
    """Of every process: MB and open files, at the first look after the warm-up and at the last one at work."""
    warm = [found for steps, found in seen if steps >= WARM and len(found) == max(len(f) for _, f in seen)]
    first, last = warm[0], warm[-1]
    return {
        name: {
            "resident_mb": [round(first[name][0], 1), round(last[name][0], 1)],
            "grown_mb": round(last[name][0] - first[name][0], 1),
            "open_files": [first[name][1], last[name][1]],
        }
        for name in sorted(first.keys() & last.keys())
    }


def quarter(times: list[float], number: int) -> float:
    size = max(1, len(times) // 4)
    return round(median(times[number * size : (number + 1) * size]), 4)


if __name__ == "__main__":
    main()
