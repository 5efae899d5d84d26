"""Whether the real vLLM-Omni engine has to be tested now: `due` tests it if so, `record` notes that it has passed.

Due when a file that the backend is made of has changed since the record, or the record is a week old: libraries change
too. The record lies in the repository, beside the tests; what a machine tested itself lies in `build`.
"""

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = (ROOT / "tests/vllm/passed.json", ROOT / "build/vllm/passed.json")
FILES = (
    "digen/backends/generation/vllm_*.py",
    "digen/backends/compare.py",
    "digen/commands/check_backends.py",
    "digen/rewards/judge*.py",
    "tests/vllm/*.py",
    "tests/vllm/*.txt",
    "tests/vllm/plugin/**/*.py",
    "tests/vllm/plugin/**/*.toml",
)
"""What the engine's tests test, and the tests. What they touch beside it is tested without the engine too."""
OLDEST = timedelta(days=7)
LIMIT_S = 1500
"""For each of both: to install the engine, and to test it."""


def digest() -> str:
    """Of all those files."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in ROOT.glob(pattern)}):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def reason() -> str:
    """Why a test is due; empty where it is not."""
    records = [json.loads(path.read_text()) for path in RECORDS if path.is_file()]
    same = [record for record in records if record["files"] == digest()]
    if not same:
        return "files of the backend have changed"
    passed = max(datetime.fromisoformat(record["passed"]) for record in same)
    return "" if datetime.now(UTC) - passed < OLDEST else f"the last test was on {passed:%Y-%m-%d}"


def make(target: str) -> bool:
    """Whether it was made, within the limit."""
    try:
        return subprocess.run(["make", target], cwd=ROOT, timeout=LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"make {target} took over {LIMIT_S} s")
        return False


def due() -> int:
    """Test what is due. Where the engine cannot be installed, changed files fail and a weekly test is left out."""
    if not (why := reason()):
        print("vLLM-Omni: nothing has changed since the real engine was tested")
        return 0
    print(f"vLLM-Omni: {why}; the real engine is tested")
    if not make("vllm"):
        print("vLLM-Omni cannot be installed here (see above): the real engine was NOT tested")
        return int("changed" in why)
    return int(not make("test-vllm"))


def record() -> int:
    text = json.dumps({"files": digest(), "passed": datetime.now(UTC).isoformat(timespec="seconds")}, indent=2) + "\n"
    for path in RECORDS:
        if path.parent.is_dir():
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit({"due": due, "record": record}[sys.argv[1]]())
