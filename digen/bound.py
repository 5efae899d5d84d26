"""The lower bound of a step: all of its work, shared among all devices without a gap.

Invariant: pure; the only number of a plan that is not simulated, so that schedules can be measured against it.
"""

from __future__ import annotations

from statistics import fmean

from digen.types import SpanKind
from digen.workload import TRAINER, Workload


def lower_bound(work: Workload) -> float:
    """Seconds of a step in which no device ever waits: no schedule with these costs is faster in the long run.

    The trainer updates and syncs, the generators generate, score and pull, and any share of the generation may be
    assists and any share of the updates helps, be it a fraction of a sample. Replicas are taken together.
    """
    trainer, generators = _trainer_s(work), _generators_s(work)
    assist, generate = _step_s(work, TRAINER, "assist"), _together_s(work, "generate")
    update, helped = _step_s(work, TRAINER, "update"), _together_s(work, "help")

    def longer(assists: float, helps: float) -> float:
        return max(trainer + assists * assist - helps * update, generators - assists * generate + helps * helped)

    # The least of two planes' maximum over a square is on its edge, where they meet or at a corner.
    edges = [(_share(generators - trainer + k * (helped + update), assist + generate), k) for k in (0.0, 1.0)]
    edges += [(k, _share(trainer - generators + k * (assist + generate), update + helped)) for k in (0.0, 1.0)]
    return min(longer(*edge) for edge in edges)


def assisted_share(work: Workload) -> float:
    """Share of a step's generation that the trainer takes if both sides are to be done at the same time."""
    exchange = _step_s(work, TRAINER, "assist") + _together_s(work, "generate")
    return _share(_generators_s(work) - _trainer_s(work), exchange)


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _trainer_s(work: Workload) -> float:
    return _step_s(work, TRAINER, "update") + work.seconds(TRAINER, "sync")


def _generators_s(work: Workload) -> float:
    pull = fmean(work.seconds(name, "pull") for name in work.generators)
    return _together_s(work, "generate", "score") + pull


def _step_s(work: Workload, worker: str, *kinds: SpanKind) -> float:
    """What this work on all micro-batches of a step takes one worker."""
    return sum(work.seconds(worker, kind, size) for kind in kinds for size in work.sizes)


def _together_s(work: Workload, *kinds: SpanKind) -> float:
    """What it takes all generators together."""
    alone = [_step_s(work, name, *kinds) for name in work.generators]
    return 1.0 / sum(1.0 / seconds for seconds in alone) if all(alone) else 0.0
