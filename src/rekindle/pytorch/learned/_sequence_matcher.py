"""Compare the operators of a running training step with those of a recorded step.

The sequence of operators is the shape of a step (not of a tensor). Two steps have the same shape if
they run the same operators of the autograd graph in the same order. Other operators may differ: a
data loader shuffles at the start of an epoch, or a loss is printed now and then. Such an operator
is matched if the recorded step has it at the same point, else it is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

GRAPH: Final = 1
BACKWARD: Final = 2
"""Bits of an operator's number: it is part of the autograd graph; it runs in the backward pass."""

UNMATCHED: Final = -1
MISMATCH: Final = -2
FAR: Final = 64
"""Most recorded operators to skip to match an operator that is not part of the autograd graph."""


@final
class SequenceMatcher:
    """A position in a recorded step, which advances with each operator of a running step.

    Args:
        shape: The operators of the recorded step. The attribute `at` is the index of the operator
            that is expected next.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape
        self.at = 0

    @property
    def complete(self) -> bool:
        """True if the running step has run all recorded operators of the autograd graph."""
        return self._next_of_graph() == len(self._shape)

    def observe(self, op_id: int) -> int:
        """Match the next operator of the running step, which has the number `op_id`.

        Returns:
            The index of the operator in the recorded step. `UNMATCHED`: the recorded step has no
            such operator at this point. `MISMATCH`: the running step has another shape.
        """
        shape, at = self._shape, self.at
        if at < len(shape) and shape[at] == op_id:
            self.at = at + 1
            return at
        if not at:
            return MISMATCH if op_id & BACKWARD else UNMATCHED
        if not op_id & GRAPH:
            return self._further(op_id, min(self._next_of_graph(), at + FAR))
        expected = self._next_of_graph()
        if expected < len(shape):
            return self._further(op_id, expected + 1, expected)
        return MISMATCH if op_id & BACKWARD or op_id == shape[0] else UNMATCHED

    def _next_of_graph(self) -> int:
        """Return the index in the recorded step of the next operator of the autograd graph."""
        shape, at = self._shape, self.at
        while at < len(shape) and not shape[at] & GRAPH:
            at += 1
        return at

    def _further(self, op_id: int, end: int, start: int | None = None) -> int:
        """Find `op_id` in the recorded step between two indices, and move `at` past it.

        Return its index. If it is not found: `UNMATCHED` without `start`, else `MISMATCH`.
        """
        shape = self._shape
        for found in range(self.at if start is None else start, end):
            if shape[found] == op_id:
                self.at = found + 1
                return found
        return UNMATCHED if start is None else MISMATCH


def is_of(shape: Sequence[int], step: Sequence[int]) -> bool:
    """Return True if the operators of a finished step match those of the recorded step `shape`."""
    if shape == step:
        return True
    walk = SequenceMatcher(shape)
    return all(walk.observe(op_id) != MISMATCH for op_id in step) and walk.complete
