"""Starts and stops in a row: each leaves no process, no shared memory, no temporary folder and no line of an error.

    python benchmarks/starts.py --times 30

`digen run` with processes is stopped by Ctrl-C or SIGTERM some random time after its start. One JSON object on stdout,
and in docs/benchmarks/starts.json; the first start or stop that leaves something is the last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from digen.observe.files import write_atomic

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
SMALL = (
    "engine.name=process",
    "steps=500",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=2",
    "sampling.num_steps=4",
    "generator.threads=1",
    "trainer.threads=1",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
)
SHARED = Path("/dev/shm")
OF_LIBRARIES = (".ses", "torchinductor_")
"""What onnxruntime and torch keep among temporary files: one for all processes."""


def stopped(run_dir: Path, after_s: float, number: signal.Signals) -> tuple[int, float, list[str]]:
    """Exit code, seconds from the signal to the end, and what is wrong."""
    command = [sys.executable, "-m", "digen", "run", "flowgrpo", f"run_dir={run_dir}", *SMALL]
    own = run_dir.with_name(f"{run_dir.name}-temporary")
    own.mkdir()
    environment = {**os.environ, "TMPDIR": str(own)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        workers: set[psutil.Process] = set()
        limit = time.monotonic() + after_s
        while time.monotonic() < limit and process.poll() is None:
            workers |= set(psutil.Process(process.pid).children(recursive=True))
            time.sleep(0.05)
        process.send_signal(number)
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
        took_s = time.monotonic() - began
    wrong = [line for line in output.splitlines() if "Traceback" in line or "Error" in line or "leaked" in line]
    wrong += [f"worker {worker.pid} is left" for worker in workers if worker.is_running()]
    left = [*own.iterdir(), *SHARED.glob(f"*digen-{process.pid}-*")]
    wrong += [f"{path} is left" for path in left if not path.name.startswith(OF_LIBRARIES)]
    if process.returncode != 128 + number:
        wrong.append(f"exit code {process.returncode}: {output[-500:]}")
    return process.returncode, took_s, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--out", type=Path, default=DOCS)
    given = parser.parse_args()
    draw, codes, longest_s, saved = random.Random(0), Counter[int](), 0.0, 0
    with tempfile.TemporaryDirectory() as place:
        for k in range(given.times):
            number = (signal.SIGINT, signal.SIGTERM)[k % 2]
            folder = Path(place) / str(k)
            code, took_s, wrong = stopped(folder, draw.uniform(3.0, 20.0), number)
            if wrong:
                raise SystemExit("\n".join([f"start {k}:", *wrong]))
            codes[code] += 1
            longest_s = max(longest_s, took_s)
            saved += bool(list((folder / "checkpoints").glob("step_*")))
    document: dict[str, Any] = {"times": given.times, "exit_codes": codes, "saved": saved}
    document["longest_from_signal_to_end_s"] = round(longest_s, 1)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out / "starts.json", json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
