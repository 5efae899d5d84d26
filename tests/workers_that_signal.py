"""Workers of the bundled model that send a signal to the driver when they come to a call; by the environment.

`TEST_SIGNAL=method:number:times[:seconds]`: so many signals of this number, 0.3 s apart, once; the call then
takes that many seconds longer.
"""

import os
import time
from pathlib import Path
from threading import Thread
from typing import Any

from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer


class Signalling:
    context: Any
    config: Any

    def told(self, method: str) -> None:
        asked, number, times, *seconds = os.environ.get("TEST_SIGNAL", "none:0:0").split(":")
        marker = Path(self.config.run_dir) / "signalled"
        if asked != method or marker.exists():
            return
        marker.touch()
        driver = os.getpid() if self.context.shared_dir is None else os.getppid()

        def send() -> None:
            for again in range(int(times)):
                time.sleep(0.3 if again else 0.0)
                os.kill(driver, int(number))

        Thread(target=send, daemon=True).start()
        time.sleep(float(seconds[0]) if seconds else 0.05)

    def load(self) -> None:
        self.told("load")
        super().load()  # type: ignore[misc]

    def generate(self, *args: Any) -> Any:
        self.told("generate")
        return super().generate(*args)  # type: ignore[misc]

    def score(self, *args: Any) -> Any:
        self.told("score")
        return super().score(*args)  # type: ignore[misc]


class Generator(Signalling, DiffusersGenerator):
    """`diffusers`, with signals."""

    def pull(self, *args: Any) -> Any:
        self.told("pull")
        return super().pull(*args)


class Trainer(Signalling, LocalTrainer):
    """`local`, with signals."""

    def load(self) -> None:
        LocalTrainer.load(self)

    def accumulate(self, *args: Any) -> Any:
        self.told("update")
        return super().accumulate(*args)

    def optimizer_step(self, *args: Any) -> Any:
        self.told("sync")
        return super().optimizer_step(*args)

    def save(self, *args: Any) -> Any:
        self.told("save")
        return super().save(*args)
