"""Define sequences, the internal form of plans: nodes in the order in which they run.

A node is an operator and an item is a storage (`_problem.py`). A step is an index into a sequence.
The first occurrence of a node is its first computation; later occurrences are recomputations. The
order of the nodes determines everything else, because every item is freed as early as possible.
That is right after its last reader before the item is made again or the program ends. So a sequence
has a known memory at every step, and a known schedule (`_writer.py`).

With swapping, a sequence may also contain ~i, a number below zero, which means that item i is
swapped in at this step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._problem import Hold, Problem


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """One period of an item in memory, from step `start` that makes it to its last reader at `end`.

    An item is a storage. Step `start` computes or swaps in the item. If the item is pinned or
    user-held after its last reader, the period lasts until it no longer is.
    """

    item: int
    start: int
    end: int


@final
@dataclass(frozen=True)
class Timeline:
    """A sequence of nodes, with the periods in which each storage is in memory.

    It also has the memory (bytes) while each step runs.
    """

    problem: Problem
    steps: tuple[int, ...]
    copies: tuple[Copy, ...]
    memory: NDArray[np.int64]
    first: NDArray[np.int64]
    """The step of each node's first computation."""

    @property
    def peak(self) -> Bytes:
        return int(self.memory.max(initial=self.problem.fixed))

    @property
    def cost(self) -> Nanoseconds:
        return cost_of(self.problem, self.steps)


def cost_of(problem: Problem, steps: Iterable[int]) -> Nanoseconds:
    """Return the total cost (ns) of the nodes in `steps`; swap-ins cost 0."""
    return sum(problem.cost[node] for node in steps if node >= 0)


def results_of(problem: Problem, step: int) -> tuple[int, ...]:
    """Return the items (storages) that the entry `step` of a sequence makes or swaps in."""
    return problem.makes[step] if step >= 0 else (~step,)


def inputs_of(problem: Problem, step: int) -> tuple[int, ...]:
    """Return the items (storages) that the entry `step` of a sequence reads; none for a swap-in."""
    return problem.reads[step] if step >= 0 else ()


def timeline(problem: Problem, steps: Sequence[int]) -> Timeline:
    """Find when each storage is in memory during a sequence, and the memory at each step.

    Args:
        problem: The operators and storages to plan, made from a trace.
        steps: The sequence: nodes in the order in which they run.

    Raises:
        ValueError: A step reads a storage that is not resident, or swaps in a storage without a
            copy on the host.
    """
    made: dict[int, int] = {}  # item -> the step at which the item's current period in memory began
    needed: dict[int, int] = {}  # item -> the last step so far that reads the item in this period
    first = np.full(len(problem), len(steps), dtype=np.int64)
    copies: list[Copy] = []
    freed_by_overwriting: list[tuple[int, int]] = []
    held: dict[int, int] = {}  # pinned or user-held item -> the node until which it is
    # for each node, the items that are pinned or user-held until this node
    ending: dict[int, list[int]] = {}
    starting: dict[int, list[Hold]] = {}
    for hold in problem.holds:
        starting.setdefault(hold.first, []).append(hold)

    for step, node in enumerate(steps):
        is_first = node >= 0 and first[node] == len(steps)
        if node < 0 and (first[problem.maker[~node]] == len(steps) or ~node in held):
            raise ValueError(f"step {step} swaps in item {~node}, which is not on the host")
        for item in inputs_of(problem, node):
            if item not in made:
                raise ValueError(
                    f"step {step} runs node {node}, which reads item {item}, but that item is not "
                    "in memory"
                )
            needed[item] = step
        for item in results_of(problem, node):
            if item in made:
                end = step if item in held else needed[item]
                copies.append(Copy(item, made[item], end))
            made[item] = needed[item] = step
        if is_first:
            first[node] = step
            for item in problem.overwrites[node]:
                copies.append(Copy(item, made.pop(item), step))
                freed_by_overwriting.append((step, item))
                held.pop(item, None)
            for item in ending.pop(node, ()):
                if held.get(item) == node:
                    needed[item] = step
                    del held[item]
            for hold in starting.get(node, ()):
                last = held[hold.item] = max(hold.last, held.get(hold.item, 0))
                ending.setdefault(last, []).append(hold.item)
    copies += [Copy(item, start, needed[item]) for item, start in made.items()]
    memory = _memory(problem, steps, copies, freed_by_overwriting)
    return Timeline(problem, tuple(steps), tuple(copies), memory, first)


def _memory(
    problem: Problem,
    steps: Sequence[int],
    copies: Sequence[Copy],
    lent: Sequence[tuple[int, int]],
) -> NDArray[np.int64]:
    """Return the bytes in use while each step runs."""
    change = np.zeros(len(steps) + 1, dtype=np.int64)
    sizes = np.array([problem.nbytes[copy.item] for copy in copies], dtype=np.int64)
    np.add.at(change, np.array([copy.start for copy in copies], dtype=np.int64), sizes)
    np.subtract.at(change, np.array([copy.end + 1 for copy in copies], dtype=np.int64), sizes)
    # The in-place output of this step takes over the memory of `item`: count it once.
    for step, item in lent:
        change[step] -= problem.nbytes[item]
        change[step + 1] += problem.nbytes[item]
    return np.cumsum(change[:-1]) + problem.fixed


def prune(problem: Problem, steps: Sequence[int]) -> list[int]:
    """Remove recomputations and swap-ins whose results nothing reads before they are made again."""
    first: dict[int, int] = {}
    for step, node in enumerate(steps):
        first.setdefault(node, step)
    kept: list[int] = []
    wanted: set[int] = set()
    for step in range(len(steps) - 1, -1, -1):
        node = steps[step]
        made = results_of(problem, node)
        if (node >= 0 and first[node] == step) or any(item in wanted for item in made):
            kept.append(node)
            wanted.difference_update(made)
            wanted.update(inputs_of(problem, node))
    kept.reverse()
    return kept


def settle(line: Timeline) -> Timeline:
    """Move the nodes at which the program itself reads a value to the earliest possible step.

    That is the earliest step at which their storages are in memory. The verifier allows such early
    reads. The step matters if a variable of the program holds the value from then on.
    """
    problem, moved = line.problem, False
    for node, op in enumerate(problem.op):
        before, at = (int(line.first[node - 1]), int(line.first[node])) if node else (0, 0)
        if op is not None or at <= before + 1:
            continue
        spans = [
            [range(copy.start, copy.end + 1) for copy in line.copies if copy.item == item]
            for item in problem.reads[node]
        ]
        for step in range(before, at - 1):
            if all(any(step in span for span in each) for each in spans):
                steps = [*line.steps[:at], *line.steps[at + 1 :]]
                line = timeline(problem, [*steps[: step + 1], node, *steps[step + 1 :]])
                moved = True
                break
    return timeline(problem, prune(problem, line.steps)) if moved else line
