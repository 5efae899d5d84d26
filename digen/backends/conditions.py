"""The conditioning of prompts, wherever it is had from: memory, the disk, or the text encoder.

Invariant: an encoder runs once per prompt, whichever workers and runs need it, as long as the disk has room
(`model.embedding_cache_gb`); it is on the device only while it runs, and is not loaded where nothing has to be encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from digen.models.base import Conditioning, ModelFamily
from digen.models.embeddings import Embeddings, cache_dir, identity

_GB: Final = 1e9
_IN_MEMORY: Final = 1 << 30
"""Bytes that are kept in host memory, the newest ones."""


@dataclass(slots=True)
class Conditions:
    """Conditioning by prompt for a model in this process."""

    model: ModelFamily
    device: str
    dtype: torch.dtype
    """Of the encoders."""
    kept: OrderedDict[str, Conditioning] = field(default_factory=OrderedDict)
    _disk: Embeddings | None = None
    _num_bytes: int = 0

    @property
    def disk(self) -> Embeddings | None:
        """What all workers share; None where nothing is to be kept (`model.embedding_cache_gb=0`)."""
        limit = self.model.config.embedding_cache_gb * _GB
        if self._disk is None and limit:
            made_by = identity(self.model, self.device, self.dtype)
            self._disk = Embeddings(cache_dir() / "embeddings", made_by, limit)
        return self._disk

    def of(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning of these prompts, one row each, on the model's device."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.kept]
        for prompt in missing:
            self.kept[prompt] = found = self._found(prompt)
            self._num_bytes += _size(found)
        if missing:
            self.model.rest_encoders()
        batch = self.model.collate([self.kept[prompt] for prompt in prompts])
        while self._num_bytes > _IN_MEMORY:
            self._num_bytes -= _size(self.kept.popitem(last=False)[1])
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}

    def ahead(self, prompts: Sequence[str]) -> None:
        """Have these prompts on the disk, as far as it has room. Workers that do so at once share the work.

        A prompt that another worker is at is left for a second look, in which it is waited for.
        """
        if self.disk is None:
            return
        later, room = [], self.disk.limit
        for prompt in dict.fromkeys(prompts):
            found = self.disk.of(prompt, self._encoded, patience_s=0)
            if found is None:
                later.append(prompt)
            elif (room := room - _size(found)) < 0:
                return
        for prompt in later:
            self.disk.of(prompt, self._encoded)

    def _found(self, prompt: str) -> Conditioning:
        found = self.disk.of(prompt, self._encoded) if self.disk else None
        return self._encoded(prompt) if found is None else found

    def _encoded(self, prompt: str) -> Conditioning:
        self.model.load_encoders(self.device, self.dtype)
        row = self.model.encode(prompt)
        return {k: v.cpu().clone(memory_format=torch.contiguous_format) for k, v in row.items()}


def _size(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in conditioning.values())
