"""What a GPU shows, in one command of at most eight minutes: first that it is right, then how fast.

    python benchmarks/gpu_kit.py            # one large GPU (80 GB)
    python benchmarks/gpu_kit.py --tiny     # the same code on a CPU, in miniature

Stable Diffusion 3.5 and Qwen-Image with real widths, fewer layers and random weights (1 to 2 billion parameters). Each
section is a process of its own with a time limit, so that none takes another one with it; after each, everything so far
is written to `gpu_kit.json` and `gpu_kit.md`. A section that fails, runs out of time or misses a limit is reported, and
the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Table

from digen.observe.files import write_atomic

LIMITS_S = {"build": 90.0, "correctness": 150.0, "speed": 150.0, "tag": 150.0, "sync": 60.0}
"""Of each section on a GPU; together they may take `--budget`."""
BUDGET_S, TINY_BUDGET_S = 470.0, 3600.0
LEAST_S = 5.0
"""With less left no section begins."""
GRACE_S = 5.0
"""Between the time at which a section should end by itself and the one at which it is ended."""
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in miniature")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu_kit.json and gpu_kit.md")
    parser.add_argument("--budget", type=float, help=f"seconds for all sections, {BUDGET_S:g}")
    parser.add_argument("--only", default=",".join(LIMITS_S), help="sections, by commas; `build` comes with all others")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.budget = given.budget or (TINY_BUDGET_S if given.tiny else BUDGET_S)
    return given


# One section, in a process of its own ---------------------------------------------------------------------------------


def section(name: str, folder: Path, tiny: bool, limit_s: float) -> None:
    """Run it and write what it found to `folder`/`name`.json."""
    from gpu_scale import LARGE, TINY
    from gpu_sections import Found, Kit, on, sections

    device = "cpu" if tiny else "cuda:0"
    kit = Kit(folder, TINY if tiny else LARGE, device, time.monotonic() + limit_s)
    found = Found()

    def save() -> None:
        tables = [[table.title, table.columns, table.rows] for table in found.tables]
        document = {"tables": tables, "results": found.results, "problems": found.problems}
        write_atomic(folder / f"{name}.json", json.dumps(document) + "\n")

    found.save = save
    try:
        with on(device):
            sections()[name](kit, found)
    except Exception as error:  # noqa: BLE001 - what was found until then is worth having
        found.problems.append(f"{type(error).__name__}: {error}")
    save()


def child(name: str, folder: Path, tiny: bool, limit_s: float) -> dict[str, Any]:
    """Run a section in a process and say how it ended: ok, problems, failed or timeout."""
    command = [sys.executable, __file__, "--section", name, "--folder", str(folder), "--budget", str(limit_s)]
    began = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *(["--tiny"] if tiny else [])], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        late = time.monotonic() - began > limit_s
    file = folder / f"{name}.json"
    document = json.loads(file.read_text()) if file.is_file() else {"tables": [], "results": {}, "problems": []}
    status = "problems" if document["problems"] else "ok"
    if code != 0:
        status = "timeout" if late else "failed"
        tail = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-12:]
        document["problems"] += [f"ended with code {code}", *tail]
    return {"section": name, "status": status, "seconds": time.monotonic() - began, **document}


# All of them ----------------------------------------------------------------------------------------------------------


def machine(tiny: bool) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    found: dict[str, Any] = {name: version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "device": "cpu", "cores": os.cpu_count()}
    if not tiny:
        if not torch.cuda.is_available():
            sys.exit("torch finds no GPU here; --tiny runs the same on the CPU")
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}
    return found


def text(document: Mapping[str, Any]) -> str:
    """The tables as a page."""
    facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    parts = [f"# GPU kit\n\n{facts}"]
    for one in document["sections"]:
        parts.append(f"## {one['section']}: {one['status']}, {one['seconds']:.0f} s")
        parts += [Table(*table).markdown() for table in one["tables"]]
        parts += ["\n".join(f"- {problem}" for problem in one["problems"])] if one["problems"] else []
    return "\n\n".join(parts) + "\n"


def run(names: Sequence[str], tiny: bool, budget_s: float, out: Path) -> bool:
    """All sections in order, the results written after each; whether all is well."""
    began, done = time.monotonic(), []
    document = {"machine": machine(tiny), "sections": done}
    with tempfile.TemporaryDirectory() as name:
        for section_name in names:
            left = budget_s - (time.monotonic() - began) - GRACE_S
            if left < LEAST_S:
                one = {"section": section_name, "status": "skipped", "seconds": 0.0}
                done.append({**one, "tables": [], "results": {}, "problems": ["no time was left"]})
            else:
                done.append(child(section_name, Path(name), tiny, left if tiny else min(left, LIMITS_S[section_name])))
            for table in done[-1]["tables"]:
                Table(*table).show()
            print(f"{section_name}: {done[-1]['status']}", *done[-1]["problems"], sep="\n  ", flush=True)
            write_atomic(out / "gpu_kit.json", json.dumps(document, indent=1) + "\n")
            write_atomic(out / "gpu_kit.md", text(document))
    return all(one["status"] == "ok" for one in done)


def main() -> None:
    given = parse()
    if given.section:
        section(given.section, given.folder, given.tiny, given.budget)
        return
    wanted = given.only.split(",")
    if unknown := set(wanted) - set(LIMITS_S):
        sys.exit(f"--only: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(LIMITS_S)}")
    names = [name for name in LIMITS_S if name in wanted or (name == "build" and set(wanted) - {"sync"})]
    given.out.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if run(names, given.tiny, given.budget, given.out) else 1)


if __name__ == "__main__":
    main()
