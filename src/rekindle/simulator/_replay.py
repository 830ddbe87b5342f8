"""Replay a trace within a budget, with a policy, on a virtual clock and without a device.

The engine that makes the decisions is the same as at runtime, so simulated evictions are those of a
real run. `rekindle.simulate`, sweeps, profiles and planners use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rekindle import trace as t
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle.engine import Call, Engine, Follower, NoRoom, Route, Storage, Thrashed, Value
from rekindle.policies import Advised, Policy, Swap
from rekindle.schedule import Action, Compute, Free, Record, Recorder, SwapOut, Timeline
from rekindle.simulator._native import (
    NO_ROOM,
    THRASHED,
    Core,
    Played,
    Totals,
    module_for,
    play,
    words_for,
)
from rekindle.simulator._placement import Device, Placement


def replay(
    trace: t.Trace,
    *,
    budget: Bytes | None,
    policy: Policy,
    recompute_limit: Nanoseconds | None = None,
    watch: Callable[[Engine], None] | None = None,
    route: Route | None = None,
    swap: Swap | None = None,
    device: Device | None = None,
    core: Core = "auto",
) -> Record:
    """Replay a trace on a virtual clock.

    Args:
        trace: The recorded program: operators, storages and events.
        budget: The budget (bytes). None: no limit.
        policy: The policy that selects storages to evict.
        recompute_limit: The most time (ns) of recomputation. None: no limit.
        watch: A function that is called with the engine after every event. Python engine only.
        route: A plan to follow; where the plan decides nothing, `policy` decides.
        swap: Evicted values may also be swapped out, at this bandwidth. Python engine only.
        device: Also simulate the allocator of this device: the addresses that it gives to storages,
            and its fragmentation. Python engine only.
        core: The engine: "auto", "native" or "python".

    Returns:
        The record of the run.

    Raises:
        NoRoom: An operator does not fit into the budget (`rekindle.engine.NoRoom`).
        Thrashed: Recomputation takes longer than allowed (`rekindle.engine.Thrashed`).
    """
    if watch is not None and core == "auto":
        core = "python"
    run = Run(trace, budget, policy, recompute_limit, route, swap, device=device, core=core)
    run.go(watch)
    return run.record()


class Run:
    """A replay whose figures can be read even after the replay failed.

    If the native engine performs the replay, the attribute `engine` has only the totals.
    """

    def __init__(
        self,
        trace: t.Trace,
        budget: Bytes | None,
        policy: Policy,
        recompute_limit: Nanoseconds | None = None,
        route: Route | None = None,
        swap: Swap | None = None,
        *,
        device: Device | None = None,
        core: Core = "auto",
    ) -> None:
        no_native = "only the Python core simulates swapping" if swap else ""
        if device is not None:
            no_native = "only the Python core simulates an allocator"
        self._native = module_for(trace, policy, core, needs_python=no_native)
        self._played: Played | None = None
        self.evictions = self.recomputations = 0
        self._ran: set[int] = set()
        self._backward = False  # True in the backward pass, in which values are swapped in early
        self._trace = trace
        self._policy, self._route, self._swap = policy, route, swap
        self._recompute_limit = recompute_limit
        self._budget = budget
        self._recorder = Recorder()
        self.engine: Engine | Totals = Totals(0, 0, 0, 0, 0)
        self.placement = None if device is None else Placement(trace, device)
        self.timeline = None if swap is None else Timeline(trace, budget, swap)

    def go(self, watch: Callable[[Engine], None] | None = None) -> None:
        """Run the replay.

        Raises:
            NoRoom: An operator does not fit into the budget.
            Thrashed: Recomputation takes longer than allowed.
        """
        if self._native is not None and watch is None:
            played = play(
                self._native,
                words_for(self._trace),
                budget=self._budget,
                policy=self._policy,
                recompute_limit=self._recompute_limit,
                route=self._route,
            )
            if played is not None:
                self._take(played)
                return
        self._go_in_python(watch)

    def _take(self, played: Played) -> None:
        """Store the result of a native run in this object, and raise its error, if any."""
        self._played, self.engine = played, played.totals
        self.evictions, self.recomputations = played.evictions, played.recomputations
        needed, memory, budget, op_id, _ = played.numbers
        if played.status == NO_ROOM:
            raise NoRoom(needed, memory, budget, self._call(op_id))
        if played.status == THRASHED:
            raise Thrashed(needed, memory)

    def _call(self, op_id: int) -> Call | None:
        """Return the operator `op_id` as the engine's class, for an error message, or None."""
        if op_id < 0:
            return None
        op = self._trace.ops[op_id]
        return Call(OpId(op_id), op.name, op.cost, (), op.replayable)

    def _go_in_python(self, watch: Callable[[Engine], None] | None) -> None:
        policy = self._policy if self._route is None else Advised(self._policy)
        engine = Engine(self._budget, policy, self._swap, self._recompute_limit)
        self.engine = engine
        follower = None if self._route is None else Follower(engine, self._route, _NoMemory())
        for event, actions in drive(self._trace, engine, follower):
            self._perform(actions, engine)
            if self.timeline is not None:
                self._copy(event, engine, self.timeline)
            # In a real run the runtime would release the memory of these storages. A simulation has
            # no memory to release.
            engine.idle.clear()
            if watch is not None:
                watch(engine)

    def _perform(self, actions: Iterable[Action], engine: Engine) -> None:
        """Record the actions, give their storages addresses, and advance the clock."""
        acted, ran, timeline = self._recorder.acted, self._ran, self.timeline
        if self.placement is not None:
            actions = self.placement.follow(actions, engine)
        for action in actions:
            clock = engine.clock if timeline is None else timeline.now
            acted(action, clock, engine.memory)
            if isinstance(action, Compute):
                if action.op in ran:
                    self.recomputations += 1
                else:
                    ran.add(action.op)
                    self._backward = self._trace.ops[action.op].is_backward
            elif isinstance(action, Free) or (isinstance(action, SwapOut) and not action.keep):
                self.evictions += 1
            if timeline is not None:
                timeline.follow(action, engine.memory)

    def _copy(self, event: Value | None, engine: Engine, timeline: Timeline) -> None:
        """Wait until the program can read the value `event`, then start copies ahead of time.

        In the backward pass these are swap-ins, and otherwise copies to the host.
        """
        if event is not None:
            timeline.need(event.storage.id)
        self._perform(engine.discards(), engine)
        if self._backward:
            self._perform(engine.prefetch(timeline.room(engine.memory)), engine)
        else:
            self._perform(engine.ahead(), engine)

    def record(self) -> Record:
        """Return the record of the run so far."""
        engine, reported, timeline = self.engine, self._reported(), self.timeline
        host = engine.host if isinstance(engine, Engine) else None
        allocator = self.placement.allocator if self.placement else None
        return Record(
            *reported,
            self._budget,
            engine.peak,
            engine.compute_ns,
            engine.recompute_ns,
            self.evictions,
            self.recomputations,
            repr(self._policy),
            host.swapped_out if host else 0,
            host.swapped_in if host else 0,
            host.peak if host else 0,
            timeline.transfer_ns if timeline else 0,
            timeline.waiting_ns if timeline else 0,
            allocator.allocated_peak if allocator else 0,
            allocator.reserved_peak if allocator else 0,
        )

    def _reported(self) -> tuple[tuple[Action, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the actions, and the clock and the memory at the beginning of each action."""
        played, recorder = self._played, self._recorder
        if played is not None:
            return tuple(played.actions()), tuple(played.clock()), tuple(played.memory())
        return tuple(recorder.actions), tuple(recorder.clock), tuple(recorder.memory)


class _NoMemory:
    """Stand-in for the runtime that a `Follower` works for; a simulation has no real memory."""

    def poll(self) -> None: ...

    def current(self, storage: Storage) -> Storage:
        return storage

    def own(self, storage: Storage) -> None: ...

    def disown(self, storage: Storage) -> None: ...


_Step = tuple[Value | None, Iterable[Action]]


def drive(trace: t.Trace, engine: Engine, follower: Follower | None = None) -> Iterator[_Step]:
    """Call the engine for each event of a trace, in order.

    Yields:
        For each event, the value that the program reads after the actions, or None; and the actions
        of the engine.
    """
    by_id: dict[int, Value] = {}
    following = OpId(0)  # the next operator to run for the first time
    for event in trace.events:
        match event:
            case t.Call(op_id, held):
                op = trace.ops[op_id]
                call = Call(
                    op_id, op.name, op.cost, [by_id[value] for value in op.inputs], op.replayable
                )
                for value in op.outputs:
                    storage = trace.values[value]
                    if trace.is_root(value):
                        by_id[value] = call.makes(StorageId(storage), trace.storages[storage])
                    else:
                        by_id[value] = call.views(by_id[trace.root[storage]].storage)
                call.workspace = op.workspace
                call.overwrites = [(by_id[output], by_id[old]) for output, old in op.overwrites]
                if follower is not None:
                    yield None, follower.before(op_id)
                yield None, engine.call(call, held=held)
                following = OpId(op_id + 1)
                if follower is not None:
                    for storage in call.made:
                        follower.made(storage.id, storage)
            case t.Use(value):
                if follower is not None:
                    yield None, follower.about_to_access(by_id[value].storage, following)
                yield by_id[value], engine.use(by_id[value])
            case t.Pin(value):
                if follower is not None:
                    yield None, follower.about_to_access(by_id[value].storage, following)
                yield by_id[value], engine.pin(by_id[value])
            case t.Retain(value):
                engine.retain(by_id[value].storage)
            case t.Release(value):
                yield None, engine.release(by_id[value].storage)
            case t.Drop(value):
                yield None, engine.drop(by_id[value].storage)
    if follower is not None:
        yield None, follower.end()
