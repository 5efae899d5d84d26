"""What a call alone needs lies in host memory in between (P35): nothing is lost, nothing is left on the device.

On a CPU the device's memory is the host's, so a loaded copy is one more copy in the same memory: the same code runs as
on a GPU, and each copy can be told from what it was made of, and counted when it is gone.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from digen import credit, plugins
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.offload import Offloaded, give_back
from digen.backends.training.local import LocalTrainer
from digen.config import RunConfig, doubts
from digen.engines.base import WorkerContext, WorkerSpec
from digen.engines.store import MemoryStore, shared_folder
from digen.observe.files import read_spans
from digen.presets import payload, resolve
from digen.run import run
from digen.types import MicroBatch, Prompt, Rollout
from digen.weights.state import trainable

HERE = Path(__file__)
OFFLOAD, TAG = "generator.offload_between_calls=true", "schedule.tag=static(1)"
LORA = "trainer.lora={rank: 4}"
PROMPT = Prompt(3, 'a sign that says "OPEN"')
Tensors = Mapping[str, torch.Tensor]


def small(*overrides: str) -> RunConfig[Any]:
    settings = ["steps=3", "algorithm.samples_per_prompt=3", "sampling.num_steps=3", "algorithm.loss.kl=0.1"]
    settings += ["schedule.assist=none", "algorithm.steps.type=all-but-last", "trainer.learning_rate=1e-2"]
    settings += ["observe.tensorboard=false", "observe.grid_every=0", "algorithm.advantage.scale=group"]
    return resolve("flowgrpo", "glyph", None, [*settings, *overrides], {})


def microbatch(version: int = 0) -> MicroBatch:
    return MicroBatch(version, 0, (PROMPT,), 3, 0)


class Watch:
    """What a worker has on its device: copies that are there during its calls, and those that are not gone after."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        resting = [*worker.offloaded.tensors, *(worker.copy.offloaded.tensors if getattr(worker, "copy", None) else ())]
        self.resting: list[torch.Tensor] = resting
        self.host = [tensor.data_ptr() for tensor in resting]
        self.seen: list[StorageWeakRef] = []
        self.most = 0
        decode = worker.model.decode

        def watched(*args: Any) -> Any:
            self.note()
            return decode(*args)

        worker.model.decode = watched

    def note(self) -> None:
        copied = [t for t, there in zip(self.resting, self.host, strict=True) if t.data_ptr() != there]
        self.seen += [StorageWeakRef(t.untyped_storage()) for t in copied]
        self.most = max(self.most, sum(t.nbytes for t in copied))

    def left(self) -> int:
        """Copies that are alive, and tensors that do not lie where they lay at first."""
        gc.collect()
        alive = sum(not ref.expired() for ref in self.seen)
        moved = sum(t.data_ptr() != there for t, there in zip(self.resting, self.host, strict=True))
        return alive + moved


# --- P35: after sleep and wake the generator ran on missing or stale weights ---


@pytest.mark.parametrize("lora", [[], [LORA]], ids=["full", "adapters"])
def test_p35_offload_and_onload_lose_nothing_and_weights_that_came_meanwhile_are_used(
    lora: list[str], make_worker: Any, make_scored: Any
) -> None:
    store = MemoryStore()
    plain, config = small(*lora, TAG), small(*lora, OFFLOAD)
    trainer = make_worker(LocalTrainer, plain, store, "trainer")
    awake, asleep = (make_worker(DiffusersGenerator, c, store, n) for c, n in ((plain, "awake"), (config, "asleep")))
    watch = Watch(asleep)

    def latents(generator: Any, version: int) -> torch.Tensor:
        found: torch.Tensor = store.get(generator.generate(microbatch(), version, (0, 1, 2)).trajectory)["latents"]
        return found

    before = None
    for version in range(5):
        if version:
            trainer.accumulate(make_scored(plain, trainer, microbatch(version - 1), version - 1), 0, 6.0, last=True)
            assert trainer.optimizer_step(1.0).applied
            published = trainer.push(version)
            for generator in (awake, asleep):
                generator.pull(published)
        assert equal(trainable(asleep.model.transformer), trainer.state())
        made = latents(asleep, version)
        assert torch.equal(made, latents(asleep, version)), "offload and onload alone change nothing"
        assert torch.equal(made, latents(awake, version))
        assert before is None or not torch.equal(made, before), "the update is in the samples"
        before = made
        assert watch.left() == 0, "no copy is left, and the weights are where they were"
    assert len(watch.seen) == 10 * len(watch.resting)
    assert watch.most == sum(t.nbytes for t in watch.resting)
    parts = [asleep.model.transformer, asleep.decoder]
    here = {id(t) for t in watch.resting}
    assert all(id(t) in here for part in parts for t in chain(part.parameters(), part.buffers()))


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_call_that_fails_leaves_nothing_on_the_device(make_worker: Any) -> None:
    generator = make_worker(DiffusersGenerator, small(OFFLOAD))
    watch = Watch(generator)
    weights = {n: p.clone() for n, p in trainable(generator.model.transformer).items()}

    def fails(*_: Any) -> None:
        watch.note()
        raise MemoryError("no room")

    generator.model.decode = fails
    with pytest.raises(MemoryError, match="no room"):
        generator.generate(microbatch(), 0, (0, 1, 2))
    assert watch.most > 0
    assert watch.left() == 0
    assert equal(weights, trainable(generator.model.transformer))


def test_p35_a_thousand_cycles_leave_no_more_than_one() -> None:
    module = torch.nn.Linear(50, 60)
    offloaded, wanted = Offloaded([module], torch.device("cpu")), {n: t.clone() for n, t in module.state_dict().items()}
    there, copies = [t.data_ptr() for t in offloaded.tensors], []
    for cycle in range(1000):
        if cycle % 10 == 0:  # new weights, which are loaded where they stay
            wanted = {name: torch.randn_like(w) for name, w in wanted.items()}
            module.load_state_dict(wanted)
        with offloaded.loaded():
            assert equal(wanted, module.state_dict())
            copies += [StorageWeakRef(t.untyped_storage()) for t in offloaded.tensors]
            assert sum(not copy.expired() for copy in copies[-10:]) == 2
        assert all(copy.expired() for copy in copies[-2:])
    assert all(copy.expired() for copy in copies)
    assert [t.data_ptr() for t in offloaded.tensors] == there
    assert equal(wanted, module.state_dict())


def test_a_device_that_has_no_room_for_all_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(3, 4)
    module.register_buffer("more", torch.ones(2))
    offloaded, tensors = Offloaded([module, module], torch.device("cpu")), dict(module.state_dict())
    assert len(offloaded.tensors) == 3, "each once, whatever shares it"
    there, moved = [t.data_ptr() for t in offloaded.tensors], []
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(moved) == 2:
            raise MemoryError("full")
        moved.append(plain(tensor, *args, **kwargs))
        return moved[-1]

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(MemoryError, match="full"), offloaded.loaded():
        pass
    assert len(moved) == 2
    assert [t.data_ptr() for t in offloaded.tensors] == there
    assert equal(tensors, module.state_dict())


@pytest.mark.parametrize("shared", [True, False])
def test_groups_that_share_a_device_give_its_memory_back_after_calls_and_steps(
    shared: bool, make_worker: Any, make_scored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.device] = []
    monkeypatch.setattr("digen.backends.worker.give_back", given.append)
    config, counts = small(TAG, *([OFFLOAD] if shared else [])), []
    generator, trainer = (make_worker(kind, config) for kind in (DiffusersGenerator, LocalTrainer))
    counts.append(len(given))
    generator.generate(microbatch(), 0, (0,))
    counts.append(len(given))
    scored = make_scored(config, trainer, microbatch())
    counts.append(len(given))
    trainer.accumulate(scored, 0, 6.0, last=True)
    trainer.optimizer_step(1.0)
    counts.append(len(given))
    assert counts == ([2, 3, 4, 5] if shared else [0, 0, 0, 0])
    assert set(given) <= {torch.device("cpu")}


def test_memory_is_given_back_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    for device in ("cpu", "cuda:1"):
        give_back(torch.device(device))
    assert calls == ["emptied"]


def test_a_helping_generator_computes_the_same_gradients_from_host_memory(make_worker: Any, make_scored: Any) -> None:
    handed = []
    for settings in ([], [OFFLOAD]):
        config, store = small("schedule.assist=generator", *settings), MemoryStore()
        generator = make_worker(DiffusersGenerator, config, store)
        for _ in range(2):  # gradients that are handed over are gone; those that come after are not added to them
            scored = make_scored(config, generator, microbatch())
            for last in (False, True):
                generator.accumulate(scored, 0, 6.0, last=last)
            handed.append(store.get(generator.hand_gradients()))
    assert equal(handed[0], handed[1])
    assert all(equal(handed[0], other) for other in handed[2:])
    assert any(g.any() for g in handed[0].values())
    here = {id(t) for t in generator.offloaded.tensors}
    assert all(id(p) in here for p in generator.base.parameters()), "the base of the KL goes too"


# --- one contract for all backends, on one rank ---


class Ranks:
    """A worker in a process of its own, which is watched there."""

    def __init__(self, values: Any, context: WorkerContext) -> None:
        kind: Any = plugins.find("trainers", values["trainer"]["backend"])
        self.worker = kind({**values, "reward": {}}, context)
        self.worker.load()
        self.watch = Watch(self.worker)

    def samples(self, version: int) -> torch.Tensor:
        shard = self.worker.generate(microbatch(), version, (0, 1, 2))
        found: torch.Tensor = self.worker.context.store.get(shard.trajectory)["latents"].clone()
        return found

    def rows(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Which of these rows this rank makes."""
        made: tuple[int, ...] = self.worker.generate(microbatch(), 0, asked).rows
        return made

    def train(self, version: int) -> None:
        rollout = Rollout(microbatch(), version, (self.worker.generate(microbatch(), version, (0, 1, 2)),), "trainer")
        scored = credit.credit(rollout, [0.0, 1.0, 2.0], self.worker.algorithm)
        self.worker.accumulate(scored, 0, 6.0, last=True)
        assert self.worker.optimizer_step(1.0).applied

    def left(self) -> tuple[int, int, int]:
        """Copies that were made, bytes of them at once, those that are left."""
        return len(self.watch.seen), self.watch.most, self.watch.left()


BACKENDS = {
    "local": [],
    "fsdp-sharded": ["trainer.backend=fsdp"],
    "fsdp-gathered": ["trainer.backend=fsdp", "trainer.generate_with=gathered"],
    "fsdp-copy": ["trainer.backend=fsdp", "trainer.generate_with=copy"],
    "fsdp-copy-adapters": ["trainer.backend=fsdp", "trainer.generate_with=copy", LORA],
    "deepspeed-2": ["trainer.backend=deepspeed", "trainer.zero_stage=2"],
    "deepspeed-3": ["trainer.backend=deepspeed", "trainer.zero_stage=3"],
    "deepspeed-3-adapters": ["trainer.backend=deepspeed", "trainer.zero_stage=3", LORA],
}


@pytest.fixture(scope="module")
def begin(warm: Any) -> Iterator[Callable[..., Any]]:
    engine, made = warm(), []

    def make(config: RunConfig[Any], ranks: int = 1) -> Any:
        made.append(config)
        return engine.begin(WorkerSpec("trainer", f"{HERE}:Ranks", payload(config), ranks), f"offload-{len(made)}")

    with shared_folder(engine.store.folder):
        yield make


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_every_trainer_samples_as_a_generator_does_and_leaves_its_memory_to_updates(
    name: str, begin: Any, make_worker: Any
) -> None:
    """Its decoder, and a copy to generate with, are there during the calls that sample alone."""
    call = begin(small(*BACKENDS[name], TAG))
    generator, made = make_worker(DiffusersGenerator, small(*BACKENDS[name][2:], OFFLOAD)), []
    for version in range(3):
        if version == 0:
            shard = generator.generate(microbatch(), 0, (0, 1, 2))
            made.append(generator.context.store.get(shard.trajectory)["latents"])
        made += [call("samples", version)[0], call("samples", version)[0]]
        call("train", version)
    assert float((made[0] - made[1]).abs().max()) <= 1e-5
    assert all(torch.equal(made[k], made[k + 1]) for k in (1, 3, 5))
    assert not torch.equal(made[1], made[3])
    copies, most, left = call("left")[0]
    assert copies > 0
    assert most > (4e6 if "copy" in name else 0), "the copy goes too: 1.06 M float32 parameters"
    assert left == 0


@pytest.mark.slow
def test_a_rank_without_rows_takes_its_part_in_what_the_others_need(begin: Any) -> None:
    """The weights of a copy are gathered from all ranks; one that left them alone would let the others wait."""
    call = begin(small("trainer.backend=fsdp", "trainer.ranks=2", "trainer.generate_with=copy", TAG), ranks=2)
    assert call("rows", (1,)) == ((1,), ())
    assert call("rows", (0, 1)) == ((0,), (1,))


# --- whole runs, and what is said of them ---


@pytest.mark.parametrize("mode", ["naive", "pipelined"])
def test_a_run_whose_groups_take_turns_on_a_device_learns_the_same_to_the_bit(mode: str, tmp_path: Path) -> None:
    weights = []
    schedule = ["schedule.tag=none"] if mode == "naive" else [TAG, "schedule.ordered=true"]
    for name, settings in (("plain", ()), ("offloaded", (OFFLOAD,))):
        more = ["data.prompts_per_step=2", "reward={jpeg-compressibility: {}}", "engine.name=inline"]
        folder = tmp_path / name
        config = small(*more, f"schedule.mode={mode}", *schedule, *settings, f"run_dir={folder}", "steps=2")
        run(config, console=Console(quiet=True))
        weights.append(load_file(next((folder / "checkpoints").iterdir()) / "weights.safetensors"))
    assert equal(*weights)


def test_the_context_switch_is_part_of_what_generating_and_assisting_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, switch_s = Offloaded.loaded, 0.3

    @contextmanager
    def slowly(offloaded: Offloaded) -> Iterator[None]:
        time.sleep(switch_s)
        with plain(offloaded):
            yield

    monkeypatch.setattr(Offloaded, "loaded", slowly)
    small_run = ["data.prompts_per_step=3", "reward={jpeg-compressibility: {}}", "engine.name=inline", "steps=1"]
    run(small(*small_run, OFFLOAD, TAG, f"run_dir={tmp_path / 'run'}"), console=Console(quiet=True))
    spans = [s for s in read_spans(tmp_path / "run" / "events.jsonl") if s.kind in ("generate", "assist")]
    assert {s.kind for s in spans} == {"generate", "assist"}
    assert min(s.end - s.start for s in spans) >= switch_s


def test_offload_within_host_memory_is_doubted_by_name() -> None:
    (doubt,) = doubts(small(OFFLOAD))
    assert "generator.offload_between_calls=true frees nothing with generator.devices=cpu" in doubt
    assert not doubts(small("generator.devices=cuda", OFFLOAD))
