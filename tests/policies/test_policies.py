"""Tests of each eviction policy against its published formula, computed directly from the graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from rekindle.engine import Engine, NoRoom, Storage
from rekindle.policies import DTR, LRU, MSPS, Ablation, Largest, Policy, Random
from rekindle.policies._neighborhood import Classes, Exact
from rekindle.simulator import replay
from rekindle.trace import Trace, keep_all_peak, largest_need
from tests.dags import random_dag
from tests.helpers import Link


def _reach(storage: Storage, up: bool) -> set[Storage]:
    """Return the evicted ancestors (`up`) or descendants of `storage`.

    The path to each of them has only evicted storages.
    """
    found: set[Storage] = set()

    def visit(node: Storage) -> None:
        for other in node.parents() if up else node.children():
            if not other.resident and other not in found and other is not storage:
                found.add(other)
                visit(other)

    visit(storage)
    return found


def _exact(storage: Storage) -> float:
    up, down = _reach(storage, True), _reach(storage, False)
    return storage.cost + sum(s.cost for s in up) + sum(s.cost for s in down)


def _upwards(storage: Storage) -> float:
    return storage.cost + sum(s.cost for s in _reach(storage, True))


FORMULAS: list[tuple[Policy, Callable[[Storage, int], float]]] = [
    (DTR(), lambda s, st: s.nbytes * st / max(_exact(s), 1e-9)),
    (DTR("local"), lambda s, st: s.nbytes * st / max(s.cost, 1e-9)),
    (LRU(), lambda s, st: st),
    (Largest(), lambda s, st: s.nbytes),
    (MSPS(), lambda s, st: s.nbytes / max(_upwards(s), 1e-9)),
    (Ablation(staleness=False, size=False, cost="exact"), lambda s, st: 1 / max(_exact(s), 1e-9)),
    (Ablation(staleness=True, size=False, cost="local"), lambda s, st: st / max(s.cost, 1e-9)),
]


def _trace(seed: int) -> tuple[Trace, int]:
    rng = random.Random(seed)
    trace = random_dag(40, rng)
    low, high = largest_need(trace), keep_all_peak(trace)
    return trace, (min(low, high) + high) // 2


@pytest.mark.parametrize(("policy", "benefit"), FORMULAS, ids=[repr(p) for p, _ in FORMULAS])
def test_each_policy_evicts_storage_with_greatest_benefit(
    policy: Policy, benefit: Callable[[Storage, int], float]
) -> None:
    compared = 0
    for seed in range(25):
        trace, budget = _trace(seed)

        def best_is_chosen(engine: Engine) -> None:
            nonlocal compared
            candidates = [s for s in engine.storages if s.order >= 0]
            if not candidates:
                return
            chosen = engine._choose()
            values = {s: benefit(s, engine.clock - s.last_access) for s in candidates}
            assert isinstance(chosen, Storage)
            best = max(values.values())
            assert values[chosen] == pytest.approx(best, rel=1e-12)
            compared += 1

        try:
            replay(trace, budget=budget, policy=policy, watch=best_is_chosen)
        except NoRoom:
            continue
    assert compared > 300


@pytest.mark.parametrize(("policy", "benefit"), FORMULAS, ids=[repr(p) for p, _ in FORMULAS])
def test_eviction_cost_of_storage_equals_formula_of_policy(
    policy: Policy, benefit: Callable[[Storage, int], float]
) -> None:
    by_size = isinstance(policy, DTR | Largest | MSPS)
    compared = 0
    for seed in range(10):
        trace, budget = _trace(seed)

        def loss_is_as_told(engine: Engine) -> None:
            nonlocal compared
            for storage in engine.storages:
                loss, staleness = engine.loss(storage), engine.clock - storage.last_access
                assert (loss is None) == (storage.order < 0)
                if loss and staleness:
                    size = storage.nbytes if by_size else 1
                    assert loss == pytest.approx(size / benefit(storage, staleness), rel=1e-12)
                    compared += 1

        try:
            replay(trace, budget=budget, policy=policy, watch=loss_is_as_told)
        except NoRoom:
            continue
    assert compared > 300


def test_union_find_cost_equals_exact_cost_until_recomputation() -> None:
    """`Classes` gives the same cost of evicted neighbors as `Exact` while values are only evicted.

    `Classes` is an approximation by union-find: it never splits a group of evicted neighbors, and
    does not distinguish ancestors from descendants. On a chain of values of which none is
    recomputed, neither makes a difference.
    """

    rng = random.Random(7)
    links = [Link(1, rng.randint(1, 9), 0) for _ in range(30)]
    for upper, lower in itertools.pairwise(links):
        upper.below.append(lower)
        lower.above.append(upper)
    exact, classes = Exact(), Classes()
    for link in rng.sample(links, 20):
        link.resident = False
        exact.evicted(link)
        classes.evicted(link)
        for other in links:
            if other.resident:
                assert exact.cost(other) == classes.cost(other)


def test_union_find_contains_exactly_evicted_recomputable_values() -> None:
    trace, budget = _trace(3)
    engines: list[Engine] = []
    replay(trace, budget=budget, policy=DTR("classes"), watch=engines.append)
    neighborhood = engines[-1]._chooser._neighborhood  # type: ignore[attr-defined]
    evicted = {s for s in engines[-1].storages if not s.resident and s.replayable}
    assert set(neighborhood._node) == evicted == set(neighborhood._owed)


def test_random_policy_with_same_seed_evicts_same_storages() -> None:
    trace, budget = _trace(5)
    runs = [replay(trace, budget=budget, policy=Random(seed)).actions for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
