"""Workers of the engine tests, loaded by path in other processes; torch is imported only where it is needed."""

import operator
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from digen.engines.base import WorkerContext
from digen.types import Ref


class Broken:
    """Pickles, but does not unpickle."""

    def __reduce__(self):
        return operator.getitem, ({}, "nothing")


class Worker:
    def __init__(self, payload, context: WorkerContext):
        self.payload, self.context = payload, context
        self.calls = []
        match payload:
            case "raise":
                raise ValueError("no such model")
            case "exit":
                sys.stderr.write("cannot go on\n")
                os._exit(3)
            case "forever":
                time.sleep(600)

    def place(self):
        c = self.context
        return self.payload, c.group, c.rank, c.world_size, c.device

    def pid(self):
        return os.getpid()

    def echo(self, *args, **kwargs):
        return args, kwargs

    def length(self, data, seconds=0.0):
        time.sleep(seconds)
        return len(data), data

    def raise_on(self, rank, others_wait_s=0.0):
        if self.context.rank == rank:
            raise LookupError(f"rank {rank} lost it")
        time.sleep(others_wait_s)
        return self.context.rank

    def exit(self):
        raise SystemExit(7)

    def meet(self, folder: Path, others: int):
        """Return only when all groups are in here at the same time."""
        (folder / self.context.group).touch()
        limit = time.monotonic() + 10
        while len(list(folder.iterdir())) < others:
            assert time.monotonic() < limit, "nobody came"
            time.sleep(0.005)

    def interval(self, seconds):
        start = time.monotonic()
        time.sleep(seconds)
        return start, time.monotonic()

    def environment(self, *names):
        return [os.environ.get(name) for name in names], "torch" in sys.modules

    def talk(self):
        sys.stdout.write("printed\n")
        sys.stderr.write("complained\n")
        warnings.warn("warned", stacklevel=1)
        os.write(1, b"written by C code\n")

    def lock(self):
        return threading.Lock()

    def broken(self):
        return Broken()

    def die(self, last_words, rank=0, others_wait_s=0.0):
        if self.context.rank == rank:
            sys.stdout.write(f"{last_words}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(others_wait_s)

    def die_slowly(self):
        """Rank 1 dies; rank 0 sees it first, and complains."""
        if self.context.rank == 0:
            raise ConnectionError("rank 1 does not answer")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    def child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def fork(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        return pid


class Closing(Worker):
    """Says that it was closed, by a file."""

    def close(self):
        Path(self.payload).touch(exist_ok=False)


class TensorWorker(Worker):
    def tensors(self, seed):
        import torch

        rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        return {"float": rows, "bf16": rows.bfloat16(), "turned": rows.T, "ids": torch.arange(3), "empty": rows[:0]}

    def put(self, key, seed) -> Ref:
        return self.context.store.put(key, self.tensors(seed))

    def put_of_rank(self, seed) -> Ref:
        return self.put(f"rank-{self.context.rank}", seed)

    def equals(self, ref: Ref, seed):
        import torch

        got, made = self.context.store.get(ref), self.tensors(seed)
        return got.keys() == made.keys() and all(
            got[name].dtype == made[name].dtype and torch.equal(got[name], made[name]) for name in made
        )

    def threads(self):
        import torch

        return torch.get_num_threads()

    def join(self):
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=self.context.rendezvous, rank=self.context.rank, world_size=self.context.world_size
        )

    def all_reduce(self, value, failing_rank=None):
        import torch
        import torch.distributed as dist

        if self.context.rank == failing_rank:
            raise ValueError("not in the mood")
        total = torch.tensor([value + self.context.rank])
        dist.all_reduce(total)
        return total.item()
