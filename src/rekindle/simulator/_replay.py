"""Replays a trace under a budget and a policy on a virtual clock: the same decisions, no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rekindle import trace as t
from rekindle._types import Bytes, OpId, StorageId
from rekindle.engine import RIGHT, Call, Engine, Follower, Route, Rules, Storage, Value
from rekindle.policies import Advised, Policy, Swap
from rekindle.schedule import Action, Compute, Free, Record, Recorder, SwapOut, Timeline


def replay(
    trace: t.Trace,
    *,
    budget: Bytes | None,
    policy: Policy,
    rules: Rules = RIGHT,
    watch: Callable[[Engine], None] | None = None,
    route: Route | None = None,
    swap: Swap | None = None,
) -> Record:
    """What the engine does for `trace` within `budget` bytes (None: no limit).

    With a `route` the engine follows it, and `policy` decides where it says nothing.
    Raises `rekindle.engine.NoRoom` where the budget cannot be kept, and `rekindle.engine.Thrashed`
    where recomputation takes longer than `rules` allow. `watch(engine)` is called after
    every event.
    """
    run = Run(trace, budget, policy, rules, route, swap)
    run.go(watch)
    return run.record()


class Run:
    """A replay, also one that fails on the way: what happened until then is there."""

    def __init__(
        self,
        trace: t.Trace,
        budget: Bytes | None,
        policy: Policy,
        rules: Rules,
        route: Route | None = None,
        swap: Swap | None = None,
    ) -> None:
        self.engine = Engine(budget, policy if route is None else Advised(policy), rules, swap)
        self._follower = None if route is None else Follower(self.engine, route, _Nobody())
        self.timeline = None if swap is None else Timeline(trace, budget, swap)
        self.evictions = self.recomputations = 0
        self._ran: set[int] = set()
        self._backward = False  # what was saved last is wanted first
        self._trace = trace
        self._made_by = repr(policy)
        self._budget = budget
        self._recorder = Recorder()

    def go(self, watch: Callable[[Engine], None] | None = None) -> None:
        """Raises `NoRoom` or `Thrashed`."""
        engine = self.engine
        for event, actions in _drive(self._trace, engine, self._follower):
            self._perform(actions)
            if self.timeline is not None:
                self._swap(event, self.timeline)
            engine.idle.clear()  # nothing to do: a simulated program holds no memory of its own
            if watch is not None:
                watch(engine)

    def _perform(self, actions: Iterable[Action]) -> None:
        engine, acted, ran, timeline = self.engine, self._recorder.acted, self._ran, self.timeline
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

    def _swap(self, event: Value | None, timeline: Timeline) -> None:
        """After an event: waits for `event`, the value that the program reads; copies ahead."""
        engine = self.engine
        if event is not None:
            timeline.need(event.storage.id)
        self._perform(engine.discards())
        if self._backward:
            self._perform(engine.prefetch(timeline.room(engine.memory)))
        else:
            self._perform(engine.ahead())

    def record(self) -> Record:
        engine, recorder = self.engine, self._recorder
        host, timeline = engine.host, self.timeline
        return Record(
            tuple(recorder.actions),
            tuple(recorder.clock),
            tuple(recorder.memory),
            self._budget,
            engine.peak,
            engine.compute_ns,
            engine.recompute_ns,
            self.evictions,
            self.recomputations,
            self._made_by,
            host.swapped_out if host else 0,
            host.swapped_in if host else 0,
            host.peak if host else 0,
            timeline.transfer_ns if timeline else 0,
            timeline.waiting_ns if timeline else 0,
        )


class _Nobody:
    """A simulated program owns no memory, and tells at once what it drops."""

    def poll(self) -> None: ...

    def current(self, storage: Storage) -> Storage:
        return storage

    def own(self, storage: Storage) -> None: ...

    def disown(self, storage: Storage) -> None: ...


_Step = tuple[Value | None, Iterable[Action]]


def _drive(trace: t.Trace, engine: Engine, follower: Follower | None) -> Iterator[_Step]:
    """Turns events of the trace into calls of the engine; yields the actions of each.

    And the value that the program has read by then, if it has.
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
                    yield None, follower.wanting(by_id[value].storage, following)
                yield by_id[value], engine.use(by_id[value])
            case t.Pin(value):
                if follower is not None:
                    yield None, follower.wanting(by_id[value].storage, following)
                yield by_id[value], engine.pin(by_id[value])
            case t.Retain(value):
                engine.retain(by_id[value].storage)
            case t.Release(value):
                yield None, engine.release(by_id[value].storage)
            case t.Drop(value):
                yield None, engine.drop(by_id[value].storage)
    if follower is not None:
        yield None, follower.end()
