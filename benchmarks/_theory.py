"""Simulate the programs of the DTR paper's two theorems: a linear network, and an adversary.

The adversary is a program that chooses its next operator so that the policy's past evictions cost
the most. The paper is Kirisame et al., ICLR 2021 (arXiv 2006.09616), section 3 and appendices A and
B. For comparison, `revolve` and `chen` return the recomputation of two planned schedules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import final

from _authors import AuthorsEngine, play

from rekindle._types import Bytes, OpId, StorageId
from rekindle.engine import Call, Engine, Value
from rekindle.policies import Policy
from rekindle.simulator import replay
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
    trace = chain(layers, early=True)
    if not quirks:
        return replay(trace, budget=budget, policy=policy).recompute_ns
    engine = AuthorsEngine(budget, policy)
    play(trace, engine, [])
    return engine.recompute_ns


@final
@dataclass(frozen=True, slots=True)
class Duel:
    """Result of an adversary: how many operators it called, and how many were recomputed."""

    asked: int
    recomputations: int

    @property
    def total(self) -> int:
        return self.asked + self.recomputations


def adversary(asked: int, budget: Bytes, policy: Policy) -> Duel:
    """Run the adversary of theorem 2 against a policy.

    Theorem 2: for every deterministic policy there is a program of N operators that takes
    Omega(N / budget) times as long as with a schedule that knows the program. The program has a
    pinned root value, and `budget` chains of operators that start from the root. Each value has
    size 1. The root is always in memory, so at least one chain has no value in memory. The next
    operator extends the shortest such chain, and the engine must first recompute the whole chain.

    Args:
        asked: N, the number of operators.
        budget: The budget, in units of one storage.
        policy: The policy that selects storages to evict.
    """
    engine = Engine(budget, policy)

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

    Griewank and Walther 2000: let beta(s, t) be the binomial coefficient "s + t choose s", and t
    the smallest number with beta(slots, t) >= layers. The schedule takes
    t * layers - beta(slots + 1, t - 1) forward steps. Of these, layers - 1 belong to the first run
    and are not recomputation.
    """
    t = 0
    while math.comb(slots + t, slots) < layers:
        t += 1
    return t * layers - math.comb(slots + t, slots + 1) - (layers - 1) if t else 0


def chen(layers: int) -> int:
    """Return how many forward steps are recomputed with segments of sqrt(layers) layers.

    According to Chen et al. 2016, each step runs again except the last one of each segment.
    """
    return layers - math.isqrt(layers)
