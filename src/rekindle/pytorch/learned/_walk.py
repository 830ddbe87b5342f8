"""How far a step has come along a shape that is known.

Operators of the graph come in the same order in all steps of a shape. Others come and go: a loader
shuffles when an epoch begins, a loss is printed now and then, amid a step or between two. Those are
met where they are expected, and else left aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

GRAPH: Final = 1
BACKWARD: Final = 2
"""Bits of what is met: whether it is of the graph, and whether it is so in a backward pass."""

ASIDE: Final = -1
LOST: Final = -2
FAR: Final = 64
"""How many operators beside the graph may be missing in a row, where the next of them comes."""


@final
class Walk:
    """One step along `shape`, the operators of another one. `at`: which comes next."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape
        self.at = 0

    @property
    def complete(self) -> bool:
        """Whether nothing of the graph is missing."""
        return self._next_of_graph() == len(self._shape)

    def meets(self, met: int) -> int:
        """Which operator of the shape this is; `ASIDE`: none; `LOST`: it is another shape."""
        shape, at = self._shape, self.at
        if at < len(shape) and shape[at] == met:
            self.at = at + 1
            return at
        if not at:
            return LOST if met & BACKWARD else ASIDE
        if not met & GRAPH:
            return self._further(met, min(self._next_of_graph(), at + FAR))
        expected = self._next_of_graph()
        if expected < len(shape):
            return self._further(met, expected + 1, expected)
        return LOST if met & BACKWARD or met == shape[0] else ASIDE

    def _next_of_graph(self) -> int:
        shape, at = self._shape, self.at
        while at < len(shape) and not shape[at] & GRAPH:
            at += 1
        return at

    def _further(self, met: int, end: int, start: int | None = None) -> int:
        shape = self._shape
        for found in range(self.at if start is None else start, end):
            if shape[found] == met:
                self.at = found + 1
                return found
        return ASIDE if start is None else LOST


def is_of(shape: Sequence[int], step: Sequence[int]) -> bool:
    """Whether `step`, which is over, is of this shape."""
    walk = Walk(shape)
    return all(walk.meets(met) != LOST for met in step) and walk.complete
