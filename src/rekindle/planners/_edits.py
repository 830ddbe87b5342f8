"""Propose small changes of a sequence of nodes, for the search with swapping (`_swapping.py`).

Each function proposes edits of one kind, and the caller tries them. Nodes are operators and items
are storages. An edit can replace a recomputation by a swap-in, or a swap-in by a recomputation. It
can also swap out a resident item between two distant reads, or keep an item in memory instead of
making it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from rekindle._types import Bytes
from rekindle.planners._lives import Lives, gaps
from rekindle.planners._sequence import Timeline

_LONGEST: Final = 64  # the most nodes to recompute in place of one swap-in


@final
@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of the step at index `step` of a sequence by the steps `instead`.

    The search tries edits with a high `promise` (estimated benefit) first.
    """

    step: int
    instead: tuple[int, ...]
    promise: float


def changed(steps: Sequence[int], edits: Iterable[Edit]) -> list[int]:
    """Return `steps` with all edits made. If two edits replace the same step, use the last one."""
    instead = {edit.step: edit.instead for edit in edits}
    return [new for at, step in enumerate(steps) for new in instead.get(at, (step,))]


def copy_instead(line: Timeline) -> list[Edit]:
    """Propose for each recomputed node (operator) to swap in its results instead.

    The promise of an edit is the time (ns) saved per byte swapped in. The saved time includes other
    recomputations whose results only this node reads.
    """
    problem = line.problem
    saved = {
        step: problem.cost[node]
        for step, node in enumerate(line.steps)
        if node >= 0 and step != line.first[node]
    }
    lives = Lives.of(line)
    for step in saved:
        for life in lives.made.get(step, ()):
            readers = lives.readers[life]
            if len(readers) == 1 and readers[0] in saved:
                saved[readers[0]] += saved[step]
    edits: list[Edit] = []
    for step, gain in saved.items():
        read = [life for life in lives.made.get(step, ()) if lives.readers[life]]
        items = [line.copies[life].item for life in read]
        nbytes = sum(problem.nbytes[item] for item in items)
        edits.append(Edit(step, tuple(~item for item in items), gain / max(1, nbytes)))
    return edits


def compute_instead(line: Timeline) -> list[Edit]:
    """Propose for each swap-in to recompute the item (storage) instead.

    The promise of an edit is the bytes that need no copy, per ns of recomputation.
    """
    problem = line.problem
    present: set[int] = set()
    begins, ends = _events(line)
    edits: list[Edit] = []
    for step, node in enumerate(line.steps):
        if node < 0:
            again = _computations(line, ~node, present)
            if again:
                cost = sum(problem.cost[each] for each in again)
                edits.append(Edit(step, again, problem.nbytes[~node] / max(1, cost)))
        present.update(begins.get(step, ()))
        present.difference_update(ends.get(step, ()))
    return edits


def make_room(line: Timeline) -> list[Edit]:
    """Propose to swap out each item (storage) during its longest interval without a read.

    The promise of an edit is the bytes of the item times the length (ns) of this interval.
    """
    problem = line.problem
    clock = [0]
    for node in line.steps:
        clock.append(clock[-1] + (problem.cost[node] if node >= 0 else 0))
    return [
        Edit(
            gap.end,
            (~gap.item, line.steps[gap.end]),
            float((clock[gap.end] - clock[gap.begin + 1]) * problem.nbytes[gap.item]),
        )
        for gap in gaps(line)
    ]


def keep_instead(line: Timeline, budget: Bytes) -> list[Edit]:
    """Propose to remove recomputations and swap-ins whose results could stay in memory instead.

    Returns:
        Edits, the highest saved cost first. All of them together fit `budget`.
    """
    problem = line.problem
    memory = line.memory.copy()
    before: dict[int, int] = {}  # item -> the step after which the item was last evicted
    again: list[tuple[int, int, list[tuple[int, int]]]] = []
    lives = Lives.of(line)
    for step, node in enumerate(line.steps):
        came = [line.copies[life].item for life in lives.made.get(step, ()) if lives.readers[life]]
        if node < 0 or step != line.first[node]:
            cost = problem.cost[node] if node >= 0 else 0
            again.append((cost, step, [(item, before[item]) for item in came]))
        for life in lives.made.get(step, ()):
            before[line.copies[life].item] = line.copies[life].end
    edits: list[Edit] = []
    for cost, step, items in sorted(again, reverse=True):
        extra = np.zeros(len(memory), dtype=np.int64)
        for item, end in items:
            extra[end + 1 : step] += problem.nbytes[item]
        if items and (memory + extra).max() <= budget:
            memory += extra
            edits.append(Edit(step, (), float(cost)))
    return edits


def _events(line: Timeline) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return for each step the storages it makes or swaps in, and those it is the last to read."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for copy in line.copies:
        begins.setdefault(copy.start, []).append(copy.item)
        ends.setdefault(copy.end, []).append(copy.item)
    return begins, ends


def _computations(line: Timeline, item: int, present: set[int]) -> tuple[int, ...]:
    """Return the nodes that compute `item` from the resident storages `present`.

    The result is empty if a needed node cannot run again, or if there would be too many nodes.
    """
    problem = line.problem
    order: list[int] = []
    done: set[int] = set()
    stack = [problem.maker[item]]
    while stack:
        node = stack[-1]
        missing = [
            problem.maker[source]
            for source in problem.reads[node]
            if source not in present and problem.maker[source] not in done
        ]
        if node in done:
            stack.pop()
        elif not problem.replayable[node] or len(order) + len(stack) > _LONGEST:
            return ()
        elif missing:
            stack.append(missing[0])
        else:
            order.append(node)
            done.add(stack.pop())
    return tuple(order)


KINDS: Final[Mapping[str, Callable[[Timeline], list[Edit]]]] = {
    "copy instead": copy_instead,
    "compute instead": compute_instead,
    "make room": make_room,
}
