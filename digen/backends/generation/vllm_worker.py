"""What digen asks of the engine's workers, by name, between batches: to begin a run, and to take new weights.

Invariant: every method answers with the reports of all ranks that the engine divides the model over, each of which
carries the method's name, so that no other reply can be taken for it (the engine itself passes on rank 0's alone); an
exception on any rank reaches the caller as the engine's own error reply. Imported by the engine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import (
    CustomPipelineWorkerExtension,
)

from digen.backends.generation.vllm_adapters import bind_adapters
from digen.backends.generation.vllm_engine import KEY
from digen.backends.generation.vllm_weights import Update
from digen.errors import SyncError

P = ParamSpec("P")


def here() -> tuple[int, int]:
    """This worker's rank, and how many there are; all of them share one model, in no other way than by its tensors."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_all_ranks(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has come to, in order; all must ask."""
    _, num_ranks = here()
    if num_ranks == 1:
        return [mine]
    from vllm_omni.diffusion.distributed.parallel_state import get_world_group

    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, mine, group=get_world_group().cpu_group)
    return found


def reporting(method: Callable[P, dict[str, Any]]) -> Callable[P, list[dict[str, Any]]]:
    """The reports of all ranks, marked with the method's name. Raises SyncError naming the ranks where it failed."""
    name = method.__name__

    @wraps(method)
    def marked(*args: P.args, **kwargs: P.kwargs) -> list[dict[str, Any]]:
        try:
            mine = {KEY: name, **method(*args, **kwargs)}
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            mine = {"error": f"{type(error).__name__}: {error}"}
        reports = of_all_ranks(mine)
        if failed := [f"rank {rank}: {each['error']}" for rank, each in enumerate(reports) if KEY not in each]:
            raise SyncError("; ".join(failed))
        return reports

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
        rank, num_ranks = here()
        self._digen_update = Update(
            version,
            pipeline.transformer,
            lambda named: pipeline.load_weights((f"transformer.{name}", tensor) for name, tensor in named),
            pipeline.packed,
            pipeline.renamed,
            rank,
            num_ranks,
        )
        return {"version": version}

    @reporting
    def digen_update_weights(self, given: Mapping[str, Tensor] | str) -> dict[str, Any]:
        """Whole tensors under diffusers' names, or a file with them: of shared memory, where ranks are processes."""
        if self._digen_update is None:
            raise SyncError("weights came before digen_start_weight_update")
        return {"tensors": self._digen_update.take(load_file(given) if isinstance(given, str) else given)}

    @reporting
    def digen_finish_weight_update(self) -> dict[str, Any]:
        update, self._digen_update = self._digen_update, None
        if update is None:
            raise SyncError("digen_finish_weight_update without a start")
        return update.finish()

    @reporting
    def digen_load_adapters(self, folder: str, version: int, names: Sequence[str]) -> dict[str, Any]:
        packed = self._digen_pipeline.packed
        return {"request": bind_adapters(self.lora_manager, folder, version, names, packed, *here())}

    @reporting
    def digen_passes(self) -> dict[str, Any]:
        """How many batches of samples have gone through the transformer."""
        return {"passes": self._digen_pipeline.host.num_passes}
