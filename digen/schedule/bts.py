"""BTS: whether to assist is searched for at every bubble, from measured costs. Algorithm 2 of the paper, section 4.

Invariant: `_Step` is the driver's rules on counts and clocks alone, so with exact costs the latency that is predicted
is the driver's own makespan (rule R7). Where we differ from the paper is in docs/design/driver.md.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil, inf
from operator import mul
from statistics import fmean
from typing import NamedTuple

from digen.schedule.costs import Costs
from digen.schedule.tag import Activity, Bubble, Choice
from digen.types import SpanKind

NANOSECONDS = 1e9
"""The policy plans in whole ones."""

BUDGET = 1000
"""States that the policy looks at before it is content with 1/256 of the latency; about 50 microseconds each."""

ROUNDING = 1e-2
"""Of a bound that is a sum of fractions, in the unit of the costs: a schedule's length is a whole number."""


class WorkCosts(NamedTuple):
    """What work takes, in whole numbers of any one unit, so that equal states are equal. Tuples are per generator."""

    generate: tuple[int, ...]
    score: tuple[int, ...]
    pull: tuple[int, ...]
    assist: int
    update: int
    sync: int
    max_in_flight: int
    """Generation calls under way at once."""
    naive: bool = False
    """Whether updates wait for the step's last score."""


class Generator(NamedTuple):
    """What one generator does, and for how much longer."""

    kind: str | None = None
    left: int = 0
    pulls: bool = False
    """Whether it must pull before it generates again."""


class State(NamedTuple):
    """A step under way, compressed: which micro-batch is which plays no role, and clocks count from now."""

    pending: int
    unscored: int
    ready: int
    updates_left: int
    generators: tuple[Generator, ...]
    trainer: str | None = None
    trainer_left: int = 0
    skipped: bool = False
    """Whether the bubble stays open: it is not asked about again until the trainer has worked."""
    ahead: int = 0
    """Of the next step, what generators may start once nothing is pending (TCSS): a score then waits behind it."""

    def after(self, costs: WorkCosts, *, assist: bool) -> State:
        """A bubble filled with one micro-batch, or skipped."""
        if assist:
            return self._replace(pending=self.pending - 1, trainer="assist", trainer_left=costs.assist)
        return self._replace(skipped=True)


class Plan(NamedTuple):
    """The least time from now to the end of the step's sync, and at each bubble whether the trainer assists."""

    latency: int
    decisions: tuple[bool, ...]


Path = tuple["Path", bool] | None
"""Decisions, the last one outermost."""


class _Node(NamedTuple):
    """A bubble that can be reached; the order of the fields is the order of the search."""

    rank: int
    """The lower bound of any schedule through it, in grains."""
    left: int
    """Micro-batches to start and to train: among equal ranks, the schedule that is furthest on."""
    number: int
    bound: int
    elapsed: int
    state: State
    path: Path


def search(state: State, costs: WorkCosts, budget: float = inf) -> Plan:
    """A shortest schedule from the start of a step or a bubble: at each bubble insert or skip, least bound first.

    Something may be ready in the bubble and not be the trainer's to take (another one's turn): it is decided as it is.
    A compressed state that was reached before, and no later, has the same continuation and is not looked at again.
    Each time `budget` more states are known, the grain in which schedules differ is widened, from 1 unit to 1/256 of
    the latency and then twofold: the plan is longer than the shortest by less than one grain.
    """
    elapsed, state = (0, state) if state.ready else advance(state, costs)
    reached, nodes, grain, number, limit = {state: elapsed}, [_Node(0, 0, 0, 0, elapsed, state, None)], 1, 0, budget
    while True:
        node = heapq.heappop(nodes)
        if not node.state.updates_left:
            return Plan(node.elapsed + costs.sync, _decisions(node.path))
        if len(reached) > limit:
            limit, grain = limit + budget, max(2 * grain, node.bound >> 8)
            nodes = [other._replace(rank=other.bound // grain) for other in nodes]
            heapq.heapify(nodes)
        for assist in (True, False):
            duration, after = advance(node.state.after(costs, assist=assist), costs)
            at = node.elapsed + duration
            if at < reached.get(after, inf):
                reached[after] = at
                number += 1
                bound, left = at + lower_bound(after, costs), after.pending + after.updates_left
                heapq.heappush(nodes, _Node(bound // grain, left, number, bound, at, after, (node.path, assist)))


def _decisions(path: Path) -> tuple[bool, ...]:
    decisions = []
    while path:
        path, decision = path
        decisions.append(decision)
    return tuple(reversed(decisions))


@dataclass(frozen=True, slots=True)
class Bts:
    """The trainer does at each bubble what a shortest schedule does there, which is searched for again every time.

    Until all work of a step has been measured it fills the first bubble of a step, which is what measures an assist.
    """

    budget: float = BUDGET

    def choose(self, bubble: Bubble, costs: Costs) -> Choice:
        plan = self.plan(bubble, costs)
        if plan is None:
            return Choice(bubble.next_rows if bubble.assisted == 0 else 0)
        return Choice(bubble.next_rows if plan.decisions[0] else 0, plan.latency / NANOSECONDS)

    def plan(self, bubble: Bubble, costs: Costs) -> Plan | None:
        """The rest of the step in nanoseconds; None while a cost that it depends on has not been measured."""
        known = _measured(bubble, costs)
        if known is None:
            return None
        generators = tuple(_generator(activity, known, i) for i, activity in enumerate(bubble.generators))
        state = State(
            bubble.pending, bubble.unscored, bubble.ready, bubble.updates_left, generators, ahead=bubble.ahead
        )
        return search(state, known, self.budget)


def _measured(bubble: Bubble, costs: Costs) -> WorkCosts | None:
    """Typical costs; a generator that has not done a kind of work yet is taken for the mean of those that have.

    A sync is the same in every plan, and a pull plays a role only if one is due: not measured, they are 0.
    """
    names = [activity.worker for activity in bubble.generators]
    generate, score = (_of_each(names, kind, costs, bubble.rows) for kind in ("generate", "score"))
    trainer = bubble.trainer.worker
    assist, update = costs.seconds(trainer, "assist", bubble.rows), costs.seconds(trainer, "update", bubble.kept)
    pull, sync = _of_each(names, "pull", costs, 0), costs.seconds(trainer, "sync")
    pulls = any(activity.pulls or activity.kind == "pull" for activity in bubble.generators)
    if generate is None or score is None or assist is None or update is None or (pull is None and pulls):
        return None
    pull = pull or (0,) * len(names)
    own = _whole(assist), _whole(update), _whole(sync or 0.0)
    return WorkCosts(generate, score, pull, *own, bubble.max_in_flight, bubble.naive)


def _of_each(names: list[str], kind: SpanKind, costs: Costs, rows: int) -> tuple[int, ...] | None:
    typical = [costs.seconds(name, kind, rows) for name in names]
    known = [seconds for seconds in typical if seconds is not None]
    return tuple(_whole(fmean(known) if seconds is None else seconds) for seconds in typical) if known else None


def _generator(activity: Activity, costs: WorkCosts, i: int) -> Generator:
    """What is left of work that takes its mean; 0 when it takes longer than that."""
    kinds = {"generate": costs.generate, "score": costs.score, "pull": costs.pull}
    if activity.kind is None:
        return Generator(pulls=activity.pulls)
    left = kinds[activity.kind][i] - _whole(activity.elapsed_s)
    return Generator(activity.kind, max(left, 0), activity.pulls)


def _whole(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


def advance(state: State, costs: WorkCosts) -> tuple[int, State]:
    """Let everybody work until the next bubble or the last update: the time it takes, and the state then."""
    step, elapsed = _Step(state, costs), 0
    while not step.choose():
        elapsed += step.work()
    return elapsed, step.frozen()


class _Step:
    """A state in motion, by the driver's rules: `choose` is its `next_work` for all groups, `work` its `settle`."""

    __slots__ = (
        "ahead", "ahead_unscored", "costs", "kinds", "lefts", "pending", "pulls", "ready", "skipped", "trainer",
        "trainer_left", "unscored", "updates_left",
    )  # fmt: skip

    def __init__(self, state: State, costs: WorkCosts) -> None:
        self.costs = costs
        self.pending, self.unscored, self.ready, self.updates_left = state[:4]
        self.kinds = [g.kind for g in state.generators]
        self.lefts = [g.left for g in state.generators]
        self.pulls = [g.pulls for g in state.generators]
        self.trainer, self.trainer_left, self.skipped, self.ahead = state[5:]
        self.ahead_unscored = 0

    def frozen(self) -> State:
        generators = tuple(map(Generator, self.kinds, self.lefts, self.pulls))
        return State(self.pending, self.unscored, self.ready, self.updates_left, generators, ahead=self.ahead)

    def choose(self) -> bool:
        """Give work to all who are idle; whether this ends in a bubble, or with the step."""
        for i, kind in enumerate(self.kinds):
            if kind is None:
                self.kinds[i], self.lefts[i] = self.choose_for(i)
        if self.trainer is None and self.ready and (not self.costs.naive or self.ready == self.updates_left):
            self.ready -= 1
            self.trainer, self.trainer_left = "update", self.costs.update
        if self.trainer is not None:
            return False
        open_bubble = self.pending and not self.skipped and "score" not in self.kinds and self.may_generate()
        return not self.updates_left or bool(open_bubble)

    def choose_for(self, i: int) -> tuple[str | None, int]:
        """What generator i begins and how long it takes: scoring, pulling, generating, the current step's first."""
        if self.unscored:
            self.unscored -= 1
            return "score", self.costs.score[i]
        if self.ahead_unscored:
            self.ahead_unscored -= 1
            return "score ahead", self.costs.score[i]
        if self.pulls[i]:
            self.pulls[i] = False
            return "pull", self.costs.pull[i]
        if self.pending and self.may_generate():
            self.pending -= 1
            return "generate", self.costs.generate[i]
        if self.ahead and not self.pending and self.may_generate():
            self.ahead -= 1
            return "generate ahead", self.costs.generate[i]
        return None, 0

    def may_generate(self) -> bool:
        under_way = self.kinds.count("generate") + self.kinds.count("generate ahead") + (self.trainer == "assist")
        return under_way < self.costs.max_in_flight

    def work(self) -> int:
        """Until the next instant at which something ends, and read back all that ends then."""
        kinds, lefts = self.kinds, self.lefts
        wait = self.trainer_left if self.trainer is not None else None
        for i, kind in enumerate(kinds):
            if kind is not None and (wait is None or lefts[i] < wait):
                wait = lefts[i]
        assert wait is not None, "nothing is under way"
        for i, kind in enumerate(kinds):
            if kind is None:
                continue
            lefts[i] -= wait
            if not lefts[i]:
                kinds[i] = None
                self.unscored += kind == "generate"
                self.ahead_unscored += kind == "generate ahead"
                self.ready += kind == "score"
        if self.trainer is not None:
            self.trainer_left -= wait
            if not self.trainer_left:
                self.unscored += self.trainer == "assist"
                self.updates_left -= self.trainer == "update"
                self.trainer, self.skipped = None, False
        return wait


def lower_bound(state: State, costs: WorkCosts) -> int:
    """No schedule from this bubble on is shorter: the longer of both sides' remaining work, at the best split of it.

    With k assists to come the trainer takes k * assist + all updates, the generators `alone` - k * `each`, and one
    update is left when they end. No update starts before something can be ready.
    """
    if not state.updates_left:
        return 0
    updates = state.updates_left * costs.update
    alone, each = _generation(state, costs)
    best = (alone + costs.update - updates) / ((costs.assist + each) or 1.0)
    low = min(max(int(best), 0), state.pending)
    split = min(
        max(k * costs.assist + updates, alone - k * each + costs.update) for k in (low, min(low + 1, state.pending))
    )
    return ceil(max(split, _first_ready(state, costs) + updates) - ROUNDING)


def _generation(state: State, costs: WorkCosts) -> tuple[float, float]:
    """When the generators have generated all that is pending and scored all, at the earliest; what one assist saves.

    Work counts in generations: replica i has done (T - left_i) / generate_i of it at time T, a score being at least
    min(score_i / generate_i) of one.
    """
    if not all(costs.generate):
        return 0.0, 0.0
    rates = [1.0 / cost for cost in costs.generate]
    score = min(map(mul, costs.score, rates))
    soonest = min(g.left for g in state.generators)
    taken = work = 0.0
    for generator, rate in zip(state.generators, rates, strict=True):
        work += generator.kind == "generate"
        taken += rate * (generator.left if generator.kind in ("generate", "score") else soonest)
    work = state.pending + (state.pending + state.unscored + work) * score
    each = 1.0 / sum(rates)
    return (work + taken) * each, each


def _first_ready(state: State, costs: WorkCosts) -> int:
    """When the first update may start, at the earliest: no score is under way in a bubble."""
    if state.ready:
        return 0
    if state.unscored:
        return min(g.left for g in state.generators) + min(costs.score)
    whole = zip(state.generators, costs.generate, strict=True)
    generated = [g.left if g.kind == "generate" else g.left + cost for g, cost in whole]
    return min(costs.assist, *generated) + min(costs.score)
