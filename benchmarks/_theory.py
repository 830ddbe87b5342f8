"""Simulate the programs of the DTR paper's two theorems: the linear network, and the adversary.

The paper is Kirisame et al., ICLR 2021 (arXiv 2006.09616), section 3 and appendices A and B. The
functions `revolve` and `chen` give known bounds for comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import final

from rekindle._types import Bytes, OpId, StorageId
from rekindle.engine import Call, Engine, Rules, Value
from rekindle.policies import Policy
from rekindle.simulator import Run
from rekindle.trace import chain


def linear_recomputations(
    layers: int, budget: Bytes, policy: Policy, *, quirks: bool = False
) -> int:
    """Count the recomputed operators of a linear network of unit sizes and costs.

    Theorem 1: with a budget of 2 sqrt(layers) or more the count is O(layers), if the policy's score
    uses the exact neighborhood (the evicted storages to recompute) and the size, not the staleness.

    Args:
        layers: The number of layers.
        budget: The budget, in units of one storage.
        policy: The policy that selects storages to evict.
        quirks: Decide as the DTR authors' simulator does.
    """
    run = Run(chain(layers, early=True), budget, policy, Rules(quirks=quirks))
    run.go()
    return run.engine.recompute_ns


@final
@dataclass(frozen=True, slots=True)
class Duel:
    """Result of an adversary: the numbers of operators that it called, and that were recomputed."""

    asked: int
    recomputations: int

    @property
    def total(self) -> int:
        return self.asked + self.recomputations


def adversary(asked: int, budget: Bytes, policy: Policy, *, quirks: bool = False) -> Duel:
    """Run the adversary of theorem 2 against a policy.

    Theorem 2: for every deterministic policy there is a program of N operators that takes
    Omega(N / budget) times as long as with a schedule that knows the program. The program has a
    pinned root, and as many chains of operators below the root as the budget has units. The root
    takes one unit, so some chain has no resident storage. The next operator extends the shortest
    such chain, which must first be recomputed.

    Args:
        asked: N, the number of operators.
        budget: The budget, in units of one storage.
        policy: The policy that selects storages to evict.
        quirks: Decide as the DTR authors' simulator does.
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
    """Return how many forward steps an optimal schedule recomputes with `slots` checkpoints.

    Griewank and Walther 2000: let beta(s, t) = C(s + t, s), and t the least number with
    beta(slots, t) >= layers. The schedule takes t * layers - beta(slots + 1, t - 1) forward steps.
    Of these, layers - 1 are the first run and not recomputation.
    """
    t = 0
    while math.comb(slots + t, slots) < layers:
        t += 1
    return t * layers - math.comb(slots + t, slots + 1) - (layers - 1) if t else 0


def chen(layers: int) -> int:
    """Return how many forward steps are recomputed with segments of sqrt(layers) layers.

    By Chen et al. 2016 these are all steps but the last of each segment.
    """
    return layers - math.isqrt(layers)
