"""A generator of two that comes late or dies, and one that does not let the run end without the other."""

import os
import signal
import time
from pathlib import Path

from digen.backends.generation.diffusers import DiffusersGenerator


class Passing(DiffusersGenerator):
    """From the second step on generator-0 waits until generator-1, which DIES once, `came`: files in HOLD_IN say so."""

    def generate(self, microbatch, version, rows):
        folder = Path(os.environ["HOLD_IN"])
        if self.context.group == "generator-1":
            if "DIES" in os.environ and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "came").touch()
        elif version > 0:
            (folder / "waiting").touch()
            limit = time.monotonic() + 600
            while not (folder / "came").exists():
                assert time.monotonic() < limit, "nobody came"
                time.sleep(0.01)
        return super().generate(microbatch, version, rows)
