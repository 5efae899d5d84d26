"""One contract for all weight transports, with real processes; then what each promises, and whole runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console
from safetensors.torch import load_file

from digen import plugins, presets
from digen.backends.generation.diffusers import DiffusersGenerator
from digen.backends.training.local import LocalTrainer
from digen.engines.base import Engine, WorkerContext, WorkerGroup, WorkerSpec
from digen.engines.inline import InlineEngine
from digen.engines.process import ProcessEngine
from digen.engines.store import MemoryStore
from digen.errors import ConfigError, SyncError, WorkerDied, WorkerError
from digen.run import run
from digen.types import Published
from digen.weights.collective import CollectiveTransport
from digen.weights.layout import Layout
from digen.weights.state import trainable

WORKERS = Path(__file__).with_name("workers_for_transports.py")
TRANSPORTS = ("inline", "shared_memory", "safetensors", "collective")
NBYTES = 4 * (300 * 70 + 70 + 1 + 105 + 1200 * 1100 + 600)
"""Of the weights in workers_for_transports.py."""


class Rig:
    """Running workers: `trainer`, the replica `generator` (two ranks if they are processes), and two of one rank."""

    def __init__(self, engine: Engine, groups: dict[str, WorkerGroup], portal: BlockingPortal) -> None:
        self.engine, self.groups, self.portal = engine, groups, portal

    def call(self, group: str, method: str, *args: Any) -> tuple[Any, ...]:
        return self.portal.call(self.groups[group].call, method, *args)

    def begin_call(self, group: str, method: str, *args: Any) -> Future[tuple[Any, ...]]:
        return self.portal.start_task_soon(self.groups[group].call, method, *args)


@contextmanager
def running(engine: Engine, ranks: dict[str, int]) -> Iterator[Rig]:
    specs = [WorkerSpec(name, f"{WORKERS}:Side", None, ranks=n, threads=1) for name, n in ranks.items()]
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine.open(specs)) as groups:
        yield Rig(engine, dict(groups), portal)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    ranks = {"trainer": 1, "generator": 2, "generator-0": 1, "generator-1": 1}
    with running(ProcessEngine(tmp_path_factory.mktemp("store")), ranks) as rig:
        yield rig


@pytest.fixture(scope="module")
def threads() -> Iterator[Rig]:
    with running(InlineEngine(), dict.fromkeys(("trainer", "generator", "generator-0", "generator-1"), 1)) as rig:
        yield rig


class Case:
    """The trainer and some replicas, with transports that nobody has used before."""

    def __init__(self, name: str, rig: Rig, folder: Path) -> None:
        self.name, self.rig, self.folder = name, rig, folder
        self.replicas: tuple[str, ...] = ()
        self.published: list[Published] = []

    def begin(self, *overrides: str, replicas: int = 1) -> None:
        engine = "inline" if self.name == "inline" else "process"
        ranks = self.rig.groups["generator"].world_size if replicas == 1 else 1
        settings = (f"weights.transport={self.name}", f"engine.name={engine}", f"weights.dir={self.folder}")
        settings += (f"generator.replicas={replicas}", f"generator.ranks={ranks}", "weights.timeout_s=30", *overrides)
        payload = presets.payload(presets.resolve("flowgrpo", "glyph", None, ["steps=1", *settings], {}))
        self.replicas = ("generator",) if replicas == 1 else ("generator-0", "generator-1")
        for number, group in enumerate(("trainer", *self.replicas)):
            self.rig.call(group, "begin", self.folder.name, payload, 100 + number)

    def push(self, version: int, seed: int, change: str | None = None, *, settle: bool = True) -> Published:
        published: Published = self.rig.call("trainer", "push", version, seed, change, settle)[0]
        self.published.append(published)
        return published

    def pull(self, published: Published, replica: str = "generator") -> None:
        """Load on all ranks, each of which comes to the same fingerprints, of a glance and of all bytes."""
        found = self.rig.call(replica, "pull", published)
        assert found == (published.fingerprint,) * self.rig.groups[replica].world_size
        self.rig.call(replica, "proven")

    def has(self, seed: int, replica: str = "generator", dtype: str | None = None) -> bool:
        return all(self.rig.call(replica, "has", seed, dtype))

    def drop(self, published: Published) -> None:
        self.rig.engine.store.drop(published.weights)


@pytest.fixture(params=TRANSPORTS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    made = Case(
        request.param, request.getfixturevalue("threads" if request.param == "inline" else "processes"), tmp_path
    )
    yield made
    for published in made.published:
        made.drop(published)
    for group in ("trainer", *made.replicas):
        made.rig.call(group, "close")


# --- what every transport does ---


def test_weights_arrive_bit_equal_on_every_rank_version_after_version(case: Case) -> None:
    case.begin()
    for version in (1, 2, 5):
        published = case.push(version, seed=version)
        assert not case.has(version)
        assert published.weights.nbytes == pytest.approx(NBYTES, abs=64 * 8)
        case.pull(published)
        assert case.has(version)
        case.drop(published)


def test_two_replicas_pull_at_different_times_and_one_may_skip_a_version(case: Case) -> None:
    case.begin(replicas=2)
    first = case.push(1, seed=1)
    case.pull(first, "generator-0")
    second = case.push(2, seed=2)  # the copy of the first is not touched by it
    case.pull(first, "generator-1")
    assert case.has(1, "generator-0")
    assert case.has(1, "generator-1")
    case.drop(first)
    third = case.push(3, seed=3)
    case.drop(second)
    case.pull(third, "generator-1")
    case.pull(third, "generator-0")
    assert case.has(3, "generator-0")
    assert case.has(3, "generator-1")


def test_a_version_that_was_not_dropped_can_be_pulled_and_proven_however_many_came_after_it(case: Case) -> None:
    case.begin(replicas=2)
    first = case.push(1, seed=1)
    case.pull(first, "generator-0")
    for version in range(2, 14):
        later = case.push(version, seed=version)
        case.pull(later, "generator-0")
        case.drop(later)
    case.pull(first, "generator-1")
    assert case.has(1, "generator-1")


def test_replicas_may_pull_before_and_after_the_trainer_changes_its_weights(case: Case) -> None:
    case.begin(replicas=2)
    for version in (1, 2):
        published = case.push(version, version, settle=False)
        case.pull(published, "generator-0")
        assert case.has(version, "generator-0")
        if version == 1:
            case.rig.call("trainer", "settle")
        case.pull(published, "generator-1")
        assert case.has(version, "generator-1")
        case.rig.call("trainer", "settle")
        case.drop(published)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", r"1 missing \['odd'\], 0 extra"),
        ("extra", r"0 missing \[\], 1 extra \['more'\]"),
        ("renamed", r"1 missing \['odd'\], 1 extra \['ode'\]"),
        ("shape", r"odd is \(7, 3, 5\), expected \(3, 7, 5\)"),
        ("dtype", r"odd is float64, expected float32"),
        ("nothing", r"7 missing"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(case: Case, change: str, sentence: str) -> None:
    case.begin()
    wrong = case.push(1, 1, change)
    with pytest.raises(WorkerError, match=rf"generator rank \d failed in pull\(\): SyncError: .*{sentence}"):
        case.rig.call("generator", "pull", wrong)
    assert case.has(101)
    case.pull(case.push(2, 2))  # nobody waits for the pull that was not begun
    assert case.has(2)


def test_a_single_wrong_bit_is_an_error_of_whoever_has_it_from_then_on(case: Case) -> None:
    case.begin()
    case.rig.call("generator", "receive_wrong", "last.weight", 1_234_567)
    published = case.push(1, 1)
    assert set(case.rig.call("generator", "pull", published)) == {published.fingerprint}, "a glance has not seen it"
    sentence = "SyncError: generator rank . has other weights than the trainer since it pulled version 1: fingerprint"
    for method, *args in (["proven"], ["proven"], ["pull", case.push(2, 2)]):
        with pytest.raises(WorkerError, match=sentence):
            case.rig.call("generator", method, *args)


def test_what_the_trainer_cannot_send_is_an_error_on_both_sides_at_once(case: Case) -> None:
    case.begin()
    case.rig.call("trainer", "break_disk")
    sentence = r"OSError: \[Errno 28\] No space left on device"
    if case.name in ("inline", "collective"):  # sent in the call itself
        with pytest.raises(WorkerError, match=rf"failed in push\(\): {sentence}"):
            case.push(1, 1)
        return
    published = case.push(1, 1, settle=False)
    with pytest.raises(WorkerError, match=rf"SyncError: the trainer could not send its weights: {sentence}"):
        case.rig.call("generator", "pull", published)  # and not after weights.timeout_s, with other words
    with pytest.raises(WorkerError, match=sentence):
        case.rig.call("trainer", "settle")


@pytest.mark.parametrize("case", ["inline", "collective"], indirect=True)
def test_a_trainer_that_does_not_say_what_it_sent_is_an_error_after_the_set_time(case: Case) -> None:
    case.begin("weights.timeout_s=1")
    case.rig.call("trainer", "say_nothing")
    case.rig.call("generator", "pull", case.push(1, 1))
    with pytest.raises(WorkerError, match="SyncError: the trainer has not said in 1 s what the weights of version 1"):
        case.rig.call("generator", "proven")


def test_weights_of_another_version_than_was_asked_for_are_refused(case: Case) -> None:
    case.begin()
    published = replace(case.push(4, 4), version=5)
    with pytest.raises(WorkerError, match="SyncError: asked for the weights of version 5, found those of version 4"):
        case.rig.call("generator", "pull", published)
    assert case.has(101)


def test_weights_that_were_dropped_are_said_to_be_gone(case: Case) -> None:
    case.begin()
    published = case.push(1, 1)
    case.drop(published)
    case.drop(published)
    with pytest.raises(WorkerError, match="SyncError: the weights of version 1 are gone"):
        case.rig.call("generator", "pull", published)


def test_dropped_versions_are_freed_and_closing_frees_the_rest(case: Case) -> None:
    case.begin()
    published = case.push(1, 1)
    for version in range(2, 7):
        older, published = published, case.push(version, version)
        case.drop(older)
    num_published, num_kept = case.rig.call("trainer", "held")[0]
    assert num_published == 1
    assert num_kept <= 2, "the last version, and what the next one will be written to"
    case.rig.call("trainer", "close")
    store = getattr(case.rig.engine.store, "folder", None)
    assert list(case.folder.glob("*")) == []
    if store:
        assert list((store / case.folder.name).glob("weights-*")) == []


def test_bfloat16_weights_travel_as_half_the_bytes_and_are_proven_equal(case: Case) -> None:
    case.begin("weights.dtype=bfloat16")
    published = case.push(1, 1)
    assert published.weights.nbytes == pytest.approx(NBYTES / 2, abs=64 * 8)
    case.pull(published)
    assert case.has(1, dtype="bfloat16")
    assert not case.has(1)


# --- one transport at a time ---


def pulled_in_vain(case: Case, published: Published) -> str:
    with pytest.raises(WorkerError) as caught:
        case.rig.call("generator", "pull", published)
    assert case.has(101), "nothing is half-loaded"
    return str(caught.value)


def only(name: str) -> Any:
    return pytest.mark.parametrize("case", [name], indirect=True)


@only("shared_memory")
def test_a_truncated_file_in_shared_memory_names_the_tensor(case: Case) -> None:
    case.begin()
    published = case.push(1, 1)
    (file,) = (case.rig.engine.store.folder / case.folder.name).glob("weights-*")  # type: ignore[attr-defined]
    os.truncate(file, 5000)
    assert "is truncated: first.weight of version 1 ends at byte 84000, there are 4984 (7 of 7" in pulled_in_vain(
        case, published
    )
    file.unlink()
    assert "does not exist" in pulled_in_vain(case, published)


@pytest.mark.parametrize("case", ["shared_memory", "safetensors"], indirect=True)
def test_the_trainer_goes_on_while_its_weights_are_written_and_replicas_wait_for_all_of_them(case: Case) -> None:
    case.begin()
    case.rig.call("trainer", "hold")
    published = case.push(1, 1, settle=False)
    pulling = case.rig.begin_call("generator", "pull", published)
    assert case.rig.call("trainer", "busy", 0.1), "nothing is written yet, and it does something else"
    assert not pulling.done()
    assert not list(case.folder.glob("*/complete.json"))
    case.rig.call("trainer", "release")
    assert set(pulling.result()) == {published.fingerprint}
    case.rig.call("trainer", "settle")
    case.rig.call("generator", "proven")
    assert case.has(1)


@only("safetensors")
def test_a_folder_that_is_not_whole_names_what_is_wrong(case: Case) -> None:
    case.begin("weights.timeout_s=0.2")
    published = case.push(1, 1)
    (folder,) = case.folder.iterdir()
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    assert f"{file} is truncated: turned of version 1 ends at byte {len(whole)}" in pulled_in_vain(case, published)
    for begun in (whole[:100], whole[:3], b""):
        file.write_bytes(begun)
        assert f"{file} is no whole safetensors file" in pulled_in_vain(case, published)
    file.unlink()
    assert f"{file} is no whole safetensors file: FileNotFoundError" in pulled_in_vain(case, published)
    file.write_bytes(whole)
    marker = folder / "complete.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": 7}))
    assert "asked for the weights of version 1, found those of version 7" in pulled_in_vain(case, published)
    marker.unlink()
    assert f"{folder} is not complete: no complete.json after 0.2 s" in pulled_in_vain(case, published)


@only("safetensors")
def test_the_marker_is_written_after_everything_else_and_what_a_killed_run_left_is_removed(case: Case) -> None:
    case.begin()
    (case.folder / "version-000099").mkdir()
    case.push(1, 1)
    (folder,) = case.folder.iterdir()
    assert folder.name == "version-000001"
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert times.pop("complete.json") >= max(times.values())
    (name,) = times
    assert len(load_file(folder / name)) == 7


@only("collective")
def test_a_pull_goes_on_while_the_trainer_computes(case: Case) -> None:
    case.begin()
    published = case.push(1, 1)
    computing = case.rig.begin_call("trainer", "busy", 3.0)
    case.pull(published)
    done = time.monotonic()
    (end,) = computing.result()
    assert done < end
    assert case.has(1)


@only("collective")
def test_weights_do_not_change_while_they_are_sent(case: Case) -> None:
    case.begin()
    case.rig.call("trainer", "slow_down", 0.2)
    published = case.push(1, 1, settle=False)
    pulling = case.rig.begin_call("generator", "pull", published)
    while not case.rig.call("trainer", "sending")[0]:
        time.sleep(0.01)
    case.rig.call("trainer", "settle")
    assert set(pulling.result()) == {published.fingerprint}
    assert case.has(1)
    case.rig.call("trainer", "slow_down", 0.0)


def test_what_is_not_on_the_device_is_broadcast_through_a_bucket_that_is() -> None:
    """Sharded trainers gather in host memory, and an offloaded generator lies there; nccl takes tensors of the GPU."""
    config = presets.resolve("flowgrpo", "glyph", None, ["steps=1", "weights.transport=collective"], {})
    tensors = {"a": torch.randn(100)}
    layout, slots = Layout.of(1, tensors, None), []
    for device in ("cpu", "cuda:0"):
        transport = CollectiveTransport(config, WorkerContext("generator", 0, 1, device, MemoryStore()))
        slots.append(transport.slot(layout, tensors, 0, 400))
    assert slots[0] is not None
    assert slots[0].data_ptr() == tensors["a"].data_ptr()
    assert slots[1] is None


@only("collective")
def test_a_trainer_that_does_not_answer_is_an_error_after_the_set_time(case: Case) -> None:
    case.begin("weights.timeout_s=1")
    published = case.push(1, 1)
    case.rig.call("trainer", "stop_sending")
    start = time.monotonic()
    assert "SyncError: the weights of version 1 did not arrive from the trainer" in pulled_in_vain(case, published)
    assert time.monotonic() - start < 10


def test_processes_that_die_hold_up_nobody(tmp_path: Path) -> None:
    """A replica that is gone is no reason for others to wait; a trainer that dies in a broadcast is an error."""
    with running(
        ProcessEngine(tmp_path, grace_s=5), dict.fromkeys(("trainer", "generator-0", "generator-1"), 1)
    ) as rig:
        case = Case("collective", rig, tmp_path / "case")
        case.begin("weights.timeout_s=5", replicas=2)
        first = case.push(1, 1)
        case.pull(first, "generator-0")
        with pytest.raises(WorkerDied):
            rig.call("generator-0", "die")
        case.pull(case.push(2, 2), "generator-1")
        rig.call("trainer", "die_when_asked")
        third = case.push(3, 3)
        with pytest.raises(WorkerError, match="SyncError: the weights of version 3 did not arrive from the trainer"):
            rig.call("generator-1", "pull", third)
        with pytest.raises(WorkerDied, match="trainer"):
            rig.call("trainer", "push", 4, 4)
        start = time.monotonic()
    assert time.monotonic() - start < 10, "closing waits for nobody"


def test_a_replica_that_dies_in_a_broadcast_is_an_error_of_the_next_push(tmp_path: Path) -> None:
    with running(ProcessEngine(tmp_path, grace_s=5), dict.fromkeys(("trainer", "generator"), 1)) as rig:
        case = Case("collective", rig, tmp_path / "case")
        case.begin("weights.timeout_s=5")
        rig.call("generator", "die_when_asked")
        published, start = case.push(1, 1, settle=False), time.monotonic()
        with pytest.raises(WorkerDied, match="generator"):
            rig.call("generator", "pull", published)
        rig.call("trainer", "settle")  # its optimizer step does not wait
        with pytest.raises(WorkerError, match="SyncError: weights can no longer be sent to generator: "):
            case.push(2, 2)
        assert time.monotonic() - start < 10


# --- workers and runs ---


def test_a_lora_run_sends_adapters_only(make_config: Any, make_worker: Any) -> None:
    config = make_config("trainer.lora={rank: 4}")
    trainer = make_worker(LocalTrainer, config)
    adapters = trainable(trainer.model.transformer)
    assert all("lora" in name for name in adapters)
    published = trainer.push(0)
    layout = trainer.transport.read(published).layout
    assert {entry.name for entry in layout.entries} == adapters.keys()
    nbytes = sum(p.numel() * 4 for p in adapters.values())
    assert nbytes <= published.weights.nbytes < nbytes + 64 * len(adapters)
    assert published.weights.nbytes < sum(p.numel() for p in trainer.model.transformer.parameters())


def test_a_generator_whose_pull_broke_off_generates_nothing(
    make_config: Any, make_worker: Any, make_microbatch: Any
) -> None:
    config, store = make_config(f"weights.transport={WORKERS}:Breaking", "engine.name=inline"), MemoryStore()
    trainer = make_worker(LocalTrainer, config, store, "trainer")
    generator = make_worker(DiffusersGenerator, config, store, "generator")
    with pytest.raises(ConnectionError):
        generator.pull(trainer.push(0))
    for version in (0, 1):
        with pytest.raises(RuntimeError, match="the weights here are -1"):
            generator.generate(make_microbatch(config), version, (0,))


SMALL = (
    "steps=2",
    "data.prompts_per_step=2",
    "algorithm.samples_per_prompt=4",
    "sampling.num_steps=4",
    "reward={jpeg-incompressibility: {}}",
    "observe.tensorboard=false",
    "observe.grid_every=0",
    "schedule.ordered=true",
)


def train(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """The trained weights of a small run."""
    config = presets.resolve("flowgrpo", "glyph", None, [*SMALL, f"run_dir={folder}", *overrides], {})
    run(config, console=Console(quiet=True))
    return load_file(next((folder / "checkpoints").iterdir()) / "weights.safetensors")


@pytest.mark.parametrize(
    ("plugin", "error", "sentence"),
    [
        ("Late", SyncError, "generator rank 0 has other weights than the trainer after pulling version 1"),
        (
            "Flipping",
            WorkerError,
            r"generate\(\): SyncError: generator rank 0 has other .* pulled version 1",
        ),
        ("Renaming", WorkerError, r"pull\(\): SyncError: cannot load weights: 1 missing .* 1 extra .*_old"),
        ("Breaking", WorkerError, r"pull\(\): ConnectionError: the other side is gone"),
    ],
)
def test_wrong_weights_end_the_run(tmp_path: Path, plugin: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        train(tmp_path / "run", "engine.name=inline", f"weights.transport={WORKERS}:{plugin}")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
def test_a_run_comes_to_the_same_weights_bit_for_bit_with_every_transport(tmp_path: Path) -> None:
    expected = train(tmp_path / "inline", "engine.name=inline", "steps=3")
    for name, ranks in (("shared_memory", 1), ("safetensors", 1), ("collective", 1), ("collective", 2)):
        folder = tmp_path / f"{name}-{ranks}"
        found = train(folder, "steps=3", f"weights.transport={name}", f"generator.ranks={ranks}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        assert not (folder / "weights").exists(), "versions are gone when the run is over"


def test_threads_share_memory_and_processes_shared_memory_unless_told_otherwise(tmp_path: Path) -> None:
    from digen.weights.base import make_transport

    config = presets.resolve("flowgrpo", "glyph", None, ["steps=1"], {})
    here = WorkerContext("trainer", 0, 1, "cpu", MemoryStore())
    assert type(make_transport(config, here)).__name__ == "InlineTransport"
    assert type(make_transport(config, replace(here, shared_dir=tmp_path))).__name__ == "SharedMemoryTransport"
    assert {plugin.name for plugin in plugins.available("transports")} == set(TRANSPORTS)


BOTH_ON_GPUS = (
    "generator.devices=cuda:1-2", "generator.replicas=2", "trainer.devices=cuda:0-2", "trainer.ranks=3",
    "trainer.backend=fsdp",
)  # fmt: skip


@pytest.mark.parametrize("generators", ["cuda:3-4", "cuda:3,4,5,6"])
def test_a_gpu_for_each_rank_is_what_a_collective_needs(generators: str) -> None:
    more = [f"generator.devices={generators}", "weights.transport=collective"]
    config = presets.resolve("flowgrpo", "glyph", None, ["steps=1", *BOTH_ON_GPUS, *more], {})
    assert config.weights.transport == "collective"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["weights.transport=shared-memory"], "Did you mean 'shared_memory'"),
        (["weights.transport=inline"], "weights.transport=inline needs engine.name=inline, got process"),
        (["weights.transport=collective", "engine.name=inline"], "needs engine.name=process, got inline"),
        (["weights.transport=shared_memory", "engine.name=inline"], "needs engine.name=process, got inline"),
        (["weights.transport=collective", "trainer.devices=cuda"], "generator.devices=cpu, trainer.devices=cuda"),
        ([*BOTH_ON_GPUS, "weights.transport=collective"], "cuda:1, cuda:2 would carry more than one worker"),
        ([*BOTH_ON_GPUS, "generator.devices=cuda:3", "weights.transport=collective"], "cuda:3 would carry more"),
        (["weights.dtype=bfloat16", "trainer.lora={}"], "weights.dtype=bfloat16 is for full weights"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_is_loaded(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        presets.resolve("flowgrpo", "glyph", None, ["steps=1", *overrides], {})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("size", [64, 512, 4096, 1 << 20])
def test_the_cuts_of_a_layout_cover_every_byte_once_and_never_more_than_they_may(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 3000, (60,), generator=draw).tolist()
    tensors = {
        f"t{k}": torch.randn(n, generator=draw).to((torch.float32, torch.bfloat16)[k % 2])
        for k, n in enumerate(lengths)
    }
    layout = Layout.of(1, tensors, None)
    cuts = list(layout.cuts(size))
    assert all(0 < end - start <= size for start, end in cuts)
    assert all(0 <= after - end < 64 for (_, end), (after, _) in pairwise(cuts))
    assert (cuts[0][0], cuts[-1][1]) == (0, layout.nbytes)
    loaded = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors.items()}
    for start, end in cuts:
        piece = torch.zeros(end - start, dtype=torch.uint8)
        layout.pack(tensors, piece, start)
        slot = layout.slot(loaded, start, end)
        if slot is None:
            layout.unpack(piece, loaded, start)
        else:
            slot.copy_(piece)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_layout_comes_back_from_json_and_anything_else_is_refused() -> None:
    layout = Layout.of(3, {"a": torch.zeros(3, 2), "b": torch.zeros(5).bfloat16()}, None)
    assert Layout.from_json(layout.as_json()) == layout
    assert [(entry.start, entry.end) for entry in layout.entries] == [(0, 24), (64, 74)]
    for text in ("", "{}", "[1]", '{"version": 1, "entries": [{}]}'):
        with pytest.raises(SyncError, match="cannot be read"):
            Layout.from_json(text)


# --- speed ---

ROOT = WORKERS.parents[1]
TARGETS = {"shared_memory": 0.5, "collective": 0.3}
"""Of the throughput of a memcpy, with the weights of a transformer."""


def measured(folder: Path) -> list[dict[str, Any]]:
    """A transformer; a thousand adapters."""
    document = json.loads((folder / "transports.json").read_text())
    return [document, *document.get("more", ())]


def shares(document: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Throughput of a whole sync by that of a memcpy, and the share of the sync that is fingerprints."""
    found = document["seconds"].items()
    return {name: (s["memcpy"] / s["sync"], s["fingerprints"] / s["sync"]) for name, s in found}


def test_the_documented_throughputs_reach_their_targets_and_fingerprints_cost_at_most_2_percent() -> None:
    page = (ROOT / "docs" / "transports.md").read_text()
    table = page.split("<!-- results of transports.py -->")[1].split("<!-- end of transports.py -->")[0]
    documents = measured(ROOT / "docs" / "benchmarks")
    found = [shares(document) for document in documents]
    assert all(document["nbytes"] >= 400e6 for document in documents)
    assert all(found[0][name][0] >= target for name, target in TARGETS.items()), found
    assert all(cost <= 0.02 for shared in found for _, cost in shared.values()), found
    for name in TRANSPORTS:
        assert all(f"| {name} | " in table and f" | {shared[name][0]:.0%} | " in table for shared in found)


@pytest.mark.slow
def test_transports_are_as_fast_here_as_a_busy_machine_allows(tmp_path: Path) -> None:
    """The same benchmark, smaller: with others at work the two sides do not get a core each, hence the slack."""
    command = [sys.executable, "benchmarks/transports.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [shares(document) for document in measured(tmp_path)]
    assert len(found) == 2
    assert all(found[0][name][0] >= target / 3 for name, target in TARGETS.items()), found
    assert all(cost <= 0.06 for shared in found for _, cost in shared.values()), found
    assert (tmp_path / "transports.png").is_file()
