"""A generator of processes that takes its time: `g1` takes three times as long as `g0`. It counts what it made."""

import time
from pathlib import Path

from digen.testing.faulty_processes import Worker

FAST_S, SLOW_S = 0.3, 0.9


class Paced(Worker):
    def __init__(self, payload, context):
        super().__init__(payload, context)
        self.group = context.group

    def generate(self, *args):
        time.sleep(SLOW_S if self.group == "g1" else FAST_S)
        made = self._called("generate", *args)
        with Path(self.happened / f"made-by-{self.group}").open("a") as file:
            file.write("x")
        return made
