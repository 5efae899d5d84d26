"""What every weight transport must do, both sides in this process (docs/transports.md; rules R4, R15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from digen.config import RunConfig
from digen.engines.base import TensorStore, WorkerContext
from digen.engines.store import MemoryStore, SharedStore, new_folder, shared_folder
from digen.errors import SyncError
from digen.presets import resolve
from digen.types import Published
from digen.weights.base import WeightTransport, load, make_transport, publish

SHAPES = {"first.weight": (30, 7), "first.bias": (7,), "scale": (), "nothing": (0, 4), "odd": (3, 7, 5)}


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors to be sent: also one without dimensions, an empty one and one that is not contiguous."""
    draw = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}
    return {**made, "turned": torch.randn(5, 4, generator=draw).to(dtype).T}


class TransportContract:
    """Subclass it as `class TestMine(TransportContract)` and set `transport`: a name, or `path.py:Name`.

    For transports that need two processes to meet this is the wrong suite: see digen's own tests of `collective`.
    """

    transport: ClassVar[str]
    between_processes: ClassVar[bool] = True
    """Whether it is for workers that are processes of one host, with a folder that all of them see."""

    def test_weights_arrive_bit_equal_version_after_version(self, tmp_path: Path) -> None:
        with self._sides(tmp_path) as (trainer, generator, store):
            for version in (1, 2, 5):
                into, sent = self._place(version + 100), weights(version)
                published = publish(trainer, version, sent)
                trainer.settle()
                assert load(generator, published, into) == published.fingerprint
                assert all(torch.equal(into[name], tensor) for name, tensor in sent.items())
                store.drop(published.weights)

    def test_what_changes_after_settle_does_not_reach_what_was_published(self, tmp_path: Path) -> None:
        with self._sides(tmp_path) as (trainer, generator, _):
            sent, into = weights(1), self._place(2)
            published = publish(trainer, 1, sent)
            trainer.settle()
            for tensor in sent.values():
                tensor.zero_()
            generator.pull(published, into)
            assert all(torch.equal(into[name], tensor) for name, tensor in weights(1).items())

    @pytest.mark.parametrize("wrong", ["missing", "extra", "shape", "dtype"])
    def test_weights_that_do_not_fit_are_refused_with_nothing_written(self, wrong: str, tmp_path: Path) -> None:
        with self._sides(tmp_path) as (trainer, generator, _):
            sent = weights(1)
            match wrong:
                case "missing":
                    del sent["odd"]
                case "extra":
                    sent["more"] = torch.zeros(3)
                case "shape":
                    sent["odd"] = sent["odd"].reshape(7, 3, 5)
                case _:
                    sent["odd"] = sent["odd"].double()
            published, into = publish(trainer, 1, sent), self._place(2)
            trainer.settle()
            with pytest.raises(SyncError):
                generator.pull(published, into)
            assert all(torch.equal(into[name], tensor) for name, tensor in self._place(2).items())

    def test_weights_of_another_version_or_that_were_dropped_are_refused(self, tmp_path: Path) -> None:
        with self._sides(tmp_path) as (trainer, generator, store):
            published: Published = publish(trainer, 4, weights(4))
            trainer.settle()
            with pytest.raises(SyncError, match="5"):
                generator.pull(replace(published, version=5), self._place(2))
            store.drop(published.weights)
            with pytest.raises(SyncError, match="gone"):
                generator.pull(published, self._place(2))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_weights_may_be_cast_on_their_way(self, dtype: str, tmp_path: Path) -> None:
        with self._sides(tmp_path, f"weights.dtype={dtype}") as (trainer, generator, _):
            into, published = self._place(2), publish(trainer, 1, weights(1))
            trainer.settle()
            generator.pull(published, into)
            for name, tensor in weights(1).items():
                assert torch.equal(into[name], tensor.to(getattr(torch, dtype)).float()), name

    def test_closing_leaves_no_file_behind(self, tmp_path: Path) -> None:
        with self._sides(tmp_path) as (trainer, _, store):
            for version in (1, 2, 3):
                published = publish(trainer, version, weights(version))
                trainer.settle()
                if version < 3:
                    store.drop(published.weights)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def _place(self, seed: int) -> Mapping[str, Tensor]:
        """A replica's own tensors, to be written to."""
        return {name: tensor.contiguous() for name, tensor in weights(seed).items()}

    @contextmanager
    def _sides(self, folder: Path, *settings: str) -> Iterator[tuple[WeightTransport, WeightTransport, TensorStore]]:
        engine = "process" if self.between_processes else "inline"
        words = ["steps=1", f"weights.transport={self.transport}", f"engine.name={engine}", f"weights.dir={folder}"]
        config = resolve("flowgrpo", "glyph", None, [*words, *settings], {})
        if not self.between_processes:
            with self._made(config, MemoryStore(), None) as made:
                yield made
            return
        with shared_folder(shared := new_folder(folder)), self._made(config, SharedStore(shared), shared) as made:
            yield made

    @contextmanager
    def _made(
        self,
        config: RunConfig[Any],
        store: TensorStore,
        shared: Path | None,
    ) -> Iterator[tuple[WeightTransport, WeightTransport, TensorStore]]:
        sides = [
            make_transport(config, WorkerContext(name, 0, 1, "cpu", store, shared_dir=shared))
            for name in ("trainer", "generator")
        ]
        try:
            yield sides[0], sides[1], store
        finally:
            for side in reversed(sides):
                side.close()
