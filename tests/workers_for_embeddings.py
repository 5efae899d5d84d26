"""Worker of the embeddings tests, loaded by path in other processes."""

from pathlib import Path

import torch

from digen.engines.base import WorkerContext
from digen.models.embeddings import Embeddings


class Encoder:
    """A worker that encodes by counting: one line of a file for each call."""

    def __init__(self, log: str, context: WorkerContext) -> None:
        self.log, self.context = Path(log), context

    def work(self, folder: Path, prompts: list[str]) -> list[float]:
        def encode(prompt: str) -> dict[str, torch.Tensor]:
            with self.log.open("a") as lines:
                lines.write(f"{prompt}\n")
            return {"embeds": torch.full((1, 1), float(len(prompt)))}

        store = Embeddings(folder, b"same", 1e9)
        found = [store.of(prompt, encode) for prompt in prompts]
        return [float(row["embeds"]) for row in found if row is not None]
