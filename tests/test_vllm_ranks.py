"""The generator `vllm-omni` over several devices: what each rank of an engine proves, and what a dead engine does.

On a stand-in, and on tensors alone; the real engine over two processes is in `tests/vllm/test_parallel.py`.
"""

import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from digen import plugins
from digen.backends.generation import vllm_engine
from digen.backends.generation.vllm_adapters import bind_adapters, write_adapters
from digen.backends.generation.vllm_engine import EngineError, report
from digen.backends.generation.vllm_omni import VllmOmniGenerator, seeing
from digen.backends.generation.vllm_weights import Update
from digen.config import GeneratorConfig, RunConfig
from digen.conflicts import vllm_conflicts
from digen.engines.base import WorkerContext
from digen.engines.store import MemoryStore
from digen.errors import ConfigError, SyncError
from digen.presets import payload, resolve

STANDIN = f"{Path(__file__).parent}/vllm_standin.py"
BACKEND = f"{STANDIN}:Generator"

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def standin() -> Iterator[Any]:
    """What `import vllm_omni` finds in a test."""
    module = sys.modules[plugins.find("generators", BACKEND).__module__]
    module.install()
    yield module
    module.remove()


# --- weights ---

WHOLE = {
    "block.to_q.weight": (4, 6), "block.to_k.weight": (4, 6), "block.to_v.weight": (4, 6), "block.to_q.bias": (4,),
    "block.to_k.bias": (4,), "block.to_v.bias": (4,), "up.weight": (8, 2), "down.weight": (2, 8), "norm.weight": (3,),
}  # fmt: skip
SHARDS = {"to_qkv": ("to_q", "to_k", "to_v")}


class Divided(nn.Module):
    """What a rank of two has of a transformer: half of three packed projections, of rows, of columns, and one whole."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"to_qkv.weight": (6, 6), "to_qkv.bias": (6,), "up": (4, 2), "down": (2, 4), "norm": (3,)}
        empty = {name: nn.Parameter(torch.zeros(size), requires_grad=False) for name, size in sizes.items()}
        self.block, self.up, self.down, self.norm = nn.Module(), nn.Module(), nn.Module(), nn.Module()
        self.block.to_qkv = nn.Module()
        self.block.to_qkv.weight, self.block.to_qkv.bias = empty["to_qkv.weight"], empty["to_qkv.bias"]
        self.up.weight, self.down.weight, self.norm.weight = empty["up"], empty["down"], empty["norm"]

    def load(self, rank: int, tensors: dict[str, Tensor]) -> None:
        """As an engine does: each rank cuts its own part out of whole tensors."""
        for leaf in ("weight", "bias"):
            parts = [tensors[f"block.to_{letter}.{leaf}"].chunk(2)[rank] for letter in "qkv"]
            getattr(self.block.to_qkv, leaf).copy_(torch.cat(parts))
        self.up.weight.copy_(tensors["up.weight"].chunk(2)[rank])
        self.down.weight.copy_(tensors["down.weight"].chunk(2, dim=1)[rank])
        self.norm.weight.copy_(tensors["norm.weight"])


def updated(rank: int, disturb: Callable[[Divided], object] = lambda module: None, loaded_as: int | None = None) -> Any:
    module, own = Divided(), rank if loaded_as is None else loaded_as
    tensors = {name: torch.randn(size) for name, size in WHOLE.items()}
    update = Update(7, module, lambda named: module.load(own, dict(named)), SHARDS, rank=rank, num_ranks=2)
    update.take(tensors)
    disturb(module)
    return update.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_proves_its_own_part_of_every_parameter(rank: int) -> None:
    assert updated(rank) == {"version": 7, "tensors": len(WHOLE), "parameters": 5}
    with pytest.raises(SyncError, match=r"4 parameters are not what was given: block\.to_qkv\.weight"):
        updated(rank, loaded_as=1 - rank)


@pytest.mark.parametrize("name", [name for name, _ in Divided().named_parameters()])
def test_one_wrong_number_in_any_part_is_found(name: str) -> None:
    def disturb(module: Divided) -> None:
        dict(module.named_parameters())[name].view(-1)[-1] += 1

    with pytest.raises(SyncError, match=f"1 parameters are not what was given: {name}"):
        updated(1, disturb)


def test_a_parameter_of_another_size_is_not_taken_for_a_part() -> None:
    module = nn.Sequential(nn.Linear(4, 3, bias=False)).requires_grad_(False)
    update = Update(0, module, lambda named: None, {}, rank=0, num_ranks=2)
    update.take({"0.weight": torch.zeros(5, 4)})
    with pytest.raises(SyncError, match=r"not what was given: 0\.weight"):
        update.finish()


# --- adapters ---


class Manager:
    """The engine's manager of adapters: it takes what fits nowhere without a word.

    Of q, k and v a rank computes with half of the outputs, in one packed layer; of `to_out` with half of the inputs.
    """

    def __init__(self, rank: int = 0, binds: Callable[[str], bool] = lambda module: True, factor: float = 1.0) -> None:
        self.rank, self.binds, self.factor, self.active = rank, binds, factor, None
        self._registered_adapters: dict[int, Any] = {}
        self._lora_modules: dict[str, Any] = {}

    def list_adapters(self) -> list[int]:
        return list(self._registered_adapters)

    def remove_adapter(self, number: int) -> None:
        del self._registered_adapters[number]

    def add_adapter(self, request: Any) -> None:
        given = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        settings = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / settings["r"] * self.factor
        loras = {}
        for name, tensor in given.items():
            module, _, which = name.removeprefix("base_model.model.").partition(".lora_")
            if which.startswith("A"):
                second = given[name.replace("lora_A", "lora_B")] * scale
                loras[module] = SimpleNamespace(lora_a=tensor, lora_b=second)
        self._registered_adapters[request.lora_int_id] = SimpleNamespace(loras=loras)

    def set_active_adapter(self, request: Any) -> None:
        self.active = request and request.lora_int_id
        if request is None:
            return
        for module, found in self._registered_adapters[request.lora_int_id].loras.items():
            parent, _, leaf = module.rpartition(".")
            packed = leaf in SHARDS["to_qkv"]
            a = found.lora_a if packed else found.lora_a.chunk(2, dim=1)[self.rank]
            b = found.lora_b.chunk(2)[self.rank] if packed else found.lora_b
            name = f"transformer.{parent}.to_qkv" if packed else f"transformer.{module}"
            if self.binds(module):
                layer = self._lora_modules.setdefault(name, SimpleNamespace(lora_a_stacked={}, lora_b_stacked={}))
                place = SHARDS["to_qkv"].index(leaf) if packed else 0
                layer.lora_a_stacked[place] = nn.functional.pad(a, (0, 0, 0, 6))[None, None]  # room for rank 8
                layer.lora_b_stacked[place] = nn.functional.pad(b, (0, 6))[None, None]


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[str, list[str]]:
    tensors = {}
    for module in ("transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_out.0"):
        tensors[f"{module}.lora_A.default.weight"] = torch.randn(2, 8)
        tensors[f"{module}.lora_B.default.weight"] = torch.randn(8, 2)
    return str(tmp_path), write_adapters(tmp_path, tensors, 2, 4.0, {"attn.to_out.0": "attn.to_out"})


def test_adapters_are_named_as_the_engine_names_its_modules(adapters: tuple[str, list[str]]) -> None:
    folder, modules = adapters
    assert modules == ["transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_out"]
    names = load_file(Path(folder) / "adapter_model.safetensors").keys()
    assert {name.removeprefix("base_model.model.") for name in names} == {
        f"{module}.lora_{which}.weight" for module in modules for which in "AB"
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_computes_with_its_part_of_the_adapters(adapters: tuple[str, list[str]], rank: int) -> None:
    folder, modules = adapters
    manager = Manager(rank)
    assert bind_adapters(manager, folder, 4, modules, SHARDS, rank, 2).lora_int_id == manager.active == 5
    assert bind_adapters(manager, folder, 4, modules, SHARDS, rank, 2).lora_int_id == 5
    with pytest.raises(SyncError, match=r"the adapter of .*to_k is not what was given"):
        bind_adapters(Manager(1 - rank), folder, 4, modules, SHARDS, rank, 2)


def test_adapters_that_bind_to_nothing_or_to_other_numbers_are_errors(adapters: tuple[str, list[str]]) -> None:
    folder, modules = adapters
    with pytest.raises(SyncError, match="2 of 1 adapted modules were bound"):
        bind_adapters(Manager(), folder, 4, modules[:1], SHARDS, 0, 2)
    with pytest.raises(SyncError, match=r"no layer of the engine computes with the adapter of .*to_k"):
        bind_adapters(Manager(binds=lambda module: False), folder, 4, modules, SHARDS, 0, 2)
    with pytest.raises(SyncError, match=r"no layer of the engine computes with the adapter of .*to_out"):
        bind_adapters(Manager(binds=lambda module: "to_k" in module), folder, 4, modules, SHARDS, 0, 2)
    with pytest.raises(SyncError, match="is not what was given"):
        bind_adapters(Manager(factor=1.1), folder, 4, modules, SHARDS, 0, 2)
    with pytest.raises(SyncError, match="without adapters"):
        bind_adapters(None, folder, 4, modules, SHARDS)


# --- replies ---


def test_every_rank_must_say_the_same() -> None:
    one, other = {"digen": "mine", "a": 1}, {"digen": "mine", "a": 2}
    assert report("mine", [[[one, one]]], 2) == {"a": 1}
    with pytest.raises(EngineError, match="1 replies of 2 ranks"):
        report("mine", [[[one]]], 2)
    with pytest.raises(EngineError, match=r"one rank says .*1.* another one .*2"):
        report("mine", [[[one, other]]], 2)


def test_an_error_on_another_rank_than_the_first_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = importlib.import_module("digen.backends.generation.vllm_worker")

    def digen_begin() -> dict[str, Any]:
        return {"adapted": {}}

    def digen_fails() -> dict[str, Any]:
        raise ValueError("no such thing")

    monkeypatch.setattr(worker, "of_all_ranks", lambda mine: [mine, {"error": "OSError: no memory"}])
    with pytest.raises(SyncError, match=r"^rank 1: OSError: no memory$"):
        worker.reporting(digen_begin)()
    monkeypatch.setattr(worker, "of_all_ranks", lambda mine: [{"digen": "digen_fails"}, mine])
    with pytest.raises(SyncError, match=r"^rank 1: ValueError: no such thing$"):
        worker.reporting(digen_fails)()


# --- engines that die ---


@pytest.fixture
def engine(make_config: Make, make_worker: Make) -> Iterator[Any]:
    small = ("algorithm.samples_per_prompt=4", "sampling.num_steps=4", "schedule.assist=none")
    kind: Any = plugins.find("generators", BACKEND)
    worker = make_worker(kind, make_config(*small, f"generator.backend={BACKEND}"), None, "generator-0")
    yield worker.engine
    worker.close()


def test_an_engine_that_dies_between_two_calls_is_noticed(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    monkeypatch.setattr(vllm_engine, "WATCH_S", 0.01)
    said, told = [], threading.Event()
    engine._lost = lambda why: (said.append(why), told.set())
    engine._engine.dead = True
    assert told.wait(30)
    assert said == ["its processes have died: Stage-0 has no live replica"]
    with pytest.raises(EngineError, match="the engine has ended: its processes have died"):
        engine.call("digen_passes")


def test_an_engine_that_dies_in_a_call_is_told_before_the_call_fails(engine: Any) -> None:
    said: list[str] = []
    engine._lost = said.append
    with pytest.raises(EngineError, match="no_such_method"):
        engine.call("no_such_method")
    assert not said
    engine._engine.dead = True
    with pytest.raises(EngineError, match="the engine has ended: its processes have died"):
        engine.call("no_such_method")
    assert len(said) == 1


# --- devices ---


def config(*settings: str) -> RunConfig[Any]:
    return resolve("flowgrpo", "glyph", None, [f"generator.backend={BACKEND}", "schedule.assist=none", *settings], {})


def generator(device: str, rank: int, world_size: int, *settings: str) -> VllmOmniGenerator:
    context = WorkerContext("generator-0", rank, world_size, device, MemoryStore())
    return VllmOmniGenerator(payload(config(*settings)), context)


def test_the_devices_of_a_group_are_dealt_out_to_its_ranks() -> None:
    four = ("generator.devices=cuda:4-7", "generator.ranks=2", "generator.tensor_parallel=2")
    assert [generator(f"cuda:{4 + rank}", rank, 2, *four).devices for rank in (0, 1)] == [
        ("cuda:4", "cuda:6"),
        ("cuda:5", "cuda:7"),
    ]
    assert generator("cuda:3", 3, 4, "generator.devices=cuda:0-3", "generator.ranks=4").devices == ("cuda:3",)
    assert generator("cpu", 0, 1, "generator.tensor_parallel=2").devices == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("device", "settings", "in_process"),
    [
        ("cpu", (), True),
        ("cuda:0", ("generator.devices=cuda:0",), True),
        ("cuda:1", ("generator.devices=cuda:1",), False),
        ("cpu", ("generator.tensor_parallel=2",), False),
    ],
)
def test_an_engine_of_several_devices_or_of_another_than_the_first_has_processes_of_its_own(
    device: str, settings: tuple[str, ...], in_process: bool
) -> None:
    assert generator(device, 0, 1, *settings).in_process == in_process


def test_the_engine_sees_its_own_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(*devices: str) -> str | None:
        with seeing(devices):
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen("cuda:1", "cuda:3") == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert seen("cpu", "cpu") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    assert seen("cuda:2", "cuda:0") == "GPU-7,4"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,GPU-7"


def conflicts(model: str, **settings: Any) -> list[str]:
    found = resolve("flowgrpo", model, None, [f"data.prompts={Path(__file__).parent}/prompts/ocr_test.txt"], {})
    generator = GeneratorConfig.model_validate({**found.generator.model_dump(), "backend": "vllm-omni", **settings})
    return list(vllm_conflicts(found.model_copy(update={"generator": generator})))


@pytest.mark.parametrize("model", ["qwen-image", "flux1-dev", "sd3.5-medium", "sd3.5-large"])
def test_presets_are_for_this_generator_too(model: str) -> None:
    assert conflicts(model) == []
    assert conflicts(model, ranks=1) == []


def test_several_devices_of_one_rank_are_one_engine() -> None:
    def parallel(**settings: Any) -> int:
        return GeneratorConfig.model_validate({"backend": "vllm-omni", **settings}).devices_per_rank

    assert parallel() == parallel(devices="cuda", ranks=2) == parallel(devices="cuda:0-3", ranks=4) == 1
    assert parallel(devices="cuda:0-3") == 4
    assert parallel(devices="cuda:0-3", ranks=2) == parallel(tensor_parallel=2) == 2
    assert parallel(devices="cuda:0-3", backend="diffusers") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"devices": "cuda:0-3", "ranks": 3},
            "are 4 devices, which 3 engines of 1 each cannot .* allowed: 3",
        ),
        (
            {"devices": "cuda:0-3", "tensor_parallel": 2},
            "1 engines of 2 each cannot share; allowed: 2 devices",
        ),
        ({"devices": "cuda", "tensor_parallel": 2, "ranks": 2}, "needs devices by name, got cuda; .* cuda:0-3"),
    ],
)
def test_devices_that_cannot_be_shared_evenly_are_refused(settings: dict[str, Any], said: str) -> None:
    (sentence,) = conflicts("glyph", **settings)
    assert re.search(said, sentence)


def test_another_generator_does_not_divide_its_model() -> None:
    with pytest.raises(ConfigError, match=r"generator\.tensor_parallel=2 needs generator\.backend=vllm-omni"):
        resolve("flowgrpo", "glyph", None, ["generator.tensor_parallel=2"], {})
