"""Improve a plan: keep storages in unused memory, so that they are not recomputed."""

from __future__ import annotations

from rekindle._types import Bytes
from rekindle.planners._edits import Edit, changed, keep_instead
from rekindle.planners._sequence import Timeline, prune, timeline


def fill(line: Timeline, budget: Bytes) -> tuple[int, ...]:
    """Remove recomputations whose results can stay in memory instead, and return the steps.

    The most expensive recomputations come first. All recomputations whose results fit together are
    removed at once. If the resulting sequence is invalid or exceeds `budget`, half as many are
    tried, and so on.
    """
    refused: set[int] = set()  # nodes whose recomputation could not be removed
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
    """Return the sequence after the edits, or None if the edited sequence is invalid."""
    problem = line.problem
    try:
        return timeline(problem, prune(problem, changed(line.steps, edits)))
    except ValueError:  # An in-place write overwrites an item that would have to stay.
        return None
