"""Workers of the bundled model that send a signal to the driver when they come to a call (signalling.py)."""

from pathlib import Path
from typing import Any

from digen import plugins
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer

signalled: Any = plugins.load(f"{Path(__file__).parent}/signalling.py:signalled")


class Signalling:
    config: Any

    def told(self, work: str) -> None:
        signalled(work, Path(self.config.run_dir))

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
