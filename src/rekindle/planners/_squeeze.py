"""Fit a sequence of nodes into the budget: swap out the storages that stay unread for longest.

This is Belady's rule (1966). If the backward pass retraces the forward pass, these are the storages
that are made first. They also leave most time for the copies to the host and back.
"""

from __future__ import annotations

import numpy as np

from rekindle._types import Bytes
from rekindle.planners._edits import Edit, changed
from rekindle.planners._lives import Gap, gaps
from rekindle.planners._sequence import Timeline


def squeeze(line: Timeline, budget: Bytes) -> list[int] | None:
    """Add swap-ins to a sequence until no step needs more than `budget` (bytes).

    Returns:
        The steps with swap-ins, or None if some step still exceeds the budget.
    """
    problem = line.problem
    memory = line.memory.copy()
    clock = np.cumsum([problem.cost[node] if node >= 0 else 0 for node in line.steps])
    longest = sorted(gaps(line), key=lambda gap: int(clock[gap.begin] - clock[gap.end]))
    chosen: list[Gap] = []
    while memory.max(initial=0) > budget:
        step = int(memory.argmax())
        gap = next((gap for gap in longest if gap.begin < step < gap.end), None)
        if gap is None:
            return None
        longest.remove(gap)
        chosen.append(gap)
        memory[gap.begin + 1 : gap.end] -= problem.nbytes[gap.item]
    coming: dict[int, list[int]] = {}
    for gap in chosen:
        coming.setdefault(gap.end, []).append(~gap.item)
    return changed(
        line.steps,
        [Edit(step, (*items, line.steps[step]), 0.0) for step, items in coming.items()],
    )
