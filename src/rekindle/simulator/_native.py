"""Replay traces on the native engine (C++), which takes a trace as one array of 64-bit words.

`_replay.py` and the tests of the native engine use this module. native/replay/player.h reads the
array. Each event begins with a word for its kind. For a `Call` these words follow:

- operator, cost, flags, workspace;
- the number of values read, and these values;
- the number of values made, and for each (value, storage, bytes), or (value, root, -1) for a view;
- the number of values overwritten, and for each (output, value overwritten).

For any other event the value and an unused word follow.
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
from rekindle.engine import Route
from rekindle.policies import Policy, Swap, score_of
from rekindle.schedule import Action, Compute, Discard, Free, SwapIn, SwapOut

Core = Literal["auto", "native", "python"]
"""Name of the engine to use. "auto" is the native one if available. All give the same result."""

WORDS: Final = {
    kind: number for number, kind in enumerate((t.Call, t.Use, t.Pin, t.Retain, t.Release, t.Drop))
}
REPLAYABLE, HELD = 1, 2
PASSED, NO_ROOM, THRASHED, FAULT = range(4)  #: how a run ended, as the native engine reports it

_EXACT: Final = 2**53  # Smaller integers are exact as floats, so both engines compute equal scores.
# number of events from which compiling the native engine takes less time than it saves
_LONG: Final = 20_000


@final
@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a native run, in attributes of the same names as those of `Engine`."""

    memory: Bytes
    peak: Bytes
    clock: Nanoseconds
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds


@final
class Played:
    """Result of a run on the native engine. Its methods decode long lists on each call."""

    def __init__(self, result: tuple[Any, ...]) -> None:
        self.status, self.numbers, totals = result[:3]
        self.totals = Totals(*totals[:5])
        self.evictions, self.recomputations, self.bookkeeping = totals[5:]
        self._arrays = result[3:]

    def actions(self) -> Iterable[Action]:
        """Yield the actions of the run in order."""
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
        """Return the clock (ns) at the beginning of each action."""
        return words_of(self._arrays[1])

    def memory(self) -> array[int]:
        """Return the bytes in use at the beginning of each action."""
        return words_of(self._arrays[2])

    def steps(self) -> array[int]:
        """Return three words for each event: actions so far, memory (bytes), clock (ns).

        If the event did not fit into the budget, the word for the actions is ~n, where n is their
        number.
        """
        return words_of(self._arrays[3])

    def journal(self) -> array[int]:
        """Return the engine's log of its last steps; its format is in native/engine/journal.h."""
        return words_of(self._arrays[4])


def words_of(data: bytes) -> array[int]:
    words = array("q")
    words.frombytes(data)
    return words


def module_for(
    trace: t.Trace, policy: Policy, core: Core, *, needs_python: str = ""
) -> ModuleType | None:
    """Choose the engine for a replay.

    Args:
        trace: The recorded program: operators, storages and events.
        policy: The policy that selects storages to evict.
        core: The engine that the caller wants.
        needs_python: The caller's reason why only the Python engine can replay the trace; empty if
            there is none.

    Returns:
        The Python module of the native engine, or None for the Python engine.

    Raises:
        Unsupported: `core` is "native", and the native engine cannot replay the trace.
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
        raise Unsupported(
            'rekindle.simulate(..., core="native"): the native core cannot replay this trace: '
            f'{reason}; write core="auto"'
        )
    return None


def _obstacle(trace: t.Trace, policy: Policy) -> str:
    """Return why the native engine cannot replay a trace with a policy, or an empty text."""
    if score_of(policy) is None:
        return f"{policy!r} is written in Python"
    if trace.compute_ns >= _EXACT or sum(trace.storages) >= _EXACT:
        return "costs or sizes of the trace are too large to be exact as floating-point numbers"
    return ""


def play(
    module: ModuleType,
    words: array[int],
    *,
    budget: Bytes | None,
    policy: Policy,
    recompute_limit: Nanoseconds | None = None,
    route: Route | None = None,
    swap: Swap | None = None,
    watch: int = 0,
    journal: int = 0,
) -> Played | None:
    """Replay a trace on the native engine.

    Args:
        module: The native engine.
        words: The trace, from `words_for`.
        budget: The budget (bytes), or None.
        policy: The policy, one of those that also exist in C++.
        recompute_limit: The most time (ns) of recomputation, or None.
        route: A plan to follow, or None.
        swap: The bandwidth to the host, or None.
        watch: Bits. 1: record `steps`. 2: also check every invariant. 4: if an event does not fit
            into the budget, record that and continue with the next event.
        journal: The number of last entries to keep in the engine's log.

    Returns:
        The result, or None if the clock is so large that floats are no longer exact.
    """
    score = score_of(policy)
    assert score is not None
    limit = -1 if recompute_limit is None else min(max(recompute_limit, 0), 2**62)
    most = -1 if budget is None or budget >= 2**62 else budget
    settings = (most, *score, limit, watch, journal)
    settings += numbers_of(swap)
    way = None if route is None else _numbers_of(route)
    played = Played(module.replay(words, array("q", settings), way))
    return played if played.totals.clock < _EXACT else None


def numbers_of(swap: Swap | None) -> tuple[int, int, int, int, bool]:
    """Encode `swap` for the native engine: flag, host bytes, bandwidths out and in, `swap.only`."""
    if swap is None:
        return 0, 0, 1, 1, False
    host = -1 if swap.host is None else min(swap.host, 2**62)
    return 1, host, swap.out_bytes_per_s, swap.in_bytes_per_s, swap.only


def _numbers_of(route: Route) -> tuple[array[int], ...]:
    """Encode the plan that a run follows (`Route`) as flat arrays for the native engine."""
    restores, restored = array("q", [0]), array("q")
    for made in route.restores:
        restored.extend(made)
        restores.append(len(restored))
    plain = (route.stops, route.moves, route.kept, route.copies)
    stops, moves, kept, copies = (array("q", part) for part in plain)
    return stops, moves, restores, restored, kept, copies


# Encoded traces by the id() of the trace. A sweep replays one trace many times. Traces never
# change, so each trace is encoded only once.
_encoded: dict[int, tuple[weakref.ref[t.Trace], array[int]]] = {}


def words_for(trace: t.Trace) -> array[int]:
    """Return a trace as words for the native engine. The words are cached for each trace."""
    key = id(trace)
    known = _encoded.get(key)
    if known is not None and known[0]() is trace:
        return known[1]
    words = encode(trace)
    _encoded[key] = weakref.ref(trace, lambda _: _encoded.pop(key, None)), words
    return words


def encode(trace: t.Trace) -> array[int]:
    """Encode a trace as words, in the format that the docstring of this module describes."""
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
