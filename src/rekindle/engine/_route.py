"""A plan in a form that can be followed while a program runs: actions before each operator.

`Route.of` translates a schedule. A route contains only the numbers of storages and operators in the
schedule's trace. So a route can be stored in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from rekindle._types import Nanoseconds, StorageId
from rekindle.schedule import Compute, Discard, Free, Schedule, SwapIn, SwapOut
from rekindle.trace import Call, Drop, Pin, Release, Retain, Trace, Use


@final
@dataclass(frozen=True, slots=True)
class Route:
    """A plan: `moves[stops[i - 1]:stops[i]]` come between the first runs of operators i - 1 and i.

    The last of the `stops` is the end of the program. A move is a number:

    - `~s` (negative): storage s is not needed until it is brought back, so it may be evicted.
    - an index of `restores`: bring these storages back, all by one operator or one transfer.
    """

    stops: tuple[int, ...]
    moves: tuple[int, ...]
    restores: tuple[tuple[StorageId, ...], ...]
    kept: tuple[StorageId, ...] = ()
    """Storages to keep in memory although dead, because a later recomputation reads them."""
    recompute_ns: Nanoseconds = 0
    """Total cost (ns) of all recomputation in the schedule."""
    bound_ns: Nanoseconds = 0
    """Lower bound (ns) of `recompute_ns` for every schedule of the program."""

    @staticmethod
    def of(trace: Trace, schedule: Schedule) -> Route:
        """Translate a schedule that is valid for `trace`."""
        stops: list[int] = []
        moves: list[int] = []
        restores: list[tuple[StorageId, ...]] = []
        kept: dict[StorageId, None] = {}
        untouched: set[StorageId] = set()  # storages that were never evicted so far
        death = _deaths(trace)
        for action in schedule.actions:
            match action:
                case Free(storage) | SwapOut(storage, keep=False):
                    moves.append(~storage)
                    untouched.discard(storage)
                case Compute(op) if op == len(stops):  # the first run of this operator
                    stops.append(len(moves))
                    untouched.update(trace.new_storages(trace.ops[op]))
                case Compute(op):
                    read = {trace.values[value] for value in trace.ops[op].inputs}
                    dead = [each for each in read & untouched if death[each] <= len(stops)]
                    kept.update(dict.fromkeys(sorted(dead)))
                    made = tuple(trace.new_storages(trace.ops[op]))
                    if made:  # else the call only makes views, which come back with their base
                        moves.append(len(restores))
                        restores.append(made)
                case SwapIn(storage):
                    moves.append(len(restores))
                    restores.append((storage,))
                case SwapOut() | Discard():  # the engine decides when to copy ahead and discard
                    pass
        stops.append(len(moves))
        return Route(tuple(stops), tuple(moves), tuple(restores), tuple(kept))

    def as_numbers(self) -> dict[str, Any]:
        """Return the plan as plain data for a file. `from_numbers` is the inverse."""
        return asdict(self)

    @staticmethod
    def from_numbers(numbers: Mapping[str, Any]) -> Route:
        """Restore a plan from the result of `as_numbers`."""
        restores = tuple(tuple(made) for made in numbers["restores"])
        return Route(
            tuple(numbers["stops"]),
            tuple(numbers["moves"]),
            restores,
            tuple(numbers["kept"]),
            numbers["recompute_ns"],
            numbers["bound_ns"],
        )


def _deaths(trace: Trace) -> list[float]:
    """Return, for each storage, how many operators had run when it became unreachable."""
    deaths = [float("inf")] * len(trace.storages)
    references = [0] * len(trace.storages)
    held = [False] * len(trace.storages)
    ran = 0
    for event in trace.events:
        match event:
            case Call(op, hold):
                ran += 1
                for value in trace.ops[op].outputs:
                    held[trace.values[value]] |= hold
                    references[trace.values[value]] += not hold
                continue
            case Use(value):
                held[trace.values[value]] = True
            case Drop(value):
                held[trace.values[value]] = False
            case Retain(value):
                references[trace.values[value]] += 1
            case Release(value):
                references[trace.values[value]] -= 1
            case Pin():
                continue
        storage = trace.values[event.value]
        if references[storage] <= 0 and not held[storage]:
            deaths[storage] = ran
    return deaths
