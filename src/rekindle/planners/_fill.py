"""Improve a sequence: an item that was evicted and recomputed stays if there is room."""

from __future__ import annotations

from rekindle._types import Bytes
from rekindle.planners._edits import Edit, changed, keep_instead
from rekindle.planners._sequence import Timeline, prune, timeline


def fill(line: Timeline, budget: Bytes) -> tuple[int, ...]:
    """Return the steps without the recomputations that unused memory can replace.

    Expensive recomputations are removed first. All for which there is room together are removed at
    once; if that fails, half of them, and so on.
    """
    refused: set[int] = set()  # nodes whose recomputation cannot be removed
    while True:
        edits = [e for e in keep_instead(line, budget) if line.steps[e.step] not in refused]
        while edits:
            shorter = _without(line, edits)
            if shorter is not None and shorter.peak <= budget:
                line = shorter
                break
            if len(edits) == 1:
                refused.add(line.steps[edits[0].step])
            edits = edits[: len(edits) // 2]
        else:
            return line.steps


def _without(line: Timeline, edits: list[Edit]) -> Timeline | None:
    """Return the sequence after the edits, or None if it is invalid."""
    problem = line.problem
    try:
        return timeline(problem, prune(problem, changed(line.steps, edits)))
    except ValueError:  # an in-place write takes over the memory of an item in its gap
        return None
