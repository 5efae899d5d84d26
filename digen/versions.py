"""Which weights are where: what the trainer published, what each generator holds, what may be freed. Section 3.4.

Invariant: a generator holds one version at a time, and what it loaded hashes to what was published (rule R15);
published weights live until a newer version is out and nobody is reading them. References only (rule R4).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from digen.errors import SyncError
from digen.types import Published, Ref, Version


class Versions:
    """The weights of a run on their way from the trainer to the generators of these names.

    `holds`: what they hold at the start; None: not the weights that the trainer has. `drop` frees a reference;
    `being_pulled`: versions that a generator is loading now.
    """

    def __init__(
        self,
        generators: Iterable[str],
        holds: Version | None,
        drop: Callable[[Ref], None],
        being_pulled: Callable[[], Collection[Version]],
    ) -> None:
        self.holds: dict[str, Version | None] = dict.fromkeys(generators, holds)
        self._at_start = holds
        self.published: list[Published] = []  # the newest last; older ones while they are being read
        self._drop, self._being_pulled = drop, being_pulled

    @property
    def unpublished(self) -> bool:
        """Whether a generator waits for the weights that a run starts from."""
        return not self.published and None in self.holds.values()

    def due(self, generator: str) -> Published | None:
        """What this generator should pull."""
        newest = self.published[-1] if self.published else None
        return newest if newest and self.holds[generator] != newest.version else None

    def begun_anew(self, name: str) -> None:
        """If this is a generator, it was started again: it holds what all of them did at the start."""
        if name in self.holds:
            self.holds[name] = self._at_start

    def offer(self, published: Published) -> None:
        """Newer weights than all before."""
        self.published.append(published)
        self._drop_superseded()

    def pulled(self, generator: str, published: Published, fingerprints: Sequence[str]) -> None:
        """Raises SyncError when a rank has loaded something else than what was published."""
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != published.fingerprint:
                raise SyncError(
                    f"{generator} rank {rank} has other weights than the trainer after pulling version "
                    f"{published.version}: fingerprint {fingerprint}, expected {published.fingerprint}"
                )
        self.holds[generator] = published.version
        self._drop_superseded()

    def _drop_superseded(self) -> None:
        """Free all published weights but the newest, and those that are being read."""
        for old in [p for p in self.published[:-1] if p.version not in self._being_pulled()]:
            self._forget(old)

    def drop_all(self) -> None:
        for published in list(self.published):
            self._forget(published)

    def _forget(self, published: Published) -> None:
        self._drop(published.weights)
        self.published.remove(published)
