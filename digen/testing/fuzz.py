"""Broken input for everything that reads what others wrote: files and answers, changed at random places from a seed.

Invariant: whatever is read, the reader ends soon, and either understands it or raises what its caller turns into one
readable message: an error of ours, or (for answers of a reward server) what counts as no answer.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from digen.errors import DigenError

TOKENS: Final = (
    *(b"\x00", b"\xff\xfe", b"\xf0\x9f\x98\x80", b"\n", b"\r\n", b"\t", b'"', b"'", b":", b"{", b"}", b"[", b"]", b","),
    *(b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"99999999999999999999", b"null", b"true", b'""', b"{}", b"[]"),
    *(b"../../etc/passwd", b"!!python/object/apply:os.system [id]", b"&a [*a]", b"*a", b"<<: *a", b"%s%n", b"- " * 50),
    *(b"{" * 200, b"[" * 200, b"A" * 5000, struct.pack("<Q", 2**63), struct.pack("<Q", 2**40), struct.pack("<q", -1)),
)
"""What parsers have stumbled over."""
MOST_CHANGES: Final = 6


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data with one to a few changes: bytes turned, cut out, doubled, moved or put in, or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, MOST_CHANGES)):
        at = rng.randrange(len(changed) + 1)
        to = min(len(changed), at + rng.choice([1, 2, 8, 64, 1024]))
        match rng.randrange(7):
            case 0:
                changed[at:to] = bytes(byte ^ (1 << rng.randrange(8)) for byte in changed[at:to])
            case 1:
                del changed[at:to]
            case 2:
                changed[at:at] = changed[at:to]
            case 3:
                place = rng.randrange(len(changed) + 1)
                changed[place:place] = changed[at:to]
            case 4:
                del changed[at:]
            case _:
                changed[at : to if rng.random() < 0.5 else at] = rng.choice(TOKENS)
    return bytes(changed)


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input: sound examples by file name, how it is read from a file, and how reading may fail."""

    examples: Mapping[str, bytes]
    read: Callable[[Path], object]
    fails: tuple[type[Exception], ...] = (DigenError,)


def targets() -> dict[str, Target]:
    """All kinds of input, by name."""
    from digen.checkpoint import manifest
    from digen.data.prompts import load_prompts
    from digen.observe.files import read_decisions, read_rows, read_spans
    from digen.presets import load

    spans = [
        {"kind": "generate", "worker": "generator", "step": 0, "index": 0, "version": 0, "start": 0.0, "end": 1.5},
        {"kind": "update", "worker": "trainer", "step": 0, "index": 0, "version": 0, "start": 1.5, "end": 2, "rows": 4},
    ]
    decision = {"step": 0, "worker": "trainer", "at": 1.0, "rows": 2, "predicted_end": None}
    row = {"step": 0, "time_s": 2.0, "reward/mean": 0.5, "grad_norm": None}
    record = {"name": "weights.safetensors", "nbytes": 8, "sha256": "0" * 64}
    texts = {
        "a.txt": 'a sign that says "OPEN"\n\nred letters\n',
        "a.jsonl": '{"prompt": "a cat", "target": 3}\n{"prompt": "a dog", "tags": ["x"]}\n',
        "a.csv": 'prompt,target\n"a cat, sitting",3\na dog,4\n',
        "a.tsv": "prompt\ttarget\na cat\t3\na dog\t4\n",
    }
    answer = {"protocol": 1, "scores": [{"id": "a-0", "score": 0.5}, {"id": "a-1", "score": None, "error": "no"}]}
    return {
        "config": Target({"config.yaml": _config()}, load),
        "prompts": Target({name: text.encode() for name, text in texts.items()}, load_prompts),
        "manifest": Target(
            {
                "manifest.json": json.dumps({"format": 1, "files": [record]}).encode(),
                "empty/manifest.json": json.dumps({"format": 1, "files": []}).encode(),
            },
            lambda path: manifest.check(path.parent),
        ),
        "checkpoint": Target({"weights.safetensors": _checkpoint()}, _read_pieces),
        "size": Target({"checkpoints/step_000001/weights.safetensors": _checkpoint()}, _read_size),
        "weight folder": Target({"weights-00000.safetensors": _checkpoint()}, _read_weights),
        "reply": Target(
            {"reply.json": json.dumps(answer).encode(), "reply.msgpack": _packed(answer)},
            _read_reply,
            (ValueError, RecursionError),
        ),
        "spans": Target({"events.jsonl": _lines(*spans)}, read_spans, (DigenError, OSError)),
        "rows": Target({"metrics.jsonl": _lines(row)}, read_rows, (DigenError, OSError)),
        "decisions": Target({"decisions.jsonl": _lines(decision)}, read_decisions, (DigenError, OSError)),
    }


def inputs(target: Target, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(file name, content): the sound examples, then so many broken ones."""
    yield from target.examples.items()
    rng = random.Random(seed)  # noqa: S311 - no secret
    names = sorted(target.examples)
    for _ in range(count):
        name = rng.choice(names)
        yield name, mutated(target.examples[name], rng)


def attack(target: Target, seed: int, count: int, folder: Path) -> tuple[int, int]:
    """Read all of them from `folder`: how many were understood, how many refused. Raises what nobody is prepared for.

    AssertionError names the bytes that were read then.
    """
    understood = refused = 0
    for number, (name, content) in enumerate(inputs(target, seed, count)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        try:
            target.read(path)
            understood += 1
        except target.fails:
            refused += 1
        except Exception as error:
            raise AssertionError(f"input {number} of seed {seed}, {name}: {content[:2000]!r}") from error
    return understood, refused


def _config() -> bytes:
    from digen.presets import dump, resolve

    return dump(resolve("flowgrpo", "glyph", None, ["steps=2", "trainer.lora={rank: 4}"], {})).encode()


def _lines(*records: Mapping[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _packed(message: Mapping[str, Any]) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb(message)
    return packed


def _checkpoint() -> bytes:
    """Two tensors, of which the file has a part, as a checkpoint's header says it."""
    places = {"a": {"saved_offsets": [0, 0], "shape": [4, 2]}, "b": {"saved_offsets": [0], "shape": [3]}}
    header = {
        "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [16, 28]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(28)


def _read_pieces(path: Path) -> object:
    from digen.checkpoint.tensors import Pieces
    from digen.errors import CheckpointError

    pieces = Pieces([path])
    found = []
    for name in pieces.shapes:
        try:
            found.append(pieces.whole(name))
        except CheckpointError:
            continue
    return found


def _read_size(path: Path) -> object:
    from digen.doctor import num_weights
    from digen.errors import CheckpointError
    from digen.observe.files import RunFolder

    found = num_weights(RunFolder(path.parents[2]))
    if found is None:
        raise CheckpointError(f"{path} is not sound")
    return found


def _read_weights(path: Path) -> object:
    from digen.weights.safetensors import _entries

    return _entries(path, 1)


def _read_reply(path: Path) -> object:
    from digen.rewards import wire

    form: wire.Form = "msgpack" if path.suffix == ".msgpack" else "json"
    return wire.scores(wire.unpack(wire.Answer, path.read_bytes(), form), ["a-0", "a-1"])
