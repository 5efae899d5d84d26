"""What digen asks of the engine's workers, by name, between batches: to begin a run, and to take new weights.

Invariant: every method answers with a report that carries its own name, so that no other reply can be taken for it; an
exception reaches the caller as the engine's own error reply. Imported by the engine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import (
    CustomPipelineWorkerExtension,
)

from digen.backends.generation.vllm_adapters import bind_adapters
from digen.backends.generation.vllm_engine import KEY
from digen.backends.generation.vllm_weights import Update
from digen.errors import SyncError

P = ParamSpec("P")


def reporting(method: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """The method's report, marked with its name."""

    @wraps(method)
    def marked(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        return {KEY: method.__name__, **method(*args, **kwargs)}

    return marked


class DigenWorker(CustomPipelineWorkerExtension):  # type: ignore[misc]
    """Mixed into the engine's worker class."""

    _digen_update: Update | None = None

    @property
    def _digen_pipeline(self) -> Any:
        return self.model_runner.pipeline

    @reporting
    def digen_begin(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Samples are for this run from now on."""
        self._digen_pipeline.begin(payload)
        return {"adapted": dict(self._digen_pipeline.adapted)}

    @reporting
    def digen_start_weight_update(self, version: int) -> dict[str, Any]:
        pipeline = self._digen_pipeline
        self._digen_update = Update(
            version,
            pipeline.transformer,
            lambda named: pipeline.load_weights((f"transformer.{name}", tensor) for name, tensor in named),
            pipeline.packed,
            pipeline.renamed,
        )
        return {"version": version}

    @reporting
    def digen_update_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        if self._digen_update is None:
            raise SyncError("weights came before digen_start_weight_update")
        return {"tensors": self._digen_update.take(tensors)}

    @reporting
    def digen_finish_weight_update(self) -> dict[str, Any]:
        update, self._digen_update = self._digen_update, None
        if update is None:
            raise SyncError("digen_finish_weight_update without a start")
        return update.finish()

    @reporting
    def digen_load_adapters(self, folder: str, version: int, names: Sequence[str]) -> dict[str, Any]:
        return {"request": bind_adapters(self.lora_manager, folder, version, names)}

    @reporting
    def digen_passes(self) -> dict[str, Any]:
        """How many batches of samples have gone through the transformer."""
        return {"passes": self._digen_pipeline.host.num_passes}
