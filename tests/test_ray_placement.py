"""What the Ray engine decides before Ray is asked for anything; no test here starts Ray."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from digen import plugins
from digen.config import RunConfig
from digen.engines import ray as ray_engine
from digen.engines.base import WorkerSpec
from digen.engines.ray import RayEngine, check_facts
from digen.engines.ray_placement import Node, arrange
from digen.engines.ray_rank import Facts, address_of, versions
from digen.engines.ray_store import DriverStore, pack, unpack
from digen.errors import ConfigError, PluginError
from digen.presets import resolve
from digen.run import make_engine, specs
from digen.types import Ref

Make = Callable[..., RunConfig[Any]]


def node(name: str, cpus: float, gpus: float = 0, **labels: str) -> Node:
    return Node(name, f"10.0.0.{ord(name)}", cpus, gpus, {"ray.io/node-id": name, **labels})


def group(name: str, ranks: int = 1, target: str = "t:T", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, target, None, ranks=ranks, **more)


# --- where ranks go ---


def test_a_group_is_kept_on_one_node_where_one_has_room_for_it() -> None:
    assert arrange([group("g", 4)], [node("a", 3), node("b", 4), node("c", 3)]) == {"g": ("b",) * 4}


def test_a_group_that_no_node_can_take_is_on_few_nodes_with_its_ranks_numbered_node_by_node() -> None:
    assert arrange([group("g", 7)], [node("a", 2), node("b", 4), node("c", 3)]) == {"g": ("b",) * 4 + ("c",) * 3}


def test_replicas_are_spread_over_nodes_and_the_trainer_does_not_count_as_one() -> None:
    groups = [group("generator-0"), group("generator-1"), group("trainer", 2, "t:Trainer")]
    placed = arrange(groups, [node("a", 4), node("b", 4)])
    assert list(placed) == ["generator-0", "generator-1", "trainer"]
    assert placed["trainer"] == ("a", "a")
    assert {placed["generator-0"], placed["generator-1"]} == {("a",), ("b",)}


def test_large_groups_are_placed_before_small_ones_take_their_room() -> None:
    placed = arrange([group("small"), group("large", 4, "t:L")], [node("a", 4), node("b", 1)])
    assert placed == {"small": ("b",), "large": ("a",) * 4}


def test_labels_and_gpus_decide_who_may_be_where() -> None:
    nodes = [node("a", 8, 4, kind="H100"), node("b", 8, 4, kind="L4"), node("c", 8)]
    groups = [
        group("generator-0", 2, devices="cuda", node={"kind": "L4"}),
        group("trainer", 4, "t:Trainer", devices="cuda", node={"kind": "H100"}),
        group("scorer", 1, "t:Scorer"),
    ]
    assert arrange(groups, nodes) == {"generator-0": ("b", "b"), "trainer": ("a",) * 4, "scorer": ("c",)}


def test_the_threads_of_a_rank_are_reserved() -> None:
    assert arrange([group("g", 2, threads=3)], [node("a", 5), node("b", 3)]) == {"g": ("a", "b")}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (group("g", 9), r"^g: 9 rank\(s\) of 1 CPU each are wanted\. Available in the cluster: 10\.0\.0\.97 has 4 CPU"),
        (group("g", 3, devices="cuda"), r"3 rank\(s\) of 1 CPU and 1 GPU each .*97 has 4 CPU, 2 GPU \(kind=L4\); .*98"),
        (
            group("g", node={"kind": "H100"}),
            r"1 rank\(s\) of 1 CPU each are wanted on nodes with kind=H100\. Available",
        ),
        (
            group("g", devices="cuda:0-3"),
            r"^g: devices 'cuda:0-3': with engine ray, Ray chooses .* allowed: cpu, cuda$",
        ),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_with_wanted_and_available(wanted: WorkerSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arrange([wanted], [node("a", 4, 2, kind="L4"), node("b", 4)])


def test_groups_that_fit_one_by_one_but_not_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^b: 1 rank\(s\) .* has 0 CPU"):
        arrange([group("a", 2), group("b")], [node("a", 2)])


# --- what must be the same on all nodes ---


def test_other_versions_on_a_node_are_refused_naming_rank_node_package_and_both_versions() -> None:
    here = versions()
    assert here["torch"].startswith(torch.__version__.partition("+")[0])
    there = {**here, "diffusers": "0.1"}
    facts = [Facts(1, "10.0.0.1", "", True, here), Facts(2, "10.0.0.2", "", True, there)]
    check_facts(group("g"), here, facts[:1])
    said = rf"^g rank 1 on 10\.0\.0\.2 has diffusers 0\.1, the driver has {here['diffusers']}: install the same"
    with pytest.raises(ConfigError, match=said):
        check_facts(group("g", 2), here, facts)


def test_a_node_that_does_not_see_the_folder_of_the_run_is_refused(tmp_path: Path) -> None:
    facts = [Facts(1, "10.0.0.1", "", False, versions())]
    with pytest.raises(ConfigError, match=r"^g rank 0 on 10\.0\.0\.1 does not see .*logs: run_dir must be in a folder"):
        check_facts(group("g", log_dir=tmp_path / "logs"), versions(), facts)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_network_interface_of_an_address_is_known() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("no-such-card") is None


# --- tensors and settings ---


def test_tensors_are_unpacked_bit_equal_and_of_their_own() -> None:
    rows = torch.randn(6, 5)
    tensors = {
        "float": rows,
        "bf16": rows.bfloat16(),
        "turned": rows.T,
        "mask": rows > 0,
        "empty": rows[:0],
        "one": torch.tensor(3.5, dtype=torch.float64),
        "grad": rows.clone().requires_grad_(),
    }
    packed = pack(tensors)
    got = unpack(packed)
    assert got.keys() == tensors.keys()
    assert all(got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in tensors.items())
    got["float"].zero_()
    assert torch.equal(unpack(packed)["float"], rows)


def test_a_store_whose_engine_is_closed_has_nothing_and_drops_nothing() -> None:
    store = DriverStore("nobody")
    store.drop(Ref("key", 4))
    assert not store.has(Ref("key", 4))


def test_the_engine_is_made_with_its_address_and_groups_with_their_labels(make_config: Make, tmp_path: Path) -> None:
    labels = "generator.node={ray.io/accelerator-type: L4}"
    config = make_config("engine.name=ray", "engine.address=10.0.0.1:6379", labels)
    engine = make_engine(config)
    assert isinstance(engine, RayEngine)
    assert engine._address == "10.0.0.1:6379"
    nodes = {spec.name: spec.node for spec in specs(config, tmp_path)}
    assert nodes == {"generator": {"ray.io/accelerator-type": "L4"}, "trainer": {}}


def test_the_example_of_mixed_hardware_puts_trainers_on_strong_nodes_and_spreads_generators_on_weak_ones(
    tmp_path: Path,
) -> None:
    example = Path(__file__).parent.parent / "examples" / "mixed-hardware.yaml"
    groups = specs(resolve("dancegrpo", "hunyuan-video", example, [], {}), tmp_path)
    kind = "ray.io/accelerator-type"
    strong = [node(name, 64, 8, **{kind: "H100"}) for name in "ab"]
    weak = [node(name, 32, 4, **{kind: "L40S"}) for name in "cd"]
    placed = arrange(groups, [*weak, *strong])
    assert len(set(placed["trainer"])) == 1
    assert set(placed["trainer"]) < set("ab")
    replicas = [placed[f"generator-{k}"] for k in range(4)]
    assert sorted(replicas) == [("c", "c"), ("c", "c"), ("d", "d"), ("d", "d")]
    assert replicas[0] != replicas[1]
    with pytest.raises(ConfigError, match=rf"^trainer: .* on nodes with {kind}=H100\. Available in the cluster: "):
        arrange(groups, weak)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.address=auto"], r"engine\.address=auto needs engine\.name=ray, got process"),
        (["trainer.node={kind: H100}"], r"trainer\.node needs engine\.name=ray, got process"),
        (["engine.name=ray", "generator.devices=cuda:1"], r"generator\.devices=cuda:1: with engine\.name=ray, Ray"),
        (["engine.name=ray", "weights.transport=shared_memory"], r"shared_memory needs engine\.name=process, got ray"),
        (["engine.name=ray", "weights.transport=collective"], r"collective needs engine\.name=process, got ray"),
    ],
)
def test_settings_that_an_engine_cannot_have_are_refused(overrides: list[str], said: str, make_config: Make) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(*overrides)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
async def test_an_address_where_nobody_answers_is_refused_before_ray_is_asked(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        address = f"{scheme}127.0.0.1:{once.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (address, "auto"):
        with pytest.raises(ConfigError, match=f"got '{address}', where no Ray cluster answers"), anyio.fail_after(20):
            async with RayEngine(given).open([group("a")]):
                pytest.fail("it opened")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cluster_that_does_not_take_a_driver_from_outside_is_asked_again_and_then_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Client's server forks for every driver, and the fork may hang."""
    asked = []

    def init(address: str, **_: object) -> None:
        asked.append(address)
        raise ConnectionAbortedError("Starting Ray client server failed")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"ray://127.0.0.1:{there.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"got '{address}': ConnectionAbortedError: Starting Ray client"):
            async with RayEngine(address).open([group("a")]):
                pytest.fail("it opened")
    assert asked == [address] * 3


def test_without_ray_the_engine_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plugins.find_spec
    monkeypatch.setattr(plugins, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(PluginError, match=r"engine 'ray' needs ray: pip install 'digen\[ray\]'"):
        plugins.target("engines", "ray")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([group("a"), group("a")], "'a' is given twice"),
        ([group("a", devices="cuda:1")], "allowed: cpu, cuda"),
        ([group("a", threads=10_000)], r"10000 threads are wanted, \d+ CPU cores are available"),
        ([group("a", 10_000)], r"10000 ranks are wanted, but \d+ CPU cores can carry \d+"),
    ],
)
async def test_what_this_machine_cannot_give_is_refused_before_a_cluster_of_its_own_starts(
    specs: list[WorkerSpec], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "connected", None)
    with pytest.raises(ConfigError, match=said):
        async with RayEngine().open(specs):
            pytest.fail("it opened")
