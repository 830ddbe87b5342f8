"""Compute parts of a report from a run: memory over time, and the table of recomputed operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rekindle._types import Bytes, Nanoseconds
from rekindle.report._data import Recomputed, Timeline
from rekindle.schedule import Action, Compute, Discard, Free, Record, SwapIn, SwapOut
from rekindle.trace import Trace

MOST_POINTS = 600
"""Most points of a timeline: about as many as the width of its plot in pixels."""


def recomputed(trace: Trace, record: Record, modules: Sequence[str]) -> tuple[Recomputed, ...]:
    """Sum up the recomputed operators of a run by module and operator name.

    Args:
        trace: The recorded program: operators, storages and events.
        record: The record of a run of the trace.
        modules: The module of each operator of the trace.

    Returns:
        One entry for each module and operator, the longest time first.
    """
    times: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    ran: set[int] = set()
    for action in record.actions:
        if isinstance(action, Compute):
            if action.op in ran:
                op = trace.ops[action.op]
                kind = (modules[action.op], op.name)
                times[kind] += 1
                spent[kind] += op.cost
            ran.add(action.op)
    return tuple(
        Recomputed(*kind, times[kind], ns)
        for kind, ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))
    )


def timeline(trace: Trace, record: Record, kinds: Sequence[str]) -> Timeline:
    """Compute the memory in use after each action of a run, by category.

    If there are more than `MOST_POINTS` points, time is divided into intervals, and for each
    interval only the point with the most memory is returned.

    Args:
        trace: The recorded program: operators, storages and events.
        record: The record of a run of the trace.
        kinds: The category of each storage of the trace.
    """
    walk = _Walk(trace, kinds, record)
    points = [point for action in record.actions for point in walk.after(action)]
    if not points:
        return Timeline()
    chosen = _thinned(points)
    bands = {
        kind: tuple(point[1].get(kind, 0) for point in chosen)
        for kind in dict.fromkeys(kinds)
        if any(point[1].get(kind) for point in chosen)
    }
    clock = tuple(point[0] for point in chosen)
    return Timeline(clock, bands, *_sums(points, clock))


_Point = tuple[Nanoseconds, dict[str, Bytes], Bytes, Nanoseconds]
"""Figures of one action: clock, memory by category, bytes evicted, time of recomputation."""


class _Walk:
    """Replays the actions of a record, to know which storages are in memory after each."""

    def __init__(self, trace: Trace, kinds: Sequence[str], record: Record) -> None:
        self._trace = trace
        self._kinds = kinds
        self._clock: Nanoseconds = 0
        self._memory: Counter[str] = Counter()
        self._resident: set[int] = set()
        self._ran: set[int] = set()
        self._runs_left = Counter(a.op for a in record.actions if isinstance(a, Compute))

    def after(self, action: Action) -> Iterator[_Point]:
        """Apply an action. If it changes memory or time, yield the point after the action."""
        match action:
            case Compute():
                yield self._compute(action)
            case Free(storage):
                evicted = self._free(storage)
                yield self._clock, dict(self._memory), evicted, 0
            case SwapOut(storage, keep):
                if not keep:
                    self._free(storage)
                    yield self._clock, dict(self._memory), self._trace.storages[storage], 0
            case SwapIn(storage):
                self._arrive(storage)
                yield self._clock, dict(self._memory), 0, 0
            case Discard():
                pass

    def _compute(self, action: Compute) -> _Point:
        op = self._trace.ops[action.op]
        again = op.cost if action.op in self._ran else 0
        self._ran.add(action.op)
        self._runs_left[action.op] -= 1
        if action.in_place:
            for _, source in op.overwrites:
                self._free(self._trace.values[source])
        for storage in self._trace.new_storages(op):
            self._arrive(storage)
        self._clock += op.cost
        return self._clock, dict(self._memory), 0, again

    def _arrive(self, storage: int) -> None:
        if storage not in self._resident:
            self._resident.add(storage)
            self._memory[self._kinds[storage]] += self._trace.storages[storage]

    def _free(self, storage: int) -> Bytes:
        """Free a storage. Return its bytes if it is recomputed later (an eviction), else 0."""
        if storage not in self._resident:
            return 0
        self._resident.discard(storage)
        nbytes = self._trace.storages[storage]
        self._memory[self._kinds[storage]] -= nbytes
        maker = self._trace.maker[self._trace.root[storage]]
        return nbytes if self._runs_left[maker] > 0 else 0


def _thinned(points: list[_Point]) -> list[_Point]:
    """Keep the point with the most memory of each time interval, at most `MOST_POINTS` in all."""
    if len(points) <= MOST_POINTS:
        return points
    width = max(1, -(-points[-1][0] // (MOST_POINTS - 1)))
    best: dict[int, _Point] = {}
    for point in points:
        bucket = point[0] // width
        if bucket not in best or sum(point[1].values()) > sum(best[bucket][1].values()):
            best[bucket] = point
    return [best[bucket] for bucket in sorted(best)]


def _sums(
    points: list[_Point], clock: tuple[Nanoseconds, ...]
) -> tuple[tuple[Bytes, ...], tuple[Nanoseconds, ...]]:
    """Sum up evicted bytes and recomputation time of `points`, for each interval of `clock`."""
    evicted = [0] * len(clock)
    again = [0] * len(clock)
    place = 0
    for now, _, nbytes, ns in points:
        while place < len(clock) - 1 and clock[place] < now:
            place += 1
        evicted[place] += nbytes
        again[place] += ns
    return tuple(evicted), tuple(again)
