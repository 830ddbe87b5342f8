"""Better plans from a plan: an item that was let go and made again can stay if there is room."""

from __future__ import annotations

import numpy as np

from rekindle._types import Bytes
from rekindle.planners._sequence import Timeline, prune, timeline


def fill(line: Timeline, budget: Bytes) -> tuple[int, ...]:
    """The steps without the recomputations that unused memory can replace, dearest first."""
    problem = line.problem
    refused: set[int] = set()
    while True:
        lives: dict[int, list[tuple[int, int]]] = {}
        for copy in line.copies:
            lives.setdefault(copy.item, []).append((copy.start, copy.end))
        candidates: list[tuple[int, int]] = []
        for step, node in enumerate(line.steps):
            if step != line.first[node] and node not in refused:
                candidates.append((-problem.cost[node], step))
        for _, step in sorted(candidates):
            node = line.steps[step]
            extra = np.zeros(len(line.steps), dtype=np.int64)
            for item in problem.makes[node]:
                before = [end for start, end in lives[item] if start < step]
                used = any(start == step and end > step for start, end in lives[item])
                if used and before:
                    extra[max(before) + 1 : step] += problem.nbytes[item]
            if (line.memory + extra).max() <= budget:
                shorter = [n for at, n in enumerate(line.steps) if at != step]
                try:
                    candidate = timeline(problem, prune(problem, shorter))
                except ValueError:  # its item is lent to an in-place write between
                    refused.add(node)
                    continue
                if candidate.peak <= budget and candidate.cost <= line.cost:
                    line = candidate
                    break
                refused.add(node)
        else:
            return line.steps
