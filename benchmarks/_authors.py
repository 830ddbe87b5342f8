"""The rules of the DTR authors' simulator, as a subclass of the Python engine.

Source: github.com/uwsampl/dtr-prototype, commit eff53cc4, folder simrd (Kirisame et al., ICLR
2021). It differs from Rekindle's engine as follows:

- Dead storages (those that the program cannot reach) and dead sources stay in the graph for good,
  as evicted neighbors.
- Outputs of a call in progress count as evicted until the call has run.
- Groups of evicted neighbors lose more cost than they got (`_Classes`).
- Storages of 0 bytes are evicted, too.
- If all storages are locked, the first attempt to recompute is the last.
- Values that a recomputation has read stay, whatever still needs them.
- A dead storage may also be ignored or banished (section 2 and appendix C of the paper).

The programs of the authors' logs hold nothing, and overwrite nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from _dtr_logs import load
from _unoptimized import Unoptimized

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import Call, Engine, NoRoom, Storage, Thrashed, Value
from rekindle.policies import Candidate, Chooser, Policy, named
from rekindle.policies._neighborhood import Classes, Exact, _Class, _reach
from rekindle.policies._scored import ScoredChooser
from rekindle.schedule import Action, Compute
from rekindle.simulator._replay import drive
from rekindle.trace import Trace, keep_all_peak

Dead = Literal["evict", "ignore", "banish"]
"""The treatment of a dead storage: evict it at once; treat it as if it were reachable; or free it
for good as soon as no evicted storage needs it. Values made from it can then never be evicted."""


@final
class _Exact(Exact):
    """Exact neighborhoods, in which the outputs of the running call count as evicted.

    The authors' simulator updates a neighborhood only when one of its storages returns to memory.
    Until then the neighborhood does not contain the outputs of the running call.
    """

    def __init__(self, like: Exact) -> None:
        super().__init__(counted=like._counted)
        self._expected: dict[Candidate, None] = {}  # outputs of the running call
        # Storages whose neighborhood contains the outputs in `_expected`.
        self._noticed: dict[Candidate, None] = {}

    def cost(self, storage: Candidate) -> Nanoseconds:
        total = super().cost(storage)
        if self._counted == "all" and self._expected and storage not in self._noticed:
            below = _reach(self._down, storage.children())
            total -= sum(other.cost for other in below if other in self._expected)
        return total

    def expected(self, storage: Candidate) -> None:
        """Count `storage` as evicted, but do not add its cost to its evicted neighbors yet."""
        self._expected[storage] = None
        self.evicted(storage)

    def _notice(self, storage: Candidate) -> None:
        """Add the outputs of the running call to all neighborhoods that contain `storage`."""
        self._noticed[storage] = None
        for member in (storage, *_reach(self._up, storage.parents())):
            self._noticed.update((parent, None) for parent in member.parents())

    def evicted(self, storage: Candidate) -> None:
        if storage in self._noticed:
            self._notice(storage)
        super().evicted(storage)

    def returned(self, storage: Candidate) -> None:
        if storage in self._expected:
            del self._expected[storage]
            if not self._expected:
                self._noticed.clear()
        elif self._expected:
            self._notice(storage)
        super().returned(storage)


@final
class _Classes(Classes):
    """Union-find classes, whose sums may become negative.

    Outputs of a running call are in classes although they added no cost. Their cost is subtracted
    when they are computed. If a view was made of a storage while the storage was evicted, the cost
    of the view is subtracted as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._below: dict[_Class, None] = {}  # classes whose sum became negative

    def overdrawn(self) -> bool:
        """Return True if the sum of a class of evicted storages is negative."""
        self._below = {node: None for node in self._below if node.up is None and node.sum < 0}
        return bool(self._below) and any(
            self._find(node) in self._below for node in self._node.values()
        )

    def expected(self, storage: Candidate) -> None:
        """Put `storage` into a class of its own, without its cost."""
        self._node[storage] = _Class()
        self._owed[storage] = storage.cost

    def repriced(self, storage: Candidate) -> None:
        if storage in self._node:
            self._owed[storage] = storage.cost

    def evicted(self, storage: Candidate) -> None:
        super().evicted(storage)
        self._note(self._node[storage])

    def returned(self, storage: Candidate) -> None:
        node = self._node.get(storage)
        super().returned(storage)
        if node is not None:
            self._note(node)

    def _note(self, node: _Class) -> None:
        if self._find(node).sum < 0:
            self._below[self._find(node)] = None


@final
class _Chooser(ScoredChooser):
    """A chooser by scores, which may be negative."""

    def __init__(self, like: ScoredChooser) -> None:
        neighborhood = like._neighborhood
        if isinstance(neighborhood, Exact):
            neighborhood = _Exact(neighborhood)
        elif isinstance(neighborhood, Classes):
            neighborhood = _Classes()
        super().__init__(
            neighborhood, by_size=like._by_size, by_staleness=like._by_staleness, root=like._root
        )

    def expected(self, storage: Candidate) -> None:
        """Record that a running call will make `storage`."""
        if isinstance(self._neighborhood, (_Exact, _Classes)):
            self._neighborhood.expected(storage)
        self._changes += 1

    def choose(self, now: Nanoseconds) -> Candidate | None:
        self._listen()
        self._lower()
        classes = self._neighborhood
        if self._slot and isinstance(classes, _Classes) and classes.overdrawn():
            return self._least_of_all(now)
        return super().choose(now)

    def _least_of_all(self, now: Nanoseconds) -> Candidate:
        """Compare all candidates as the authors do, because scores may be negative."""
        ordered = sorted(self._slot, key=lambda storage: storage.order)
        least, found = math.inf, ordered[-1]
        for storage in ordered:
            weight = self._weight(storage)
            if self._by_staleness:
                weight *= now - storage.last_access
            score = self._neighborhood.cost(storage) / weight if weight else math.inf
            if score <= least:
                least, found = score, storage
            if score == 0:
                break
        return found


@final
class AuthorsEngine(Engine):
    """Rekindle's engine with the rules of the authors' simulator. It cannot swap.

    Args:
        budget: Bytes. None: no limit.
        policy: Scores the candidates for eviction.
        dead: The treatment of dead storages.
        recompute_limit: Raise `Thrashed` once recomputation took longer than this (ns).
    """

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        dead: Dead = "evict",
        recompute_limit: Nanoseconds | None = None,
    ) -> None:
        super().__init__(budget, policy, recompute_limit=recompute_limit)
        self._dead = dead
        self.listen()
        if isinstance(self._chooser, ScoredChooser):
            self._chooser = _Chooser(self._chooser)

    def release(self, storage: Storage) -> Iterable[Action]:
        return () if self._dead == "ignore" else super().release(storage)

    def is_candidate(self, storage: Storage) -> bool:
        usable = storage.resident and storage.replayable and not storage.locks
        return usable and not storage.held and not storage.pinned

    def _materialize(self, call: Call, wanted: Value | None, held: bool) -> Iterator[Action]:
        if not call.ran:
            super()._link(call)
            if isinstance(self._chooser, _Chooser):
                for storage in call.made:
                    self._chooser.expected(storage)
        yield from self._climb(call, wanted, held, eager_locks=True)

    def _link(self, call: Call) -> None:
        for storage in call.made:
            storage.resident = True
            self._chooser.returned(storage)

    def _touch(self, storage: Storage) -> None:
        if self._dead != "banish" or storage.references:
            super()._touch(storage)

    def _evict_or_remove(self, storage: Storage, *, may_stay: bool = True) -> Iterable[Action]:
        if self._dead == "evict" and self.is_candidate(storage):
            return self._evict(storage)
        return self._free(self._prune(storage))

    def _done_with(self, storage: Storage) -> Iterable[Action]:
        return self._free(self._prune(storage))

    def _prune(self, storage: Storage) -> list[Storage]:
        """Banish `storage` if neither the program nor a recomputation needs it.

        Storages that were made from it lose their recipe.
        """
        kept = not storage.dead or storage.locks or storage not in self._storages
        if self._dead != "banish" or kept:
            return []
        if any(not v.defined for call in storage.consumers for v in call.living_outputs()):
            return []
        for call in list(storage.consumers):
            for child in call.disown():
                child.replayable = False
                self._classify(child)
        freed = [storage] if storage.resident else []
        self._leave_graph(storage)  # the authors do not banish the parents
        return freed


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A run to simulate. `quirks` is False for Rekindle's own rules."""

    log: Path
    policy: str
    ratio: float  #: budget as a share of the peak without evictions
    dead: Dead = "evict"
    quirks: bool = True


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a run; those of a failed run cover the time up to the failure."""

    log: str
    policy: str
    dead: Dead
    quirks: bool
    ratio: float
    budget_bytes: Bytes
    keep_all_bytes: Bytes
    status: Literal["pass", "oom", "thrash"]
    overhead: float
    peak_bytes: Bytes
    evictions: int
    rematerializations: int
    scores: int  #: number of scores that the policy computed


def policy_of(name: str) -> Policy:
    """Return the policy called `name`; "dtr-unopt" is that of the paper's curve for banishing."""
    return Unoptimized() if name == "dtr-unopt" else named(name)


def run(case: Case, trace: Trace | None = None) -> Outcome:
    """Simulate one run. It fails (thrash) if it takes twice the program's own time."""
    trace = trace or load(case.log)
    everything = keep_all_peak(trace)
    budget = int(everything * case.ratio)
    engine = engine_of(trace, budget, case)
    scores = _counted(engine._chooser)
    status: Literal["pass", "oom", "thrash"] = "pass"
    actions: list[Action] = []
    try:
        play(trace, engine, actions)
    except NoRoom:
        status = "oom"
    except Thrashed:
        status = "thrash"
    computed = sum(isinstance(action, Compute) for action in actions)
    return Outcome(
        log=trace.name,
        policy=case.policy,
        dead=case.dead,
        quirks=case.quirks,
        ratio=case.ratio,
        budget_bytes=budget,
        keep_all_bytes=everything,
        status=status,
        # the clock of the authors' simulator starts at 1
        overhead=(engine.clock + case.quirks) / trace.compute_ns,
        peak_bytes=engine.peak,
        evictions=len(actions) - computed,
        rematerializations=computed - len({a.op for a in actions if isinstance(a, Compute)}),
        scores=scores(),
    )


def engine_of(trace: Trace, budget: Bytes, case: Case) -> Engine:
    """Return the engine for a run."""
    policy = policy_of(case.policy)
    if case.quirks:
        return AuthorsEngine(budget, policy, case.dead, trace.compute_ns)
    engine = Engine(budget, policy, recompute_limit=trace.compute_ns)
    engine.listen()
    return engine


def play(trace: Trace, engine: Engine, actions: list[Action]) -> None:
    """Run the program of `trace`. Append the actions of the engine to `actions`."""
    for _, acts in drive(trace, engine):
        actions.extend(acts)
        engine.idle.clear()


def _counted(chooser: Chooser) -> Callable[[], int]:
    """Count the scores that `chooser` computes. Return a function that returns their number."""
    count = 0
    if isinstance(chooser, ScoredChooser):
        neighborhood = chooser._neighborhood
        cost = neighborhood.cost

        def counted(storage: Candidate) -> Nanoseconds:
            nonlocal count
            count += 1
            return cost(storage)

        neighborhood.cost = counted  # type: ignore[method-assign]
    return lambda: count
