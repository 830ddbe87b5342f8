"""Select candidates for checkpoints along the forward pass, and make plans that keep some of them.

An *articulation* candidate is a value whose removal cuts the forward graph in two: all later values
depend on earlier ones only through this value. Chen et al. 2016 assume a chain of such values.
Checkmate (MLSys 2020) calls this variant AP. With the kind *all*, every forward value is a
candidate, in the program's order (Checkmate's linearised variant). `chen.py`, `revolve.py` and
`rotor.py` use this module.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

from rekindle.planners._base import backward_start, bring_back, droppable
from rekindle.planners._problem import Problem


def candidates(problem: Problem, line: Literal["articulation", "all"]) -> list[int]:
    """Return the items (storages) that may be checkpoints, in the order in which they are made.

    The forward pass makes and reads each of these items, and each can be recomputed.

    Args:
        problem: The operators and storages to plan, made from a trace.
        line: The kind of candidates: "articulation" points, or "all" such items.
    """
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
    # After a node, an item is open if a later forward node reads the item. If only one item is
    # open, all later nodes depend on that item, so it is an articulation point.
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
    """Make a sequence that keeps at most `slots` checkpoint candidates in memory at once.

    The values between two neighboring candidates are recomputed together when the backward pass
    first reads one of these values. They stay in memory until the backward pass has read them.

    Args:
        problem: The operators and storages to plan, made from a trace.
        line: The candidates, in order.
        slots: The most candidates to keep at once.
        split: Chooses the next candidate to keep. Its arguments are the number of candidates
            between the last kept one and the position that the backward pass has reached, and the
            number of free slots. It returns how many candidates after the last kept one the next
            one comes.
    """
    backward = backward_start(problem)
    makers = [problem.maker[item] for item in line]
    kept = [0]  # positions in `line`, from 1, of the candidates in memory; 0 is the model's input
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
        gone.update(problem.overwrites[node])
    return steps
