"""One contract for both tensor stores, then what only the one in shared memory has: a folder with a life."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from digen.engines.base import TensorStore
from digen.engines.store import MemoryStore, SharedStore, new_folder, shared_folder
from digen.errors import DigenError
from digen.types import Ref


@pytest.fixture(params=["memory", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    folder = new_folder(tmp_path)
    with shared_folder(folder):
        yield SharedStore(folder)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedStore]:
    folder = new_folder(tmp_path)
    with shared_folder(folder):
        yield SharedStore(folder)


BASE = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float64": torch.tensor([0.1], dtype=torch.float64),
    "bfloat16": torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.bfloat16),
    "int64": torch.tensor([2**62, -1]),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "no dimension": torch.tensor(3.5),
    "no element": torch.zeros(0, 3),
    "turned": BASE.T,
    "one row": BASE[1],
    "all rows": BASE,
    "same again": BASE,
    "repeated": BASE[0].expand(3, 6),
    "with gradient": torch.ones(2, requires_grad=True),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*whole)


def test_every_kind_of_tensor_comes_back_bit_equal(store: TensorStore) -> None:
    got = store.get(store.put("all", TENSORS))
    assert got.keys() == TENSORS.keys()
    assert [name for name in TENSORS if not same_bits(got[name], TENSORS[name])] == []
    assert not any(tensor.requires_grad for tensor in got.values())


def test_a_dictionary_without_tensors_comes_back(store: TensorStore) -> None:
    assert store.get(store.put("nothing", {})) == {}


@pytest.mark.parametrize("key", ["a", "a/b/c", "..", "/etc/passwd", "ünï cödé %2F", ""])
def test_any_text_is_a_key(store: TensorStore, key: str) -> None:
    store.put("other", {"x": torch.tensor(0)})
    ref = store.put(key, {"x": torch.tensor(1)})
    assert ref.key == key
    assert store.get(ref)["x"] == 1


def test_a_reference_says_how_many_bytes_it_stands_for(store: TensorStore) -> None:
    assert store.put("k", {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}).nbytes == 34


def test_a_key_is_written_once(store: TensorStore) -> None:
    ref = store.put("k", {"x": torch.tensor(1)})
    with pytest.raises(ValueError, match="'k' already"):
        store.put("k", {"x": torch.tensor(2)})
    assert store.get(ref)["x"] == 1


def test_what_was_dropped_or_never_stored_cannot_be_read(store: TensorStore) -> None:
    ref = store.put("k", {"x": torch.tensor(1)})
    assert store.has(ref)
    store.drop(ref)
    store.drop(ref)
    for absent in (ref, Ref("never", 0)):
        assert not store.has(absent)
        with pytest.raises(KeyError, match=absent.key):
            store.get(absent)
    assert store.get(store.put("k", {"x": torch.tensor(2)}))["x"] == 2


def test_tensors_in_use_outlive_a_drop(store: TensorStore) -> None:
    ref = store.put("k", {"x": torch.arange(100_000)})
    got = store.get(ref)["x"]
    store.drop(ref)
    assert torch.equal(got, torch.arange(100_000))


# --- shared memory ---


def test_reading_shared_memory_copies_nothing_and_writing_to_it_reaches_nobody(shared: SharedStore) -> None:
    ref = shared.put("k", {"x": torch.zeros(100_000)})
    mine, other = shared.get(ref)["x"], shared.get(ref)["x"]
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(shared.folder) in mapped.read_text()
    mine.fill_(1.0)
    assert other.sum() == 0
    assert shared.get(ref)["x"].sum() == 0


def test_a_shared_store_means_the_same_after_pickling(shared: SharedStore) -> None:
    ref = pickle.loads(pickle.dumps(shared)).put("k", {"x": torch.tensor(7)})
    assert shared.get(ref)["x"] == 7


def test_a_full_store_says_where_and_how_many_bytes_are_missing(shared: SharedStore) -> None:
    huge = torch.zeros(1).expand(2**50)
    with pytest.raises(DigenError, match=rf"{shared.folder} is full: 'k' needs {2**52} bytes, \d+ are free"):
        shared.put("k", {"x": huge})
    assert [path.name for path in shared.folder.iterdir()] == ["pid"]


def test_a_failed_put_leaves_no_file_behind(shared: SharedStore) -> None:
    shared.put("k", {"x": torch.tensor(1)})
    with pytest.raises(ValueError, match="already"):
        shared.put("k", {"x": torch.tensor(2)})
    assert sorted(path.name for path in shared.folder.iterdir()) == ["k.safetensors", "pid"]


def test_dropping_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from digen.engines.store import SharedStore; from digen.types import Ref\n"
        f"SharedStore(Path({str(tmp_path)!r})).drop(Ref('k', 0)); assert 'torch' not in sys.modules"
    )
    (tmp_path / "k.safetensors").touch()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_goes_when_the_run_ends_even_by_an_error(tmp_path: Path) -> None:
    def run(error: type[Exception] | None) -> None:
        folder = new_folder(tmp_path)
        with shared_folder(folder):
            SharedStore(folder).put("k", {"x": torch.tensor(1)})
            assert (folder / "pid").read_text() == f"{os.getpid()}\n"
            if error:
                raise error

    run(None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_run_goes_when_the_next_one_starts_but_not_while_it_lives(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from digen.engines.store import new_folder, shared_folder\n"
        f"with shared_folder(new_folder(Path({str(tmp_path)!r}))): print(flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        (theirs,) = tmp_path.iterdir()
        assert theirs.name.startswith(f"digen-{other.pid}-")
        with shared_folder(new_folder(tmp_path)):
            assert theirs.exists()
        other.send_signal(signal.SIGKILL)
    assert theirs.exists()
    with shared_folder(new_folder(tmp_path)):
        assert not theirs.exists()


def test_a_process_that_got_the_number_of_a_dead_run_does_not_keep_its_folder(tmp_path: Path) -> None:
    dead = tmp_path / f"digen-{os.getpid()}-0123abcd"
    dead.mkdir()
    (dead / "pid").write_text(f"{os.getpid()}\n")
    with shared_folder(new_folder(tmp_path)):
        assert not dead.exists()


def test_the_default_folder_is_in_shared_memory_where_there_is_any() -> None:
    assert new_folder().parent == Path("/dev/shm") or not os.access("/dev/shm", os.W_OK)
