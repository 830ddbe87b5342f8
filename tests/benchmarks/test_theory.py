"""Tests of the theorems of the DTR paper: how recomputations grow as memory shrinks.

Theorem 1 is about a chain of N layers. In theorem 2, an adversary builds the graph while it runs:
it always extends a chain of operators whose values are all evicted. Figures are those of the
authors' simulator (commit eff53cc4).
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
from _theory import adversary, chen, linear_recomputations, revolve

from rekindle.policies import DTR, LRU, Ablation, Policy

THEOREM_1 = Ablation(staleness=False, size=True, cost="exact")

# Recomputed operators by (number of layers n, budget in values). The budgets are about 2 sqrt(n),
# log2(n) and n / 2.
LINEAR = {
    (16, 8): 8,
    (32, 12): 20,
    (64, 16): 49,
    (128, 23): 105,
    (256, 32): 230,
    (16, 4): 57,
    (32, 5): 83,
    (64, 6): 196,
    (128, 7): 485,
    (256, 8): 1107,
    (32, 16): 16,
    (64, 32): 32,
    (128, 64): 64,
    (256, 128): 128,
}
LINEAR_THEOREM = {(16, 8): 13, (32, 12): 23, (64, 16): 74, (128, 23): 132, (256, 32): 373}
LARGE = {(512, 46): 485, (1024, 64): 988, (2048, 91): 2115, (4096, 128): 4217, (1024, 10): 5064}
LARGE_THEOREM = {(512, 46): 751, (1024, 64): 1716, (2048, 91): 3111, (4096, 128): 7454}
# Recomputed operators by (number of operators, budget in values): equal for the policies h_DTR,
# h_DTR^eq and LRU.
ADVERSARY = {
    (64, 4): 465,
    (128, 4): 1953,
    (64, 8): 217,
    (128, 8): 945,
    (256, 8): 3937,
    (128, 16): 441,
    (256, 32): 889,
}


@pytest.mark.parametrize("quirks", [False, True])
@pytest.mark.parametrize("policy", [DTR(), DTR("classes")], ids=repr)
def test_recomputations_of_linear_network_equal_dtr_figures(policy: Policy, quirks: bool) -> None:
    found = {case: linear_recomputations(*case, policy, quirks=quirks) for case in LINEAR}
    assert found == LINEAR


@pytest.mark.parametrize("quirks", [False, True])
def test_recomputations_of_dtr_theorem_1_equal_paper(quirks: bool) -> None:
    """All costs are equal, so ties are broken in the same way as in the authors' simulator."""
    found = {c: linear_recomputations(*c, THEOREM_1, quirks=quirks) for c in LINEAR_THEOREM}
    assert found == LINEAR_THEOREM


@pytest.mark.slow
def test_recomputations_of_large_network_equal_dtr_figures() -> None:
    assert {case: linear_recomputations(*case, DTR()) for case in LARGE} == LARGE
    found = {case: linear_recomputations(*case, THEOREM_1) for case in LARGE_THEOREM}
    assert found == LARGE_THEOREM


@pytest.mark.parametrize("policy", [DTR(), DTR("classes"), LRU()], ids=repr)
def test_recomputations_of_dtr_theorem_2_equal_paper(policy: Policy) -> None:
    for (asked, budget), recomputations in ADVERSARY.items():
        assert adversary(asked, budget, policy).recomputations == recomputations


def test_overhead_against_adversary_grows_as_in_dtr_theorem_2() -> None:
    """With memory for B values, N operators take at least N / (2 B) times their own time."""
    for asked in (64, 128, 256):
        for budget in (4, 8, 16):
            assert adversary(asked, budget, DTR()).total / asked >= asked / budget / 2


def test_recomputations_of_chain_grow_as_in_dtr_theorem_1() -> None:
    """With memory for 2 sqrt(N) values, a chain of N layers recomputes at most 1.1 N operators."""
    for layers in (16, 64, 256, 1024):
        budget = math.ceil(2 * math.sqrt(layers))
        assert linear_recomputations(layers, budget, DTR()) < 1.1 * layers


def test_recomputations_of_linear_network_grow_without_jumps() -> None:
    """Less memory never saves recomputations, and no step of the curve is steep.

    The curve begins with memory for all values, and ends with memory for about log2(N).
    """
    layers = 128
    again = functools.partial(linear_recomputations, layers, policy=DTR())
    curve = {budget: again(budget) for budget in (7, 9, 12, 16, 23, 32, 45, 64, 90, 128)}
    assert curve[128] == 0
    assert curve[90] == 128 - 90
    assert curve[64] == 128 - 64
    assert curve[23] == 105  # memory of 2 sqrt(N): about N recomputations
    assert curve[7] == 485  # memory of log2(N): below N log2(N) recomputations
    assert layers * math.log2(layers) > 485
    values = list(curve.values())
    assert values == sorted(values, reverse=True)
    assert all(upper <= 2.2 * lower + 40 for upper, lower in itertools.pairwise(values))


def test_revolve_and_chen_costs_equal_published_figures() -> None:
    # Griewank and Walther 2000: ten steps with three checkpoints take 9 + 6 + ... forward steps.
    assert revolve(10, 10) == revolve(1, 1) == 0
    assert revolve(10, 3) == 2 * 10 - 5 - 9
    assert revolve(11, 3) == 3 * 11 - 15 - 10
    assert all(revolve(n, s) == _revolve(n, s) for n in range(1, 40) for s in range(1, 8))
    assert chen(100) == 90


@functools.cache
def _revolve(layers: int, slots: int) -> int:
    """Return Revolve's cost by trying all positions of the next checkpoint."""
    return _steps(layers, slots) - (layers - 1)


@functools.cache
def _steps(layers: int, slots: int) -> int:
    if layers == 1:
        return 0
    if slots == 1:
        return layers * (layers - 1) // 2
    return min(m + _steps(layers - m, slots - 1) + _steps(m, slots) for m in range(1, layers))
