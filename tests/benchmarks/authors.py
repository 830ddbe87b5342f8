"""The simulator of the DTR paper's authors, written again as simply as possible.

It is their runtime with eager evictions (version 2). Its traces are like their logs: the program
holds nothing and overwrites nothing, and values that cannot be recomputed are pinned. Scores are
those of the paper's ablation (appendix D.1), but not the one with exact evicted neighborhoods. It
shares no code with the engine and the policies.

Source: github.com/uwsampl/dtr-prototype, commit eff53cc4, folder simrd.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rekindle._types import StorageId, ValueId
from rekindle.policies import Ablation
from rekindle.schedule import Action, Compute, Free
from rekindle.trace import Call, Op, Pin, Release, Retain, Trace


class GaveUp(Exception):
    """Raised if all resident storages are locked or pinned, or if the run takes too long."""


@dataclass(eq=False)
class Class:
    """A node of the authors' union-find, which joins evicted neighbors to classes.

    The root of each tree has the sum of the costs of its class.
    """

    total: int
    above: Class | None = None

    def root(self) -> Class:
        node = self
        while node.above is not None:
            node = node.above
        return node


@dataclass(eq=False)
class Piece:
    """A storage and its state in the authors' simulator."""

    number: int
    nbytes: int
    cost: int = 0
    references: int = 0
    locks: int = 0
    last: float = -math.inf
    material: bool = False
    pinned: bool = False
    values: list[int] = field(default_factory=list)
    eq_class: Class | None = None


class Authors:
    """One run. `actions` are the executed operators and the evicted storages, in order."""

    def __init__(self, trace: Trace, budget: int, score: Ablation, *, limit: int) -> None:
        self.trace, self.budget, self.limit = trace, budget, limit
        self.factors = score
        self.pieces = [Piece(number, nbytes) for number, nbytes in enumerate(trace.storages)]
        self.readers: list[list[int]] = [[] for _ in trace.values]  # operators that read each value
        self.defined = [False] * len(trace.values)
        self.pool: list[Piece] = []
        self.ran: set[Op] = set()
        self.clock = 1
        self.memory = self.peak = 0
        self.again = 0  # the time of recomputed operators
        self.least_total = 0  # the least cost of a class that was read
        self.actions: list[Action] = []

    def go(self) -> None:
        for event in self.trace.events:
            match event:
                case Call(op):
                    self.call(self.trace.ops[op])
                case Pin(value):
                    if not self.defined[value]:
                        self.materialize(value)
                    self.pin(value)
                case Retain(value):
                    self.piece(value).references += 1
                case Release(value):
                    piece = self.piece(value)
                    piece.references -= 1
                    if piece.references == 0 and piece.material and not piece.pinned:
                        self.evict(piece)
                case _:
                    raise AssertionError(f"their logs have no {event}")

    def piece(self, value: int) -> Piece:
        return self.pieces[self.trace.values[value]]

    def maker(self, value: int) -> Op:
        return self.trace.ops[self.trace.maker[value]]

    def call(self, op: Op) -> None:
        for value in op.outputs:
            piece = self.piece(value)
            if not piece.values:
                piece.eq_class = Class(0)
            piece.values.append(value)
            piece.references += 1
            makers = {self.trace.maker[v] for v in piece.values}
            piece.cost = sum(self.trace.ops[maker].cost for maker in makers)
        for value in op.inputs:
            self.readers[value].extend(op.outputs)
        self.materialize(op.outputs[0])
        for value in op.outputs:
            self.piece(value).last = self.clock
            if not op.replayable:
                self.pin(value)

    def pin(self, value: ValueId) -> None:
        piece = self.piece(value)
        if not piece.pinned:
            piece.pinned = True
            self.lock(piece)

    def materialize(self, value: ValueId) -> None:
        op = self.maker(value)
        for source in op.inputs:
            self.piece(source).last = self.clock
        for source in [source for source in op.inputs if self.defined[source]]:
            self.lock(self.piece(source))
        for source in [source for source in op.inputs if not self.defined[source]]:
            if not self.defined[source]:
                self.materialize(source)
            self.lock(self.piece(source))
        self.make_room(self.trace.output_bytes(op))
        self.run(op, value)
        for source in op.inputs:
            self.unlock(self.piece(source))
        if self.again > self.limit:
            raise GaveUp

    def run(self, op: Op, wanted: ValueId) -> None:
        self.actions.append(Compute(self.trace.maker[wanted], False))
        self.clock += op.cost
        self.again += op.cost if op in self.ran else 0
        self.ran.add(op)
        self.memory += self.trace.output_bytes(op)
        self.peak = max(self.peak, self.memory)
        siblings = [value for value in op.outputs if value != wanted]
        new = [v for v in [*siblings, wanted] if not self.piece(v).material]
        for value in siblings:
            if self.defined[value] and self.trace.is_root(value):
                self.memory -= self.piece(value).nbytes
        for value in op.outputs:
            self.defined[value] = self.piece(value).material = True
        for piece in map(self.piece, new):
            self.pool.append(piece)
        for piece in map(self.piece, new):
            assert piece.eq_class is not None
            piece.eq_class.root().total -= piece.cost
            piece.eq_class = None

    def lock(self, piece: Piece) -> None:
        if piece.locks == 0:
            self.pool.remove(piece)
        piece.locks += 1

    def unlock(self, piece: Piece) -> None:
        piece.locks -= 1
        if piece.locks == 0:
            self.pool.append(piece)

    def evict(self, piece: Piece) -> None:
        self.actions.append(Free(StorageId(piece.number)))
        piece.material = False
        self.memory -= piece.nbytes
        self.pool.remove(piece)
        for value in piece.values:
            self.defined[value] = False
        piece.eq_class = Class(piece.cost)
        for neighbor in self.evicted_neighbors(piece):
            assert neighbor.eq_class is not None
            theirs, ours = neighbor.eq_class.root(), piece.eq_class.root()
            if theirs is not ours:
                theirs.above = ours
                ours.total += theirs.total

    def evicted_neighbors(self, piece: Piece) -> Iterable[Piece]:
        """Return the neighbors that are not in memory, outputs of calls in progress among them."""
        found: dict[Piece, None] = {}
        for value in piece.values:
            for other in (*self.maker(value).inputs, *self.readers[value]):
                if self.piece(other) is not piece and not self.piece(other).material:
                    found[self.piece(other)] = None
        return found

    def make_room(self, nbytes: int) -> None:
        while self.memory + nbytes > self.budget:
            if not self.pool:
                raise GaveUp
            best, victim = math.inf, self.pool[-1]
            for piece in self.pool:
                score = self.score(piece)
                if score <= best:
                    best, victim = score, piece
                if score == 0:
                    break
            self.evict(victim)

    def score(self, piece: Piece) -> float:
        cost = 1 if self.factors.cost == "none" else piece.cost
        if self.factors.cost == "classes":
            nodes = [other.eq_class for other in self.evicted_neighbors(piece)]
            classes = {node.root(): None for node in nodes if node is not None}
            cost += sum(eq_class.total for eq_class in classes)
            self.least_total = min([self.least_total, *(node.total for node in classes)])
        weight = piece.nbytes if self.factors.size else 1
        if self.factors.staleness:
            weight *= int(self.clock - piece.last)
        return cost / weight if weight > 0 else math.inf
