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
    """A plan: the moves to make before each operator of the program runs for the first time.

    `moves[stops[i - 1]:stops[i]]` come between the first runs of operators i - 1 and i. The last
    entry of `stops` stands for the end of the program. A move is a number:

    - `~s` (negative): storage s is not needed until it is brought back, so it may be evicted.
    - an index of `restores`: recompute these storages, all by one operator.
    - len(restores) + i: begin the copy `copies[i]`.
    """

    stops: tuple[int, ...]
    moves: tuple[int, ...]
    restores: tuple[tuple[StorageId, ...], ...]
    kept: tuple[StorageId, ...] = ()
    """Storages to keep although the program cannot reach them: a later recomputation reads them."""
    copies: tuple[int, ...] = ()
    """Copies to the host and back: s copies storage s to the host, ~s swaps it in."""
    recompute_ns: Nanoseconds = 0
    """Total cost (ns) of all recomputation in the schedule, and of waiting for its copies."""
    bound_ns: Nanoseconds = 0
    """Lower bound (ns) of `recompute_ns` for every schedule of the program."""

    @staticmethod
    def of(trace: Trace, schedule: Schedule) -> Route:
        """Make the plan that follows a schedule, which must be valid for `trace`."""
        stops: list[int] = []
        moves: list[int] = []
        restores: list[tuple[StorageId, ...]] = []
        # pairs: an index in `moves`, and the number of the copy in `Route.copies`
        copies: list[tuple[int, int]] = []
        kept: dict[StorageId, None] = {}
        # storages that were made, and that the schedule has not evicted up to this action
        untouched: set[StorageId] = set()
        death = _deaths(trace)  # for each storage: how many operators ran before it died

        def copy(number: int) -> None:
            copies.append((len(moves), number))
            moves.append(0)  # replaced below, once the length of `restores` is known

        def keep_for(read: set[StorageId]) -> None:
            dead = [each for each in read & untouched if death[each] <= len(stops)]
            kept.update(dict.fromkeys(sorted(dead)))

        for action in schedule.actions:
            match action:
                case Free(storage):
                    moves.append(~storage)
                    untouched.discard(storage)
                case SwapOut(storage, keep):
                    keep_for({storage})
                    copy(storage)
                    if not keep:
                        moves.append(~storage)
                        untouched.discard(storage)
                case Compute(op) if op == len(stops):  # the first run of the operator
                    stops.append(len(moves))
                    untouched.update(trace.new_storages(trace.ops[op]))
                case Compute(op):
                    keep_for({trace.values[value] for value in trace.ops[op].inputs})
                    made = tuple(trace.new_storages(trace.ops[op]))
                    # An operator that makes only views needs no move: views are recomputed
                    # together with their storage.
                    if made:
                        moves.append(len(restores))
                        restores.append(made)
                case SwapIn(storage):
                    copy(~storage)
                case Discard():  # the engine discards copies when the host needs room
                    pass
        stops.append(len(moves))
        for index, (move, _) in enumerate(copies):
            moves[move] = len(restores) + index
        numbers = tuple(number for _, number in copies)
        return Route(tuple(stops), tuple(moves), tuple(restores), tuple(kept), numbers)

    def as_numbers(self) -> dict[str, Any]:
        """Return the plan as plain data for a file. `from_numbers` is the inverse."""
        return asdict(self)

    @staticmethod
    def from_numbers(numbers: Mapping[str, Any]) -> Route:
        """Return the plan that `as_numbers` has converted to `numbers`."""
        restores = tuple(tuple(made) for made in numbers["restores"])
        return Route(
            tuple(numbers["stops"]),
            tuple(numbers["moves"]),
            restores,
            tuple(numbers["kept"]),
            tuple(numbers["copies"]),
            numbers["recompute_ns"],
            numbers["bound_ns"],
        )


def _deaths(trace: Trace) -> list[float]:
    """Return for each storage how many operators ran before the program lost its last reference."""
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
