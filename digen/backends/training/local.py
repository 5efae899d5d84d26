"""The trainer of one rank: the base class as it is."""

from __future__ import annotations

from digen.backends.training.base import TorchTrainer


class LocalTrainer(TorchTrainer):
    """One process, one device, nothing sharded (torch)."""
