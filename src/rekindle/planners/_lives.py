"""Find the readers of the items (storages) of a sequence, and the gaps between these reads.

A life of an item is a `Copy` of a timeline (`_sequence.py`). It lasts from the step that makes or
swaps in the item to the last step that reads it. An item that is evicted and recomputed has several
lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

from rekindle.planners._sequence import Copy, Timeline, inputs_of


@final
@dataclass(frozen=True)
class Lives:
    """The lives of all items (storages) in a timeline.

    A life is one period in which an item is in memory. It is identified by its index in
    `Timeline.copies`.
    """

    made: Mapping[int, Sequence[int]]
    """For each step that makes or swaps in items, the lives that begin."""
    readers: Sequence[Sequence[int]]
    """For each life, the steps that read the item during that life."""

    @staticmethod
    def of(line: Timeline) -> Lives:
        """Find the lives of all items (periods in memory), and the steps that read during each."""
        made: dict[int, list[int]] = {}
        for life, copy in enumerate(line.copies):
            made.setdefault(copy.start, []).append(life)
        readers: list[list[int]] = [[] for _ in line.copies]
        present: dict[int, int] = {}
        for step, node in enumerate(line.steps):
            for item in inputs_of(line.problem, node):
                readers[present[item]].append(step)
            for life in made.get(step, ()):
                present[line.copies[life].item] = life
        return Lives(made, readers)


class Gap(NamedTuple):
    """Interval between the steps `begin` and `end`, in which `item` is in memory but not needed.

    No step reads the storage in between, and it is neither pinned nor user-held there.
    """

    item: int
    begin: int
    end: int


def gaps(line: Timeline) -> list[Gap]:
    """Return the longest gap in each life (period in memory) of each storage.

    A gap is an interval in which the storage is in memory but not needed. Gaps that contain no step
    are left out, and so are storages of 0 bytes.
    """
    lives = Lives.of(line)
    found: list[Gap] = []
    for copy, readers in zip(line.copies, lives.readers, strict=True):
        moments = sorted([copy.start, *readers, *_held(line, copy)])
        begin, end = max(pairwise(moments), key=lambda pair: pair[1] - pair[0], default=(0, 0))
        if end - begin > 1 and line.problem.nbytes[copy.item]:
            found.append(Gap(copy.item, begin, end))
    return found


def _held(line: Timeline, copy: Copy) -> list[int]:
    """Return the steps of the life `copy` at which its storage is pinned or user-held."""
    steps: list[int] = []
    for hold in line.problem.holds_of.get(copy.item, ()):
        first, last = int(line.first[hold.first]), int(line.first[hold.last])
        steps += range(max(first, copy.start), min(last, copy.end) + 1)
    return steps
