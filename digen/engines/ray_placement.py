"""Which node of a cluster carries which rank: a pure choice from what the nodes have free.

Invariant: the ranks of a group are on as few nodes as possible and are numbered node by node, so that neighbours (and
shards) stay near; groups that do the same work are spread over the nodes. What the cluster cannot give is a ConfigError
with wanted and available, before anything starts (rule R16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from digen.engines.base import WorkerSpec
from digen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster with what is free there, in Ray's own units."""

    id: str
    address: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether it has all of these labels."""
        return all(self.labels.get(name) == value for name, value in labels.items())


@dataclass(frozen=True, slots=True)
class Need:
    """What Ray reserves for one rank."""

    cpus: int
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As Ray spells it."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def __str__(self) -> str:
        return f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")


def need(spec: WorkerSpec) -> Need:
    """A CPU for each of its threads (one where they are not given), and a whole GPU for devices `cuda`. ConfigError."""
    if spec.devices not in ("cpu", "cuda"):
        raise ConfigError(
            f"{spec.name}: devices {spec.devices!r}: with engine ray, Ray chooses the GPUs, one for each rank; "
            "allowed: cpu, cuda"
        )
    return Need(spec.threads or 1, int(spec.devices == "cuda"))


def arrange(specs: Sequence[WorkerSpec], nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """The id of the node of every rank, in rank order, by group. Raises ConfigError when they do not all fit at once.

    What is hardest to place comes first: groups that ask for labels, then for GPUs, then the larger ones.
    """
    room = _Room(nodes)
    places = {}
    for spec in sorted(specs, key=lambda s: (not s.node, -need(s).gpus, -s.ranks)):
        places[spec.name] = room.take(spec)
    return {spec.name: places[spec.name] for spec in specs}


class _Room:
    """What is left while groups are placed one after the other."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.cpus = {node.id: node.cpus for node in nodes}
        self.gpus = {node.id: node.gpus for node in nodes}
        self.alike: Counter[tuple[str, str]] = Counter()
        """Groups with the same target that a node has."""

    def take(self, spec: WorkerSpec) -> tuple[str, ...]:
        """Place one group: whole on a node that has few of its kind, else on as few nodes as possible."""
        wanted = need(spec)
        fit = {node.id: self.fit(node, wanted) for node in self.nodes if node.has(spec.node)}
        if whole := [id_ for id_, ranks in fit.items() if ranks >= spec.ranks]:
            chosen = min(whole, key=lambda id_: self.cost(id_, spec.target, wanted, fit[id_]))
            ids = [chosen] * spec.ranks
        else:
            largest_first = sorted(fit, key=lambda id_: -fit[id_])
            ids = [id_ for id_ in largest_first for _ in range(fit[id_])][: spec.ranks]
        if len(ids) < spec.ranks:
            raise ConfigError(self.refusal(spec, wanted))
        for id_ in ids:
            self.cpus[id_] -= wanted.cpus
            self.gpus[id_] -= wanted.gpus
        self.alike.update({(spec.target, id_) for id_ in ids})
        return tuple(ids)

    def fit(self, node: Node, wanted: Need) -> int:
        """How many such ranks the node can still take."""
        by_cpu = int(self.cpus[node.id] // wanted.cpus)
        return min(by_cpu, int(self.gpus[node.id] // wanted.gpus)) if wanted.gpus else by_cpu

    def cost(self, id_: str, target: str, wanted: Need, ranks: int) -> tuple[float, ...]:
        """Few groups of this kind; no GPU near that a rank on CPUs has no use for; much room."""
        return self.alike[target, id_], 0 if wanted.gpus else self.gpus[id_], -ranks

    def refusal(self, spec: WorkerSpec, wanted: Need) -> str:
        labels = ", ".join(f"{name}={value}" for name, value in sorted(spec.node.items()))
        on = f" on nodes with {labels}" if labels else ""
        free = "; ".join(self.describe(node) for node in self.nodes) or "no node"
        return f"{spec.name}: {spec.ranks} rank(s) of {wanted} each are wanted{on}. Available in the cluster: {free}"

    def describe(self, node: Node) -> str:
        own = ", ".join(f"{k}={v}" for k, v in sorted(node.labels.items()) if not k.endswith("/node-id"))
        free = f"{self.cpus[node.id]:g} CPU, {self.gpus[node.id]:g} GPU"
        return f"{node.address} has {free}" + (f" ({own})" if own else "")
