"""Checkpoints as folders: whole or not there, checked before use, rotated; tensors in any cut; what may change."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException

from digen import presets
from digen.backends.training.local import LocalTrainer
from digen.backends.training.saving import Writing
from digen.checkpoint import manifest
from digen.checkpoint.drift import FREE, refuse_drift
from digen.checkpoint.manifest import Part
from digen.checkpoint.resume import locked, newest
from digen.checkpoint.tensors import Piece, Pieces, piece, write
from digen.errors import CheckpointError, ConfigError
from digen.observe.files import RunFolder

DOCS = Path(__file__).parents[1] / "docs"
WHOLE = torch.arange(60, dtype=torch.float32).reshape(6, 10)


def made(folder: Path, version: int, row: dict[str, float] | None = None, **state: Any) -> Path:
    """A checkpoint with one small tensor file."""
    path = folder / f"step_{version:06d}"
    aside = folder / f".{path.name}.0000.partial"
    record = write(aside, "weights.safetensors", {"w": Piece(WHOLE + version, (6, 10), (0, 0))})
    texts = {manifest.STATE: json.dumps({"row": row or {}, **state}), manifest.CONFIG: "x: 1\n"}
    manifest.seal(aside, path, [record], texts)
    return path


def read_by_dcp(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What docs/resume.md says, done."""
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "resume.md").read_text(), re.DOTALL)
    assert '"runs/mine/checkpoints/step_000040"' in example
    found: dict[str, Any] = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process
        exec(example.replace("runs/mine/checkpoints/step_000040", str(checkpoint)), found)
    state: dict[str, torch.Tensor] = found["state"]
    return state


# Tensors


def test_a_file_is_plain_safetensors_and_its_record_is_true(tmp_path: Path) -> None:
    tensors = {"a": WHOLE, "b": torch.tensor(3.0), "c": torch.ones(3, dtype=torch.bfloat16), "d": torch.tensor([1, 2])}
    pieces = {name: piece(tensor, 0) for name, tensor in tensors.items()}
    record = write(tmp_path, "x.safetensors", {name: p for name, p in pieces.items() if p})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert record.nbytes == (tmp_path / "x.safetensors").stat().st_size
    digest = subprocess.run(
        ["sha256sum", tmp_path / "x.safetensors"], capture_output=True, text=True, check=True
    ).stdout
    assert digest.split()[0] == record.sha256


def test_pieces_of_any_cut_are_read_back_whole_and_in_any_other_cut(tmp_path: Path) -> None:
    cuts = [(0, 4, 0, 10), (4, 6, 0, 3), (4, 6, 3, 10)]
    for number, (top, bottom, left, right) in enumerate(cuts):
        write(
            tmp_path, f"{number}.safetensors", {"w": Piece(WHOLE[top:bottom, left:right].clone(), (6, 10), (top, left))}
        )
    pieces = Pieces(tmp_path.glob("*.safetensors"))
    assert pieces.shapes == {"w": (6, 10)}
    assert torch.equal(pieces.whole("w"), WHOLE)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="w: parts of it are missing"):
        Pieces(tmp_path.glob("*.safetensors")).whole("w")


def test_torch_distributed_checkpoint_reads_what_is_written_here_and_is_read_here(tmp_path: Path) -> None:
    """Both ways: parts of several ranks, of uneven sizes and several dtypes, also without any dimension."""
    tensors = {
        "w": WHOLE,
        "w/step": torch.tensor(3.0),
        "b": torch.arange(5).bfloat16(),
        "m": torch.tensor([True, False]),
    }
    for rank, (start, end) in enumerate(((0, 4), (4, 6))):
        parts = {"w": Piece(WHOLE[start:end].clone(), (6, 10), (start, 0))}
        whole = {name: piece(tensor, rank) for name, tensor in tensors.items() if name != "w"}
        write(tmp_path / "ours", f"{rank}.safetensors", parts | {name: p for name, p in whole.items() if p})
    assert all(torch.equal(read_by_dcp(tmp_path / "ours")[name], tensor) for name, tensor in tensors.items())
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True))
    theirs = Pieces((tmp_path / "theirs").glob("*.safetensors"))
    assert theirs.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert all(torch.equal(theirs.whole(name), tensor) for name, tensor in tensors.items())


def test_shapes_of_parts_that_torch_distributed_checkpoint_wrote_follow_from_where_they_end(tmp_path: Path) -> None:
    for start, end in ((0, 4), (4, 6)):
        about = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [start, 0]}}), "DCP_VERSION": "1.0"}
        save_file({"w": WHOLE[start:end].clone()}, tmp_path / f"{start}.safetensors", about)
    pieces = Pieces(tmp_path.glob("*.safetensors"))
    assert pieces.shapes == {"w": (6, 10)}
    assert torch.equal(pieces.whole("w"), WHOLE)


def test_p44_the_writer_refuses_a_tensor_without_elements_and_copies_what_it_is_given() -> None:
    with pytest.raises(ValueError, match="no elements"):
        piece(torch.empty(0, 3), 0)
    tensor = WHOLE.clone()
    copy = piece(tensor, 0)
    tensor.zero_()
    assert copy is not None
    assert torch.equal(copy.local, WHOLE)
    assert piece(tensor, 1) is None  # rank 0 writes what all ranks have


ODD = ([], 3, "x", None, [0], [1, 0], [-1, 0], [0, 0, 0], ["a", 0], [2**70, 0], [2**62, 0], [0.5, 0], [[0], 0], [3, 4])


@pytest.mark.parametrize("what", ["offsets", "shape", "both", "entry", "all", "odd"])
def test_a_header_that_says_odd_things_of_parts_is_refused_and_never_read_wrong(what: str, tmp_path: Path) -> None:
    true = {"saved_offsets": [0, 0], "shape": [6, 10]}
    for said in ODD:
        places: dict[str, Any] = {
            "offsets": {"w": true | {"saved_offsets": said}},
            "shape": {"w": true | {"shape": said}},
            "both": {"w": {"saved_offsets": said, "shape": said}},
            "entry": {"w": said},
            "odd": {"w": true | {"odd": said}},
            "all": said,
        }
        save_file({"w": WHOLE}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": json.dumps(places[what])})
        with suppress(CheckpointError):  # what is as good as nothing said is read
            assert torch.equal(Pieces([tmp_path / "x.safetensors"]).whole("w"), WHOLE), said


def test_a_part_that_comes_twice_is_refused(tmp_path: Path) -> None:
    for name in ("0", "1"):
        write(tmp_path, f"{name}.safetensors", {"w": Piece(WHOLE[:3].clone(), (6, 10), (0, 0))})
    with pytest.raises(CheckpointError, match=r"1\.safetensors cannot be read: a part of w comes twice"):
        Pieces(tmp_path.glob("*.safetensors"))


def test_a_program_of_ones_own_loads_through_the_reader_and_is_told_what_is_missing(tmp_path: Path) -> None:
    """torch.distributed.checkpoint takes it for one of its own readers."""
    write(
        tmp_path, "0.safetensors", {"w": Piece(WHOLE[:3].clone(), (6, 10), (0, 0)), "b": Piece(WHOLE, (6, 10), (0, 0))}
    )
    state = {"b": torch.zeros(6, 10)}
    dcp.load(state, storage_reader=Pieces(tmp_path.glob("*.safetensors")), no_dist=True)
    assert torch.equal(state["b"], WHOLE)
    with pytest.raises(CheckpointException, match="w: parts of it are missing"):
        dcp.load({"w": torch.zeros(6, 10)}, storage_reader=Pieces(tmp_path.glob("*.safetensors")), no_dist=True)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read"):
        Pieces(tmp_path.glob("*"))


# Folders


def test_p78_the_newest_checkpoint_is_found_by_number_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for version in (2, 9, 10):
        made(folder.checkpoints, version)
    (folder.checkpoints / "step_000011.tmp").mkdir()
    (folder.checkpoints / ".step_000012.ab.partial").mkdir()
    (folder.checkpoints / "notes.txt").write_text("x")
    assert newest(folder, 1, pytest.fail) == folder.checkpoint(10)
    assert folder.newest_checkpoint() == folder.checkpoint(10)


def truncate_to(size: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(size * path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [truncate_to(0), truncate_to(0.5), flip, Path.unlink], ids=["0", "half", "flip", "gone"]
)
@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
def test_p84_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    good, bad = made(folder.checkpoints, 9), made(folder.checkpoints, 10)
    damage(bad / name)
    notes: list[str] = []
    assert newest(folder, 1, notes.append) == good
    assert len(notes) == 1
    assert str(bad) in notes[0]
    assert name in notes[0]
    manifest.check(good)
    gone = name == "manifest.json" and damage is Path.unlink
    assert (folder.checkpoints / "step_000010.damaged").exists() != gone


def test_when_every_checkpoint_is_damaged_all_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for version in (1, 2):
        truncate_to(0.5)(made(folder.checkpoints, version) / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint to go on from:.*step_000002.*bytes of.*step_000001"):
        newest(folder, 1, lambda _: None)
    assert newest(RunFolder(tmp_path / "new"), 1, pytest.fail) is None


def test_p86_weights_alone_and_a_checkpoint_without_optimizer_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder.checkpoint(1), "weights.safetensors", {"w": Piece(WHOLE, (6, 10), (0, 0))})
    made(folder.checkpoints, 2, no_optimizer="Odd keeps its moments in a form of its own")
    with pytest.raises(ConfigError, match=r"(?s)no optimizer state \(Odd.*--init-from.*no manifest.*--init-from"):
        newest(folder, 1, lambda _: None)


def test_a_checkpoint_between_two_rollouts_is_not_gone_on_from(tmp_path: Path) -> None:
    folder, notes = RunFolder(tmp_path), list[str]()
    for version in (2, 3):
        made(folder.checkpoints, version)
    assert newest(folder, 2, notes.append) == folder.checkpoint(2)
    assert "between two rollouts" in notes[0]


def test_the_newest_few_and_the_best_are_kept_and_what_was_never_finished_goes(tmp_path: Path) -> None:
    rewards = {1: 0.1, 2: 0.9, 3: 0.4, 4: 0.9, 5: 0.2, 6: 0.3}
    for version, reward in rewards.items():
        made(tmp_path, version, {"reward/mean": reward})
    (tmp_path / ".step_000007.ab.partial").mkdir()
    truncate_to(0.5)(made(tmp_path, 7) / "weights.safetensors")

    def left() -> list[int]:
        return [int(path.name[5:]) for path in manifest.checkpoints(tmp_path)]

    manifest.rotate(tmp_path, None, "reward/mean")
    assert left() == [7, 6, 5, 4, 3, 2, 1]
    manifest.rotate(tmp_path, 2, "reward/mean")
    assert left() == [7, 6, 5, 4]  # what is damaged does not count and is not touched
    manifest.rotate(tmp_path, 1, "no/such/metric")
    assert left() == [7, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000006", "step_000007"]


def test_a_checkpoint_that_was_damaged_is_replaced_by_the_one_that_is_made_again(tmp_path: Path) -> None:
    flip(made(tmp_path, 3) / "weights.safetensors")
    manifest.check(made(tmp_path, 3))
    assert manifest.is_whole(tmp_path / "step_000003")


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(RunFolder(tmp_path)):
        program = "import sys; from digen.checkpoint.resume import *\nwith locked(RunFolder(Path(sys.argv[1]))): pass"
        other = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
        assert "is being trained by another process" in other.stderr
    with locked(RunFolder(tmp_path)):
        pass
    with (
        pytest.raises(ConfigError, match=r"nowhere cannot be written: No such file"),
        locked(RunFolder(tmp_path / "nowhere")),
    ):
        pass


# Writing


def test_writing_goes_on_in_the_background_and_tells_when_it_is_done(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow.safetensors")  # opening it waits for somebody who reads
    writing = Writing(tmp_path, {"slow.safetensors": {"w": Piece(WHOLE, (6, 10), (0, 0))}})
    assert writing.result(wait=False) is None
    reader = threading.Thread(target=(tmp_path / "slow.safetensors").read_bytes)
    reader.start()
    part = writing.result(wait=True)
    reader.join()
    assert part is not None


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_told_with_the_path(tmp_path: Path) -> None:
    file = {"w.safetensors": {"w": Piece(torch.zeros(1 << 16), (1 << 16,), (0,))}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        full = Writing(tmp_path, file).result(wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full == Part(problem=f"{tmp_path / 'w.safetensors'}: File too large")
    (tmp_path / "file").write_text("")
    nowhere = Writing(tmp_path / "file" / "x", file).result(wait=True)
    assert nowhere is not None
    assert nowhere.problem == f"{tmp_path / 'file' / 'x'}: Not a directory"


# Settings


def config_of(*overrides: str) -> Any:
    return presets.resolve("flowgrpo", "glyph", None, list(overrides), {})


def drift(old: Any, new: Any, *allowed: str, changed: tuple[str, ...] = ()) -> list[str]:
    return refuse_drift(presets.dump(old), new, changed, allowed, "step_000003")


CHANGES = {
    "seed=1": "seed: 1, was 0",
    "algorithm.samples_per_prompt=6": "algorithm.samples_per_prompt: 6, was",
    "trainer.learning_rate=1e-5": "trainer.learning_rate: 1e-05, was",
    "trainer.lora.rank=4": "trainer.lora: ",
    "algorithm.noise.type=cps": "algorithm.noise.type: 'cps', was 'flow-sde'",
    "reward.jpeg-compressibility.weight=0.5": "reward.jpeg-compressibility.weight: 0.5, was null",
    "reward.ocr.weight=2": "reward.ocr.weight: 2.0, was 1.0",
    "data.prompts_per_step=2": "data.prompts_per_step: 2, was",
    "schedule.staleness=0.5": "schedule.staleness: 0.5, was 0.0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_changes_results_is_refused_and_allowed_by_name(change: str) -> None:
    old, new = config_of(), config_of(change)
    with pytest.raises(ConfigError) as error:
        drift(old, new)
    assert CHANGES[change] in str(error.value)
    assert "--allow-change KEY" in str(error.value)
    assert drift(old, new, change.partition("=")[0].partition(".")[0]) or change.startswith("seed")
    assert drift(old, new, *{line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]})


def test_what_changes_no_result_is_free() -> None:
    free = (
        *("engine.name=inline", "generator.replicas=2", "schedule.mode=naive", "schedule.prompts_per_microbatch=2"),
        *("checkpoint.every=7", "checkpoint.keep=2", "observe.grid_every=0", "steps=77", "trainer.tsp=0"),
        *("trainer.backend=fsdp", "sampling.eval_num_steps=3", "run_dir=elsewhere", "trainer.max_bad_steps=9"),
    )
    assert drift(config_of(), config_of(*free)) == []


def test_with_stale_samples_the_cut_of_a_step_is_not_free() -> None:
    stale = "schedule.staleness=0.5"
    with pytest.raises(ConfigError, match=r"schedule\.prompts_per_microbatch: 2, was 1"):
        drift(config_of(stale), config_of(stale, "schedule.prompts_per_microbatch=2"))
    assert drift(config_of(stale), config_of(stale, "schedule.max_in_flight=1")) == []


def test_other_prompts_under_the_same_name_are_a_change_and_a_wrong_name_to_allow_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.prompts: what it stands for is not what it was"):
        drift(config_of(), config_of(), changed=("data.prompts",))
    assert drift(config_of(), config_of(), "data.prompts", changed=("data.prompts",))
    with pytest.raises(ConfigError, match=r"--allow-change: got 'trainer\.learning_rat'.*trainer\.learning_rate"):
        drift(config_of(), config_of("trainer.learning_rate=1"), "trainer.learning_rat")


def test_every_free_key_exists() -> None:
    from digen import schema

    known = {schema.dotted(path) for path in schema.keys(type(config_of()))}
    assert known >= FREE


# A trainer


def test_a_trainer_gives_its_moments_back_to_another(make_config: Any, make_worker: Any, tmp_path: Path) -> None:
    config = make_config("trainer.lora={rank: 2}", "trainer.ema={decay: 0.9}", "trainer.learning_rate=0.1")
    trainer = make_worker(LocalTrainer, config)
    for number in range(2):
        for p in trainer.model.transformer.parameters():
            p.grad = torch.full_like(p, 1.0 + number) if p.requires_grad else None
        trainer.optimizer_step(1.0)
    trainer.save(tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")}
    assert names == {"weights.safetensors", "ema/weights.safetensors", "optimizer-00000.safetensors"}
    other = make_worker(LocalTrainer, config)
    other.resume(tmp_path, 2)
    assert other.version == 2
    for ours, theirs in ((other.state(), trainer.state()), (other.ema.parts, trainer.ema.parts)):
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    ours, theirs = other.optimizer_state(), trainer.optimizer_state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], t) and ours[n].dtype == t.dtype for n, t in theirs.items())
    weights_only = make_worker(LocalTrainer, config)
    weights_only.begin_from(tmp_path)
    assert weights_only.version == 0
    assert weights_only.optimizer_state() == {}
    assert all(torch.equal(weights_only.state()[n], t) for n, t in trainer.state().items())


def test_torch_distributed_checkpoint_reads_a_whole_checkpoint_and_its_average(
    make_config: Any, make_worker: Any, tmp_path: Path
) -> None:
    trainer = make_worker(LocalTrainer, make_config("trainer.lora={rank: 2}", "trainer.ema={decay: 0.9}"))
    for p in trainer.model.transformer.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    trainer.optimizer_step(1.0)
    trainer.save(tmp_path)
    for folder, wanted in (
        (tmp_path, trainer.state() | trainer.optimizer_state()),
        (tmp_path / "ema", trainer.ema.parts),
    ):
        found = read_by_dcp(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_rows_are_on_the_disk_before_the_checkpoint_that_follows_them(
    make_config: Any, make_worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, folder, done = (
        make_worker(LocalTrainer, make_config("trainer.lora={rank: 2}")),
        RunFolder(tmp_path),
        list[str](),
    )
    folder.metrics.write_text('{"step": 0}')
    fsync, path = os.fsync, folder.checkpoint(1)
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(Path(f"/proc/self/fd/{file}").readlink().name), fsync(file))
    )
    trainer.save(path, ".step_000001.ab.partial")
    part = trainer.written(wait=True)
    assert trainer.seal(path, ".step_000001.ab.partial", part.files, {}) is None
    assert done.index("weights.safetensors") < done.index("checkpoints")
    assert done.index("metrics.jsonl") < done.index("checkpoints")


def test_a_step_taken_while_a_checkpoint_is_written_is_not_in_it_and_is_not_held_up(
    make_config: Any, make_worker: Any, tmp_path: Path
) -> None:
    trainer = make_worker(LocalTrainer, make_config("trainer.lora={rank: 2}", "trainer.learning_rate=0.1"))
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    aside = tmp_path / ".step_000000.ab.partial"
    aside.mkdir()
    os.mkfifo(aside / "weights.safetensors")  # a disk that takes its time
    trainer.save(tmp_path / "step_000000", aside.name)
    for p in trainer.model.transformer.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    trainer.optimizer_step(1.0)
    assert trainer.written(wait=False) is None
    with (aside / "weights.safetensors").open("rb") as pipe:
        (tmp_path / "copy.safetensors").write_bytes(pipe.read())
    saved = load_file(tmp_path / "copy.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(saved[name], tensor) for name, tensor in trainer.state().items())
