"""The DTR paper's two theorems as programs: the linear network, and the adversary.

Kirisame et al., ICLR 2021 (arXiv 2006.09616), section 3 and appendices A and B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import final

from rekindle._types import Bytes, OpId, StorageId
from rekindle.engine import Call, Engine, Rules, Value
from rekindle.policies import Policy
from rekindle.simulator._replay import Run
from rekindle.trace import chain


def linear_recomputations(
    layers: int, budget: Bytes, policy: Policy, *, quirks: bool = False
) -> int:
    """Operators run again when a chain of unit layers is differentiated in room for `budget` units.

    Theorem 1: with the exact neighborhood, size and no staleness it is O(layers) for a budget of
    2 sqrt(layers) or more.
    """
    run = Run(chain(layers, early=True), budget, policy, Rules(quirks=quirks))
    run.go()
    return run.engine.recompute_ns


@final
@dataclass(frozen=True, slots=True)
class Duel:
    """What the adversary cost: operators it asked for, and those run again for them."""

    asked: int
    recomputations: int

    @property
    def total(self) -> int:
        return self.asked + self.recomputations


def adversary(asked: int, budget: Bytes, policy: Policy, *, quirks: bool = False) -> Duel:
    """Theorem 2: for every deterministic policy there is a program of N operators that takes
    Omega(N / budget) times what a schedule that knows it would take.

    A pinned root, and as many chains below it as the budget has units: since the root takes one,
    some chain has no resident storage, and the next operator extends the shortest such chain.
    """
    engine = Engine(budget, policy, Rules("ignore", quirks=quirks))

    def run(number: int, inputs: list[Value]) -> Value:
        call = Call(OpId(number), "unit", 1, inputs)
        value = call.makes(StorageId(number), 1)
        for _ in engine.call(call):
            pass
        return value

    root = run(0, [])
    for _ in engine.pin(root):
        pass
    chains: list[list[Value]] = [[] for _ in range(budget)]
    for number in range(1, asked):
        absent = [c for c in chains if not any(value.defined for value in c)]
        shortest = min(absent, key=len)
        shortest.append(run(number, [shortest[-1] if shortest else root]))
    return Duel(asked, engine.recompute_ns)


@cache
def revolve(layers: int, slots: int) -> int:
    """Forward steps that an optimal schedule takes again with `slots` checkpoints.

    Griewank and Walther 2000: with t the least number with beta(slots, t) >= layers, it takes
    t * layers - beta(slots + 1, t - 1) forward steps, where beta(s, t) = C(s + t, s); layers - 1
    of them are the first ones.
    """
    t = 0
    while math.comb(slots + t, slots) < layers:
        t += 1
    return t * layers - math.comb(slots + t, slots + 1) - (layers - 1) if t else 0


def chen(layers: int) -> int:
    """Forward steps that segments of sqrt(layers) take again: all but those that end a segment
    (Chen et al. 2016)."""
    return layers - math.isqrt(layers)
