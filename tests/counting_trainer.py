"""A trainer of the bundled model whose run folder tells what it computed, and in how many calls."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from digen.backends.training.local import LocalTrainer


class Counting(LocalTrainer):
    """Writes the gradient before every optimizer step, and how often the transformer was called until then."""

    calls = 0

    def load(self) -> None:
        super().load()
        self.model.transformer.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def optimizer_step(self, *args: Any) -> Any:
        folder = Path(self.config.run_dir)
        save_file(self.gradients(), folder / f"gradient-{self.version}.safetensors")
        (folder / f"calls-{self.version}").write_text(str(self.calls))
        return super().optimizer_step(*args)
