"""The engine's worker on a CPU: weights stay where they can be loaded again, and sleep needs no GPU's allocator."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CpuDiffusionWorker(DiffusionWorker):
    _saved: dict[str, torch.Tensor] | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        LinearBase.skip_weight_relayout = True  # else weights are packed for oneDNN, and the parameters are empty
        super().load_model(*args, **kwargs)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        if getattr(self.od_config, "enable_sleep_mode", False):
            self._sleep_enabled = True
        return nullcontext()

    def _storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        pipeline = self.model_runner.pipeline
        return chain(pipeline.named_parameters(), pipeline.named_buffers())

    def sleep(self, level: int = 1) -> int:
        if self._saved is not None:
            raise RuntimeError("worker is already asleep")
        self._saved = {name: tensor.data for name, tensor in self._storages()}
        for _, tensor in self._storages():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        return sum(tensor.nbytes for tensor in self._saved.values())

    def wake_up(self, tags: Any = None) -> bool:
        if self._saved is not None:
            for name, tensor in self._storages():
                tensor.data = self._saved[name]
            self._saved = None
        return True
