"""20,000 broken inputs for everything that reads files and answers of others: none may end in a traceback.

    python benchmarks/fuzz.py

One JSON object on stdout, and in docs/benchmarks/fuzz.json: by kind of input, how many were understood and refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from digen.observe.files import write_atomic
from digen.testing.fuzz import attack, targets

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
SEED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=DOCS)
    given = parser.parse_args()
    logging.disable()  # lines that are cut short are said to be so
    began, found = time.monotonic(), {}
    kinds = targets()
    for name, target in kinds.items():
        with TemporaryDirectory() as folder:
            understood, refused = attack(target, SEED, -(-given.count // len(kinds)), Path(folder))
        found[name] = {"understood": understood, "refused": refused}
    total = sum(sum(counts.values()) for counts in found.values())
    document = {"inputs": total, "seconds": round(time.monotonic() - began, 1), "kinds": found}
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out / "fuzz.json", json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
