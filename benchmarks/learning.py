"""Does it learn? Trains the bundled model with several seeds, evaluates each, writes tables and curves for the docs.

    python benchmarks/learning.py                        # the demo's runs, about twenty minutes on two cores
    python benchmarks/learning.py --variants             # the other algorithms, shorter, about as long
    python benchmarks/learning.py --variants --only dpo  # one of them again
    python benchmarks/learning.py --check                # one run of flowgrpo, compared with docs/learning.json
    python benchmarks/learning.py --check awm            # of another algorithm

A range is what the runs of the last full benchmark spanned, widened by half of its width (at least by a margin).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from digen.observe.curves import plot_curves
from digen.observe.files import read_rows, write_atomic

DOCS = Path(__file__).parent.parent / "docs"
RUNS = {"flowgrpo": (0, 1, 2), "dancegrpo": (0,)}
"""As presets say: one generator and one trainer process, which use two cores."""
VARIANTS = ("flowgrpo-fast", "flowgrpo-cps", "mixgrpo", "grpo-guard", "flow-dppo", "diffusion-nft", "awm", "dpo")
SEEDS = (0, 1)
SHORT = (
    "steps=16",
    "engine.name=inline",
    "schedule.mode=colocated",
    "schedule.assist=none",
    "observe.tensorboard=false",
    "observe.grid_every=0",
)
"""Runs of variants take one core each, and two go at a time."""
AT_ONCE = 2
DEMO = ("<!-- results of benchmarks/learning.py -->", "<!-- end of results -->")
OTHERS = ("<!-- variants of benchmarks/learning.py -->", "<!-- end of variants -->")
SAMPLES = "mean OCR reward of the step's samples"
MARGINS = {"base_reward": 0.02, "gain": 0.1, "ratio/max_error": 1e-6, "clip_fraction/mean": 1e-6, "grad_norm": 1e-3}
Result = dict[str, Any]


def digen(*words: str, threads: int | None = None) -> dict[str, Any]:
    """Run one command with --json and return its object."""
    command = [sys.executable, "-m", "digen", *words, "--json"]
    environ = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=environ)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure(algorithm: str, seed: int, folder: Path, overrides: Sequence[str]) -> Result:
    """Train, evaluate, and say what both gave."""
    run, short = folder / f"{algorithm}-{seed}", algorithm in VARIANTS
    call, settings = partial(digen, threads=1 if short else None), [*(SHORT if short else ()), *overrides]
    summary = call("run", algorithm, "--model", "glyph", "--seed", str(seed), "--run-dir", str(run), *settings)
    report = call("eval", str(run))
    rows = read_rows(run / "metrics.jsonl")
    found = {
        key: [row[key] for row in rows if key in row] for key in ("ratio/max_error", "clip_fraction/mean", "grad_norm")
    }
    return {
        "algorithm": algorithm,
        "seed": seed,
        "steps": len(rows),
        "training_s": summary["training_s"],
        "busy": {name: worker["busy"] for name, worker in summary["workers"].items()},
        "base_reward": report["base_reward"],
        "trained_reward": report["trained_reward"],
        "gain": report["gain"],
        "curve": [round(row["reward/mean"], 4) for row in rows],
        **{key: max(values) for key, values in found.items() if values},
    }


def ranges(results: Sequence[Result]) -> dict[str, dict[str, list[float]]]:
    """What to expect of a run of each algorithm: [low, high] of every figure that it has."""
    found: dict[str, dict[str, list[float]]] = {}
    for algorithm in dict.fromkeys(r["algorithm"] for r in results):
        mine = [r for r in results if r["algorithm"] == algorithm]
        for key, margin in MARGINS.items():
            if all(key in r for r in mine):
                low, high = min(r[key] for r in mine), max(r[key] for r in mine)
                wider = max(margin, (high - low) / 2)
                found.setdefault(algorithm, {})[key] = [low - wider, high + wider]
    return found


def table(results: Iterable[Result]) -> str:
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


def known() -> dict[str, Any]:
    """What docs/learning.json says."""
    document: dict[str, Any] = json.loads((DOCS / "learning.json").read_text())
    return {"variants": [], "variant_ranges": {}, **document}


def check(result: Result) -> list[str]:
    """What lies outside the ranges of docs/learning.json, or has none there."""
    document, name = known(), result["algorithm"]
    expected: Mapping[str, Sequence[float]] = {**document["variant_ranges"], **document["ranges"]}.get(name, {})
    if not expected:
        return [f"docs/learning.json has no ranges for {name}"]
    return [
        f"{key}: {result[key]:.4g}, expected {low:.4g} to {high:.4g}"
        for key, (low, high) in expected.items()
        if not low <= result[key] <= high
    ]


def publish(document: Mapping[str, Any], results: Sequence[Result], markers: tuple[str, str]) -> None:
    """Write the JSON file, and this table into its place in the page."""
    write_atomic(DOCS / "learning.json", json.dumps(document, indent=1) + "\n")
    page, (start, end) = (DOCS / "learning.md").read_text(), markers
    before, after = page.split(start)[0], page.split(end)[1]
    write_atomic(DOCS / "learning.md", f"{before}{start}\n{table(results)}\n{end}{after}")
    print(table(results))


def demo(folder: Path, overrides: Sequence[str]) -> None:
    """The demo's runs, one after the other, with their curves."""
    results = [measure(a, seed, folder, overrides) for a, seeds in RUNS.items() for seed in seeds]
    curves = {f"{r['algorithm']}, seed {r['seed']}": folder / f"{r['algorithm']}-{r['seed']}" for r in results}
    plot_curves(
        {name: read_rows(run / "metrics.jsonl") for name, run in curves.items()},
        DOCS / "learning.png",
        label=SAMPLES,
    )
    publish({**known(), "results": results, "ranges": ranges(results)}, results, DEMO)
    print(f"mean gain of flowgrpo: {fmean(r['gain'] for r in results if r['algorithm'] == 'flowgrpo'):+.3f}")


def variants(folder: Path, overrides: Sequence[str], only: Sequence[str]) -> None:
    """The other algorithms, two runs at a time; what is not run again is kept."""
    wanted = [(name, seed) for name in VARIANTS if not only or name in only for seed in SEEDS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        new = list(pool.map(lambda one: measure(*one, folder, overrides), wanted))
    kept = [r for r in known()["variants"] if (r["algorithm"], r["seed"]) not in wanted]
    results = sorted([*kept, *new], key=lambda r: (VARIANTS.index(r["algorithm"]), r["seed"]))
    plot_curves(
        {
            f"{r['algorithm']}, seed {r['seed']}": [{"step": k, "reward/mean": y} for k, y in enumerate(r["curve"])]
            for r in results
            if r["seed"] == SEEDS[0]
        },
        DOCS / "learning-variants.png",
        label=SAMPLES,
    )
    publish({**known(), "variants": results, "variant_ranges": ranges(results)}, results, OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="?", const="flowgrpo", choices=[*RUNS, *VARIANTS], help="one run, compared")
    parser.add_argument("--variants", action="store_true", help="the algorithms that the demo does not run")
    parser.add_argument("--only", action="append", default=[], choices=VARIANTS, help="of the variants")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="where the run folders go")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="for every run")
    given = parser.parse_args()
    if given.check:
        problems = check(measure(given.check, 0, given.folder, given.set))
        sys.exit("\n".join(problems) or 0)
    if given.variants:
        variants(given.folder, given.set, given.only)
    else:
        demo(given.folder, given.set)


if __name__ == "__main__":
    main()
