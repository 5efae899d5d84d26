"""Workers that send a signal to the driver when they come to a call; by the environment.

`TEST_SIGNAL=method:number:times[:seconds]`: so many signals of this number, 0.3 s apart, once; the call then
takes that many seconds longer.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from digen.engines.base import WorkerContext
from digen.testing import faulty_processes
from digen.types import Scores

WORK = {
    "load": "load",
    "generate": "generate",
    "score": "score",
    "accumulate": "update",
    "optimizer_step": "sync",
    "pull": "pull",
    "save": "save",
}
"""Calls of workers, and what they are called here."""


def signalled(work: str, run_dir: Path) -> None:
    """Send what is to be sent when this work begins, to whoever has locked the run's folder."""
    asked, number, times, *seconds = os.environ.get("TEST_SIGNAL", "none:0:0").split(":")
    if asked != work or (run_dir / "signalled").exists():
        return
    (run_dir / "signalled").touch()
    driver = json.loads((run_dir / ".lock").read_text())["pid"]
    os.kill(driver, int(number))

    def again() -> None:
        for _ in range(int(times) - 1):
            time.sleep(0.3)
            os.kill(driver, int(number))

    Thread(target=again, daemon=True).start()
    time.sleep(float(seconds[0]) if seconds else 0.2)


class Numbers(faulty_processes.Worker):
    """A generator, or a trainer, whose model is a number: it starts in a moment. Its tensors are files."""

    def __init__(self, payload: Any, context: WorkerContext) -> None:
        self.run_dir, self.rewards = Path(payload["run_dir"]), tuple(payload["reward"])
        samples = payload["data"]["prompts_per_step"] * payload["algorithm"]["samples_per_prompt"]
        plan = {"samples": samples, "faults": [], "happened": str(self.run_dir), "cost_s": 0.0}
        super().__init__(plan, replace(context, shared_dir=context.shared_dir or self.run_dir))
        self.trains = context.group == "trainer"

    def _called(self, method: str, *args: Any) -> Any:
        if method in WORK and not (method == "load" and self.trains):
            signalled(WORK[method], self.run_dir)
        return super()._called(method, *args)

    def _encode(self, texts: Any) -> None:
        """There is no text encoder."""

    def _num_cut(self, texts: Any) -> int:
        return 0

    def _score(self, rollout: Any) -> Scores:
        return replace(self.books._on_rank("score", self.rank, (rollout,)), names=self.rewards)
