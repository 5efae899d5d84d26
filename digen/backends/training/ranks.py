"""The process group of a trainer's ranks: gloo on CPU, nccl on GPU.

Invariant: collectives run inside one worker group only; each group of a run has a rendezvous of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from digen.engines.base import WorkerContext


def join(context: WorkerContext, *, host: bool = False) -> None:
    """Join the process group of this worker group, once in the life of a process; a lone rank needs no rendezvous.

    `host`: tensors in host memory are sent too, whatever the device.
    """
    if dist.is_initialized():  # a second run in one process: the inline engine
        return
    device = torch.device(context.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if host else backend
    if context.rendezvous is None:
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but not declared to be
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(
            backend, init_method=context.rendezvous, rank=context.rank, world_size=context.world_size
        )
