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


class Link:
    """A storage in a chain, as a policy sees it; `above` and `below` are filled by the test."""

    def __init__(self, nbytes: int, cost: int, last: int) -> None:
        self.nbytes, self.cost, self.last_access, self.order = nbytes, cost, last, last
        self.resident = True
        self.above: list[Link] = []
        self.below: list[Link] = []

    def parents(self) -> list[Link]:
        return self.above

    def children(self) -> list[Link]:
        return self.below
