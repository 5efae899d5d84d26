"""A worker of the Ray engine's tests that says where it is; torch is imported only where it is needed."""

import os
import time

from digen.engines.base import WorkerContext


class Placed:
    def __init__(self, _payload, context: WorkerContext):
        self.context = context

    def node(self):
        import ray

        return ray.get_runtime_context().get_node_id()

    def wait(self, seconds):
        time.sleep(seconds)

    def threads(self):
        return os.environ["OMP_NUM_THREADS"]

    def sum_of_ranks(self):
        import torch
        import torch.distributed as dist

        here = self.context
        dist.init_process_group("gloo", init_method=here.rendezvous, rank=here.rank, world_size=here.world_size)
        total = torch.tensor([here.rank + 1])
        dist.all_reduce(total)
        return total.item()
