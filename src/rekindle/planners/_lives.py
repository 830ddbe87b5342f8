"""Find the readers of each life of an item in a sequence, and the gaps between reads.

A life is a `Copy` of a timeline: from the step that makes or swaps in an item to its last reader.
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
    """The lives in a timeline, each by its index in `Timeline.copies`."""

    made: Mapping[int, Sequence[int]]
    """The lives that begin at each step."""
    readers: Sequence[Sequence[int]]
    """The steps that read the item in each life."""

    @staticmethod
    def of(line: Timeline) -> Lives:
        """Find the lives and their readers in a sequence."""
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
    """Interval between two steps in which `item` is resident, and neither read nor on hold."""

    item: int
    begin: int
    end: int


def gaps(line: Timeline) -> list[Gap]:
    """Return the longest gap in each life."""
    lives = Lives.of(line)
    found: list[Gap] = []
    for copy, readers in zip(line.copies, lives.readers, strict=True):
        moments = sorted([copy.start, *readers, *_held(line, copy)])
        begin, end = max(pairwise(moments), key=lambda pair: pair[1] - pair[0], default=(0, 0))
        if end - begin > 1 and line.problem.nbytes[copy.item]:
            found.append(Gap(copy.item, begin, end))
    return found


def _held(line: Timeline, copy: Copy) -> list[int]:
    """Return the steps of a life during which its item is on hold and cannot be evicted."""
    steps: list[int] = []
    for hold in line.problem.holds_of.get(copy.item, ()):
        first, last = int(line.first[hold.first]), int(line.first[hold.last])
        steps += range(max(first, copy.start), min(last, copy.end) + 1)
    return steps
