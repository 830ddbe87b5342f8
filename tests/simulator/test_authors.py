"""Tests that the engine takes the same actions as the simulator of the DTR paper's authors.

The module `authors` is that simulator. Cases include equal sizes and costs, and the negative costs
that it may compute for groups of evicted neighbors.
"""

from __future__ import annotations

import random

import pytest

from rekindle._types import ValueId
from rekindle.engine import NoRoom, Rules, Thrashed
from rekindle.policies import Ablation, score_of
from rekindle.schedule import Action
from rekindle.simulator import Run
from rekindle.simulator._native import Core
from rekindle.trace import Trace, TraceBuilder, keep_all_peak
from tests.simulator.authors import Authors, GaveUp

MIB = 2**20
SIZES = ((4 * MIB,), (1,), (4, 8), (2 * MIB, 4 * MIB, 4096, MIB), (7, 10**9, 3 * 10**8 + 1))
COSTS = ((1,), (1, 2, 3), (471, 500, 900, 3000), tuple(range(471, 10**6, 3331)))


def _program(rng: random.Random, *, length: int = 90) -> Trace:
    """Draw a program like a log of an unrolled optimization.

    It has small storages of few sizes, and views that are read long after the eviction of their
    base.
    """
    builder = TraceBuilder("unrolled")
    sizes, costs = rng.choice(SIZES), rng.choice(COSTS)
    views, several = rng.choice([0, 0.2, 0.5]), rng.choice([0, 0.3])
    constants = [builder.source(rng.choice(sizes)) for _ in range(3)]
    alive: list[ValueId] = []
    for number in range(length):
        inputs = [
            rng.choice(alive[-30 if rng.random() < 0.4 else -12 :] or constants)
            for _ in range(rng.randint(1, 3))
        ]
        if rng.random() < 0.2:
            inputs.append(rng.choice(constants))
        cost = rng.choice(costs)
        if rng.random() < views:
            base = inputs[0]
            alive += builder.call(f"view{number}", cost, inputs[:2], [0], aliases=[base])
        else:
            outputs = rng.choice([1, 1, 2, 3]) if rng.random() < several else 1
            made = [rng.choice(sizes) for _ in range(outputs)]
            alive += builder.call(f"op{number}", cost, inputs, made)
        while len(alive) > rng.randint(15, 60):
            builder.release(alive.pop(rng.randrange(len(alive))))
    for value in reversed(alive):
        (gradient,) = builder.call("grad", rng.choice(costs), [value], [rng.choice(sizes)])
        builder.release(value)
        (builder.pin if rng.random() < 0.1 else builder.release)(gradient)
    return builder.build()


def _theirs(trace: Trace, budget: int, policy: Ablation) -> tuple[bool, list[Action], int]:
    run = Authors(trace, budget, policy, limit=2 * trace.compute_ns)
    try:
        run.go()
    except GaveUp:
        return False, run.actions, run.least_total
    return True, run.actions, run.least_total


def _ours(trace: Trace, budget: int, policy: Ablation, core: Core) -> tuple[bool, list[Action]]:
    rules = Rules("evict", 2 * trace.compute_ns, quirks=True)
    run = Run(trace, budget, policy, rules, core=core)
    try:
        run.go()
    except (NoRoom, Thrashed):
        return False, list(run.record().actions)
    return True, list(run.record().actions)


@pytest.mark.parametrize("staleness", [False, True], ids=["", "staleness"])
@pytest.mark.parametrize("size", [False, True], ids=["", "size"])
@pytest.mark.parametrize("cost", ["classes", "local", "none"])
def test_simulator_with_dtr_rules_acts_like_dtr_simulator(
    cost: str, size: bool, staleness: bool
) -> None:
    if cost == "none" and not size and not staleness:
        pytest.skip("that is a random choice")
    policy = Ablation(staleness=staleness, size=size, cost=cost)  # type: ignore[arg-type]
    cores: list[Core] = ["python"] if score_of(policy) is None else ["python", "native"]
    passed = below_nothing = 0
    for seed in range(16):
        trace = _program(random.Random(seed))
        for ratio in (0.7, 0.5):
            budget = int(keep_all_peak(trace) * ratio)
            done, theirs, least = _theirs(trace, budget, policy)
            passed += done
            below_nothing += least < 0
            for core in cores:
                went, ours = _ours(trace, budget, policy, core)
                assert went == done, (seed, ratio)
                # If both run out of memory, the actions for the last operator are not compared.
                same = len(ours) if done else len(theirs) - 1
                assert ours[:same] == theirs[:same], (seed, ratio)
    assert passed > 8
    assert cost != "classes" or below_nothing > 0
