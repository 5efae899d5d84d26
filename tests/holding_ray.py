"""A generator that stops in its first call, so that its node can be killed at a known moment."""

import os
import time
from pathlib import Path

from digen.backends.generation.diffusers import DiffusersGenerator


class Holding(DiffusersGenerator):
    def generate(self, *args, **kwargs):
        folder = Path(os.environ["HOLD_IN"])
        if self.context.group == "generator-0":
            (folder / "generating").touch()
            limit = time.monotonic() + 120
            while not (folder / "go").exists():
                assert time.monotonic() < limit, "nobody came"
                time.sleep(0.01)
        return super().generate(*args, **kwargs)
