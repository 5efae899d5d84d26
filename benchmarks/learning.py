"""Does it learn? Trains the bundled model with several seeds, evaluates each, writes table and curves for the docs.

    python benchmarks/learning.py                        # all runs, about twenty minutes on two cores
    python benchmarks/learning.py --check                # one run, compared with the ranges in docs/learning.json

A range is what the runs of the last full benchmark spanned, widened by half of its width (at least by a margin).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from digen.observe.curves import plot_curves
from digen.observe.files import read_rows

DOCS = Path(__file__).parent.parent / "docs"
RUNS = {"flowgrpo": (0, 1, 2), "dancegrpo": (0,)}
START, END = "<!-- results of benchmarks/learning.py -->", "<!-- end of results -->"
MARGINS = {"base_reward": 0.02, "gain": 0.1, "ratio/max_error": 1e-6, "clip_fraction/mean": 1e-6, "grad_norm": 1e-3}


def digen(*words: str) -> dict[str, Any]:
    """Run one command with --json and return its object."""
    command = [sys.executable, "-m", "digen", *words, "--json"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure(algorithm: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train, evaluate, and say what both gave."""
    run = folder / f"{algorithm}-{seed}"
    summary = digen("run", algorithm, "--model", "glyph", "--seed", str(seed), "--run-dir", str(run), *overrides)
    report = digen("eval", str(run))
    rows = read_rows(run / "metrics.jsonl")
    keys = ("ratio/max_error", "clip_fraction/mean", "grad_norm")
    return {
        "algorithm": algorithm,
        "seed": seed,
        "steps": len(rows),
        "training_s": summary["training_s"],
        "busy": {name: worker["busy"] for name, worker in summary["workers"].items()},
        "base_reward": report["base_reward"],
        "trained_reward": report["trained_reward"],
        "gain": report["gain"],
        **{key: max(row[key] for row in rows) for key in keys},
    }


def ranges(results: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """What to expect of a run of each algorithm: [low, high] of every figure."""
    found: dict[str, dict[str, list[float]]] = {}
    for algorithm in RUNS:
        mine = [r for r in results if r["algorithm"] == algorithm]
        for key, margin in MARGINS.items() if mine else ():
            low, high = min(r[key] for r in mine), max(r[key] for r in mine)
            wider = max(margin, (high - low) / 2)
            found.setdefault(algorithm, {})[key] = [low - wider, high + wider]
    return found


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| algorithm | seed | steps | training | base | trained | gain | max ratio error | busy generator / trainer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        busy = " / ".join(f"{100 * share:.0f} %" for _, share in sorted(r["busy"].items()))
        lines.append(
            f"| {r['algorithm']} | {r['seed']} | {r['steps']} | {r['training_s']:.0f} s | {r['base_reward']:.3f} | "
            f"{r['trained_reward']:.3f} | {r['gain']:+.3f} | {r['ratio/max_error']:.1e} | {busy} |"
        )
    return "\n".join(lines)


def check(result: dict[str, Any]) -> list[str]:
    """What lies outside the ranges of docs/learning.json."""
    expected = json.loads((DOCS / "learning.json").read_text())["ranges"][result["algorithm"]]
    return [
        f"{key}: {result[key]:.4g}, expected {low:.4g} to {high:.4g}"
        for key, (low, high) in expected.items()
        if not low <= result[key] <= high
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="one run, compared with docs/learning.json")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="where the run folders go")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = parser.parse_args()
    if given.check:
        problems = check(measure("flowgrpo", 0, given.folder, given.overrides))
        sys.exit("\n".join(problems) or 0)
    results = [measure(a, seed, given.folder, given.overrides) for a, seeds in RUNS.items() for seed in seeds]
    curves = {f"{r['algorithm']}, seed {r['seed']}": given.folder / f"{r['algorithm']}-{r['seed']}" for r in results}
    plot_curves(
        {name: read_rows(run / "metrics.jsonl") for name, run in curves.items()},
        DOCS / "learning.png",
        label="mean OCR reward of the step's samples",
    )
    document = {"results": results, "ranges": ranges(results)}
    (DOCS / "learning.json").write_text(json.dumps(document, indent=1) + "\n")
    page = (DOCS / "learning.md").read_text()
    before, after = page.split(START)[0], page.split(END)[1]
    (DOCS / "learning.md").write_text(f"{before}{START}\n{table(results)}\n{END}{after}")
    print(table(results))
    print(f"mean gain of flowgrpo: {fmean(r['gain'] for r in results if r['algorithm'] == 'flowgrpo'):+.3f}")


if __name__ == "__main__":
    main()
