"""Replays on the native engine: a trace as one stream of words, and what came of it.

The words are those of native/replay/player.h. A `Call` there is followed by operator, cost, flags,
workspace; count and values read; count and (value, storage, bytes) made, or (value, value viewed,
-1); count and pairs of what it overwrites. Every other event has two words, of which the second is
unused.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, final

from rekindle import native
from rekindle import trace as t
from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle.engine import Route, Rules
from rekindle.policies import Policy, Swap, score_of
from rekindle.schedule import Action, Compute, Discard, Free, SwapIn, SwapOut

Core = Literal["auto", "native", "python"]
"""Which engine: "auto" is the native one where it can be had, and the result is the same."""

WORDS: Final = {
    kind: number for number, kind in enumerate((t.Call, t.Use, t.Pin, t.Retain, t.Release, t.Drop))
}
REPLAYABLE, HELD = 1, 2
PASSED, NO_ROOM, THRASHED, FAULT = range(4)  #: how a run ends

_DEAD: Final = {"evict": 0, "ignore": 1, "banish": 2}
_EXACT: Final = 2**53  # integers below are exact as floats: scores are the same in both engines
_LONG: Final = 20_000  # events; for less nobody waits until the native engine is compiled


@final
@dataclass(frozen=True, slots=True)
class Totals:
    """What an engine counted, for those who ask for no more."""

    memory: Bytes
    peak: Bytes
    clock: Nanoseconds
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds


@final
class Played:
    """What the native engine did; what is seldom asked for is made when it is."""

    def __init__(self, result: tuple[Any, ...]) -> None:
        self.status, self.numbers, totals = result[:3]
        self.totals = Totals(*totals[:5])
        self.evictions, self.recomputations, self.bookkeeping = totals[5:]
        self._arrays = result[3:]

    def actions(self) -> Iterable[Action]:
        """In the order in which they were to be performed."""
        for word in words_of(self._arrays[0]):
            number, kind = word >> 3, word & 7
            match kind:
                case 0:
                    yield Free(StorageId(number))
                case 1 | 2:
                    yield Compute(OpId(number), in_place=kind == 2)
                case 3 | 4:
                    yield SwapOut(StorageId(number), keep=kind == 4)
                case 5:
                    yield SwapIn(StorageId(number))
                case _:
                    yield Discard(StorageId(number))

    def clock(self) -> array[int]:
        """As each action began."""
        return words_of(self._arrays[1])

    def memory(self) -> array[int]:
        """As each action began."""
        return words_of(self._arrays[2])

    def steps(self) -> array[int]:
        """Actions so far (inverted where there was no room), memory, clock; after each event."""
        return words_of(self._arrays[3])

    def journal(self) -> array[int]:
        """Six words an entry, if it was kept: see native/engine/journal.h."""
        return words_of(self._arrays[4])


def words_of(data: bytes) -> array[int]:
    words = array("q")
    words.frombytes(data)
    return words


def module_for(
    trace: t.Trace, policy: Policy, core: Core, *, needs_python: str = ""
) -> ModuleType | None:
    """The native engine, if it is to replay `trace`; raises `Unsupported` if it must and cannot.

    needs_python: why it cannot, if that is known already.
    """
    if core == "python":
        return None
    reason = needs_python or _obstacle(trace, policy)
    if not reason:
        module = native.engine(build=core == "native" or len(trace.events) >= _LONG)
        if module is not None:
            return module
        reason = native.why_not(native.ENGINE)
    if core == "native":
        raise Unsupported(f'core="native" cannot replay this: {reason}; write core="auto"')
    return None


def _obstacle(trace: t.Trace, policy: Policy) -> str:
    if score_of(policy) is None:
        return f"{policy!r} is written in Python"
    if trace.compute_ns >= _EXACT or sum(trace.storages) >= _EXACT:
        return "its costs or sizes are too large for exact floats"
    return ""


def play(
    module: ModuleType,
    words: array[int],
    *,
    budget: Bytes | None,
    policy: Policy,
    rules: Rules,
    route: Route | None = None,
    swap: Swap | None = None,
    watch: int = 0,
    journal: int = 0,
) -> Played | None:
    """What the native engine does; None where floats would not tell times apart any more.

    watch: bits; 1: `steps` are noted; 2: every invariant is checked as well; 4: where there is no
        room for an event that is noted, and the next one is played.
    journal: how many of its last entries are kept.
    """
    score = score_of(policy)
    assert score is not None
    limit = -1 if rules.recompute_limit is None else min(max(rules.recompute_limit, 0), 2**62)
    most = -1 if budget is None or budget >= 2**62 else budget
    settings = (most, *score, _DEAD[rules.dead], limit, rules.quirks, watch, journal)
    settings += numbers_of(swap)
    way = None if route is None else _numbers_of(route)
    played = Played(module.replay(words, array("q", settings), way))
    return played if played.totals.clock < _EXACT else None


def numbers_of(swap: Swap | None) -> tuple[int, int, int, int, bool]:
    """As the native engine has it: whether anything is swapped, the host's bytes, the ways."""
    if swap is None:
        return 0, 0, 1, 1, False
    host = -1 if swap.host is None else min(swap.host, 2**62)
    return 1, host, swap.out_bytes_per_s, swap.in_bytes_per_s, swap.only


def _numbers_of(route: Route) -> tuple[array[int], ...]:
    restores, restored = array("q", [0]), array("q")
    for made in route.restores:
        restored.extend(made)
        restores.append(len(restored))
    stops, moves, kept = (array("q", part) for part in (route.stops, route.moves, route.kept))
    return stops, moves, restores, restored, kept


# The words of a trace, which is replayed many times in a sweep. By identity: a trace never changes.
_encoded: dict[int, tuple[weakref.ref[t.Trace], array[int]]] = {}


def words_for(trace: t.Trace) -> array[int]:
    """`trace` as the native engine reads it."""
    key = id(trace)
    known = _encoded.get(key)
    if known is not None and known[0]() is trace:
        return known[1]
    words = encode(trace)
    _encoded[key] = weakref.ref(trace, lambda _: _encoded.pop(key, None)), words
    return words


def encode(trace: t.Trace) -> array[int]:
    """`words_for`, made anew."""
    words = array("q")
    storages, values, root, ops = trace.storages, trace.values, trace.root, trace.ops
    for event in trace.events:
        if not isinstance(event, t.Call):
            words.extend((WORDS[type(event)], event.value, 0))
            continue
        op = ops[event.op]
        flags = REPLAYABLE * op.replayable | HELD * event.held
        words.extend((0, event.op, op.cost, flags, op.workspace, len(op.inputs), *op.inputs))
        words.append(len(op.outputs))
        for value in op.outputs:
            storage = values[value]
            first = root[storage]
            if first == value:
                words.extend((value, storage, storages[storage]))
            else:
                words.extend((value, first, -1))
        words.append(len(op.overwrites))
        for output, source in op.overwrites:
            words.extend((output, source))
    return words
