"""The Ray engine, remembering what was made: so a test can ask what went through the driver of a whole run."""

from typing import ClassVar

from digen.engines.ray import RayEngine


class CountingRay(RayEngine):
    made: ClassVar[list[RayEngine]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)
