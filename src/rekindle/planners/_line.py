"""A line through the forward pass: the candidates for checkpoints, and plans that keep some.

*Articulation* candidates are the values through which everything that follows must pass (Chen et
al. 2016 assume a chain of those; Checkmate, MLSys 2020, calls the variant AP): removing one cuts
the forward graph in two. *All* takes every forward value in the program's order (linearised).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

from rekindle.planners._base import backward_start, bring_back, droppable
from rekindle.planners._problem import Problem


def candidates(problem: Problem, line: Literal["articulation", "all"]) -> list[int]:
    """Items made in the forward pass and read in it, in order."""
    backward = backward_start(problem)
    last = [
        max((r for r in problem.readers[item] if r < backward), default=-1)
        for item in range(len(problem.nbytes))
    ]
    items = [
        item
        for item, maker in enumerate(problem.maker)
        if maker < backward and problem.replayable[maker] and last[item] >= 0
    ]
    if line == "all":
        return items
    # After a node, the items that later forward nodes still read are open. One open item only,
    # and it has bytes: everything later passes through it.
    closing: dict[int, int] = {}
    for item in items:
        closing[last[item]] = closing.get(last[item], 0) + 1
    found: list[int] = []
    open_items: set[int] = set()
    for node in range(backward):
        open_items = {item for item in open_items if last[item] > node}
        open_items.update(item for item in problem.makes[node] if last[item] > node)
        if len(open_items) == 1:
            (item,) = open_items
            if problem.replayable[problem.maker[item]] and item not in found:
                found.append(item)
    return found


def reverse(
    problem: Problem,
    line: Sequence[int],
    slots: int,
    split: Callable[[int, int], int],
) -> list[int]:
    """The program with at most `slots` candidates kept at once, chosen by `split(length, slots)`.

    Values between two candidates come back together when the backward pass first demands one of
    them, and stay until it has read them.
    """
    backward = backward_start(problem)
    makers = [problem.maker[item] for item in line]
    kept = [0]  # candidates by position in the line, from 1; 0 is the input
    while kept[-1] < len(line) and len(kept) <= slots:
        kept.append(kept[-1] + split(len(line) - kept[-1], slots - len(kept) + 1))
    keep = {line[at - 1] for at in kept[1:]}
    gone = droppable(problem, keep)
    steps = list(range(backward))
    for node in range(backward, len(problem)):
        for item in sorted(item for item in problem.reads[node] if item in gone):
            target = bisect_left(makers, problem.maker[item])
            while kept[-1] > target:
                kept.pop()
            while kept[-1] < target and len(kept) <= slots:
                kept.append(kept[-1] + split(target - kept[-1], slots - len(kept) + 1))
                checkpoint = line[kept[-1] - 1]
                before = set(gone)
                bring_back(problem, [checkpoint], gone, steps)
                gone |= before - {checkpoint}
            before = set(gone)
            bring_back(problem, [item], gone, steps)
            gone |= {
                other
                for other in before - gone
                if other != item and bisect_left(makers, problem.maker[other]) < target
            }
        bring_back(problem, problem.reads[node], gone, steps)
        steps.append(node)
        gone.update(problem.lends[node])
    return steps
