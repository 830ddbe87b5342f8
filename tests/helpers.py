"""What many tests need: one list of all policies, so that a newcomer is covered by one line."""

from __future__ import annotations

from rekindle.policies import DTR, LRU, MSPS, Ablation, Largest, Policy, Random

ALL_POLICIES: tuple[Policy, ...] = (
    DTR(),
    DTR("classes"),
    DTR("local"),
    LRU(),
    Largest(),
    MSPS(),
    Random(seed=3),
    Ablation(staleness=True, size=False, cost="classes"),
)
