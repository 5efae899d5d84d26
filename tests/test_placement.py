"""Where ranks run and how many threads each has; what the host does not have is refused."""

from pathlib import Path
from typing import Any

import pytest

from digen.config import GeneratorConfig
from digen.engines.base import WorkerSpec
from digen.engines.placement import available_cores, named_devices, place
from digen.errors import ConfigError
from digen.presets import resolve
from digen.run import specs


def spec(name: str = "group", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, "module:Class", None, **more)


@pytest.mark.parametrize(
    ("devices", "ranks", "named"),
    [
        ("cpu", 2, ("cpu",)),
        ("cuda", 2, ("cuda:0", "cuda:1")),
        ("cuda:3", 2, ("cuda:3",)),
        ("cuda:0-3", 1, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:0,2", 2, ("cuda:0", "cuda:2")),
        ("cuda:4-5,1", 3, ("cuda:4", "cuda:5", "cuda:1")),
    ],
)
def test_devices_are_named_in_the_order_given(devices: str, ranks: int, named: tuple[str, ...]) -> None:
    assert named_devices(devices, ranks) == named


@pytest.mark.parametrize("devices", ["gpu", "cuda:", "cuda:a", "cuda:3-0", "cuda:-1", "cpu:0", ""])
def test_other_device_names_are_refused(devices: str) -> None:
    with pytest.raises(ConfigError, match=f"got {devices!r}"):
        named_devices(devices, 1)


def test_ranks_take_devices_in_turn() -> None:
    places = place([spec(devices="cuda:1-2", ranks=3)], lambda _: 8)
    assert places["group"].devices == ("cuda:1", "cuda:2", "cuda:1")


@pytest.mark.parametrize(
    ("devices", "ranks", "shares"),
    [
        ("cpu", 2, ("cpu", "cpu")),
        ("cuda", 2, ("cuda:0,1", "cuda:2,3")),
        ("cuda:0-3", 2, ("cuda:0,1", "cuda:2,3")),
        ("cuda:4,2,0", 1, ("cuda:4", "cuda:2")),
        ("cuda:0-3", 1, ("cuda:0,1", "cuda:2,3")),  # both of an engine that divides its model
        ("cuda:0-1", 2, ("cuda:0", "cuda:1")),
        ("cuda:5", 1, ("cuda:5", "cuda:5")),
    ],
)
def test_replicas_divide_the_devices(devices: str, ranks: int, shares: tuple[str, ...]) -> None:
    generator = GeneratorConfig(devices=devices, ranks=ranks, replicas=2)
    assert tuple(generator.devices_of(k) for k in range(2)) == shares


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_puts_one_rank_on_each_of_as_many_gpus_as_it_has_ranks(replicas: int, ranks: int, tmp_path: Path) -> None:
    """As `digen plan` says where its groups are: generators on the first, the trainer on the others."""
    first = replicas * ranks
    devices = [f"generator.devices=cuda:0-{first - 1}", f"trainer.devices=cuda:{first}-{first + 1}"]
    sizes = [f"generator.replicas={replicas}", f"generator.ranks={ranks}", "trainer.ranks=2", "trainer.backend=fsdp"]
    config = resolve("flowgrpo", "glyph", None, [*devices, *sizes], {})
    placed = place(specs(config, tmp_path), lambda _: first + 2)
    assert [d for each in placed.values() for d in each.devices] == [f"cuda:{k}" for k in range(first + 2)]


def test_threads_are_the_cores_divided_by_all_ranks_unless_given() -> None:
    cores = available_cores()
    places = place([spec("a"), spec("b", threads=1)], lambda _: 0)
    assert (places["a"].threads, places["b"].threads) == (max(1, cores // 2), 1)
    assert place([spec(ranks=cores + 1)], lambda _: 0)["group"].threads == 1


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("a"), spec("a")], "'a' is given twice"),
        ([spec("a/b")], "got 'a/b'"),
        ([spec(ranks=0)], "at least 1 rank, got 0"),
        ([spec(threads=10_000)], r"10000 threads are wanted, \d+ CPU cores are available"),
        ([spec(ranks=10_000)], r"10000 ranks are wanted, but \d+ CPU cores can carry \d+"),
        ([spec(devices="cuda:0-7")], r"wants 8 CUDA device\(s\); torch finds 2 on this host, so there is no cuda:2, "),
        ([spec(devices="cuda", ranks=3)], r"wants 3 CUDA device\(s\); torch finds 2 .* no cuda:2$"),
    ],
)
def test_what_the_host_does_not_have_is_refused(specs: list[WorkerSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(specs, lambda _: 2)
