"""Random streams of events for both engines (Python and C++), which must take the same actions.

An event is a call of the engine, such as `call`, `release` or `evict`. The state of the engine
decides which events are valid next, so the Python engine plays each event while it is drawn.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

from rekindle.engine import Call, Engine, NoRoom, Storage, Value
from rekindle.policies import Policy, Swap
from rekindle.schedule import Action, Compute, Discard, Free, SwapIn, SwapOut
from rekindle.simulator._native import HELD, REPLAYABLE

ADMITTED = 4
DEFERRED = 8
WORDS = [
    "call",
    "use",
    "pin",
    "retain",
    "release",
    "drop",
    "gone",
    "forget",
    "seal",
    "spoil",
    "account",
    "resize",
    "require",
    "make_room",
    "shrink",
    "evict",
    "set_evictable_while_held",
    "lock",
    "unlock",
    "listen",
    "clear_reserve",
    "let",
    "ahead",
    "prefetch",
    "planned",
    "save",
    "fetch",
    "discards",
    "measured",
    "copy_lost",
    "written",
    "outdate",
    "hold",
    "step",
    "anticipate",
    "fail",
]
EVENTS = [
    *("call",) * 30,
    *("admit",) * 8,
    *("defer",) * 4,
    *("use", "drop", "release") * 6,
    *("retain", "hold", "pin", "require", "gone", "forget", "seal", "account", "resize"),
    *("shrink", "make_room", "evict", "set_evictable_while_held", "spoil", "listen", "let"),
]
SWAPPING = [
    *EVENTS,
    *("ahead",) * 12,
    *("prefetch",) * 3,
    *("anticipate",) * 4,
    "step",
    *("save", "fetch") * 2,
    *("planned", "discards", "measured", "copy_lost", "written", "fail"),
    *("outdate",) * 4,
]
COPYING = ("ahead", "prefetch", "planned", "discards", "measured", "step", "anticipate", "fail")
RATES = [2 * 10**8, 10**9, 5 * 10**9]  # bytes per second: a byte takes 5, 1 or 0.2 ns

MOST = 20_000  # largest number of actions in a stream


def some_swap(rng: random.Random) -> Swap:
    """Draw bandwidths similar to the speed of a stream's operators, and little host memory."""
    host = rng.choice([None, None, 0, 8, 20, 60])
    return Swap(host, rng.choice(RATES), rng.choice(RATES), only=rng.random() < 0.2)


class Stream:
    """A random stream of events, encoded as numbers, and the Python engine's actions for them."""

    def __init__(
        self,
        rng: random.Random,
        budget: int | None,
        policy: Policy,
        swap: Swap | None = None,
    ):
        self.rng = rng
        self.engine = Engine(budget, policy, swap)
        self.drawn_from = EVENTS if swap is None else SWAPPING
        self.fail_in = -1  # number of copies until one fails; negative: none fails
        self.failures = 0  # number of copies that failed
        self.words = array("q")
        self.actions: list[Action] = []
        self.clock: list[int] = []
        self.memory: list[int] = []
        self.steps: list[int] = []
        self.values: dict[int, Value] = {}
        self.numbers = self.calls = self.storages = 0
        self.seen: set[str] = set()

    # -- performing -----------------------------------------------------------------------------

    def event(self, name: str, first: int, second: int, actions: Iterable[Action] = ()) -> bool:
        self.seen.add(name)
        self.words.extend((WORDS.index(name), first, second))
        return self.perform(actions)

    def perform(self, actions: Iterable[Action]) -> bool:
        """Note the engine's actions. Return True if memory sufficed for all of them."""
        room = True
        try:
            for action in actions:
                self.acted(action)
                self.may_fail(action)
        except NoRoom:
            room = False
        self.note(room)
        return room

    def acted(self, action: Action) -> None:
        assert len(self.actions) < MOST, "the stream asks for what never ends"
        self.actions.append(action)
        self.clock.append(self.engine.clock)
        self.memory.append(self.engine.memory)

    def may_fail(self, action: Action) -> None:
        """Let some copies fail, and report each failure to the engine as the runtime does."""
        engine, storage = self.engine, self.engine.subject
        match action:
            case SwapOut() if self.fails():
                assert isinstance(storage, Storage)
                if not engine.swap_out_failed(storage):
                    self.acted(Free(storage.id))
            case SwapIn():
                assert isinstance(storage, Storage)
                if storage.replayable and self.fails():
                    engine.swap_in_failed(storage)
            case _:
                pass

    def fails(self) -> bool:
        self.fail_in -= self.fail_in >= 0
        self.failures += self.fail_in == 0
        return self.fail_in == 0

    def note(self, room: bool) -> None:
        self.engine.idle.clear()
        done = len(self.actions)
        self.steps += [done if room else ~done, self.engine.memory, self.engine.clock]

    # -- drawing --------------------------------------------------------------------------------

    def draw(self, length: int, *, checked: bool = True) -> None:
        for _ in range(length):
            self.one(self.rng.choice(self.drawn_from))
            if checked:
                self.engine.check()

    def one(self, name: str) -> None:
        if name in ("call", "admit", "defer"):
            self.draw_call(admitted=name == "admit", deferred=name == "defer")
        elif name in ("shrink", "make_room", "evict", "account", "listen", "clear_reserve"):
            self.draw_global(name)
        elif name in COPYING:
            self.draw_copying(name)
        else:
            fitting = [n for n, value in self.values.items() if self.may(name, value)]
            if fitting:
                self.draw_about(name, self.rng.choice(fitting))

    def wanted(self, value: Value) -> bool:
        storage = value.storage
        return bool(storage.makers) and storage in self.engine._storages and not storage.dead

    def may(self, name: str, value: Value) -> bool:
        storage = value.storage
        if name == "let":
            return not self.wanted(value) and not storage.locks
        if name == "spoil":
            useful = storage.replayable and bool(storage.consumers)
            return storage.dead and storage.resident and useful
        if name == "copy_lost":
            return storage.on_host and (storage.replayable or storage.resident)
        if name in ("written", "outdate"):
            return storage.on_host and storage.resident and not storage.replayable
        if not self.wanted(value):
            return False
        match name:
            case "release":
                return storage.references > 0
            case "drop":
                return storage.held
            case "hold":
                return not storage.resident and storage.replayable
            case "gone":
                kept = storage.replayable or not storage.consumers
                return storage.held and not storage.references and kept
            case "forget":
                return not storage.replayable
            case "seal":
                made = [out.storage for call in storage.makers for out in call.outputs]
                # an evicted value that loses its recipe could not be recomputed
                return all(each.resident for each in made)
            case "resize":
                again = any(call.replayable for call in storage.makers)
                return storage.held and storage.resident and not again and not self.may_go(storage)
            case "set_evictable_while_held":
                return storage.resident
            case _:
                return True

    def may_go(self, storage: Storage) -> bool:
        """Return True if a held storage may be swapped out. Such a storage must not be resized."""
        return self.engine.host is not None and (storage.on_host or storage.evictable_while_held)

    def draw_about(self, name: str, number: int) -> None:
        value, engine = self.values[number], self.engine
        storage = value.storage
        match name:
            case "retain" | "hold":
                getattr(engine, name)(storage)
                self.event(name, number, 0)
            case "gone":
                self.event(name, number, 0, [Free(s.id) for s in engine.gone(storage)])
            case "resize":
                nbytes = self.rng.randint(0, 9)
                room = self.make_room(max(0, nbytes - storage.nbytes))
                if room and storage.resident and not self.may_go(storage):
                    engine.resize(storage, nbytes)
                    self.event(name, number, nbytes)
            case "set_evictable_while_held":
                how = self.rng.randint(0, 2)
                engine.set_evictable_while_held(storage, how > 0, last=how == 2)
                self.event(name, number, how)
            case "let":
                del self.values[number]
                self.event(name, number, 0)
            case "copy_lost":
                engine.copy_lost(storage)
                self.event(name, number, 0)
            case "outdate":
                assert engine.host is not None
                engine.host.outdated.add(storage)
                self.event(name, number, 0)
            case "use" | "pin" | "require":
                self.event(name, number, 0, getattr(engine, name)(value))
            case _:
                self.event(name, number, 0, getattr(engine, name)(storage))

    def draw_global(self, name: str) -> None:
        engine, nbytes = self.engine, self.rng.randint(0, 9)
        match name:
            case "shrink":
                self.event(name, nbytes, 0, engine.shrink(nbytes))
            case "make_room":
                self.make_room(nbytes)
            case "evict":
                self.event(name, 0, 0, engine.evict(self.least_loss()))
            case "listen":
                engine.listen()
                self.event(name, 0, 0)
            case "clear_reserve":
                engine.reserve.clear()
                self.event(name, 0, 0)
            case _:
                nbytes = self.rng.choice([nbytes, -engine.unlisted])
                if self.make_room(max(0, nbytes)):
                    cost = self.rng.randint(0, 9)
                    engine.account(cost, nbytes)
                    self.event(name, cost, nbytes)

    def draw_copying(self, name: str) -> None:
        engine, rng = self.engine, self.rng
        match name:
            case "prefetch":
                room = rng.choice([-1, rng.randint(0, 30)])
                actions = engine.prefetch(float("inf") if room < 0 else room)
                self.event(name, room, 0, actions)
            case "measured":
                assert engine.host is not None
                out, back = (rng.choice([0, *RATES]) for _ in range(2))
                engine.host.measured(out_bytes_per_s=out, in_bytes_per_s=back)
                self.event(name, out, back)
            case "planned":
                follow = rng.random() < 0.5
                engine.follow_plan(follow)
                self.event(name, int(follow), 0)
            case "fail":
                self.fail_in = rng.randint(1, 6)
                self.event(name, self.fail_in, 0)
            case "step":
                engine.step()
                self.event(name, 0, 0)
            case _:
                self.event(name, 0, 0, getattr(engine, name)())

    def least_loss(self) -> list[Storage]:
        """Return a list of one storage, the cheapest to evict; empty if none may be evicted."""
        engine = self.engine
        losses = [(engine.loss(each), each.order, each) for each in engine.storages]
        known = [(loss, order, each) for loss, order, each in losses if loss is not None]
        return [each for *_, each in sorted(known, key=lambda it: it[:2])[:1]]

    def make_room(self, nbytes: int) -> bool:
        return self.event("make_room", nbytes, 0, self.engine.make_room(nbytes))

    def draw_call(self, *, admitted: bool, deferred: bool) -> None:
        rng = self.rng
        in_hand = [n for n, v in self.values.items() if v.defined and v.storage.held]
        usable = in_hand if admitted else [*self.values]
        usable = [n for n in usable if self.wanted(self.values[n])]
        inputs = [rng.choice(usable) for _ in range(rng.choice([0, 1, 1, 2, 3])) if usable]
        sources = [n for n in inputs if self.values[n] is self.values[n].storage.values[0]]
        overwritten = rng.choice(sources) if sources and rng.random() < 0.25 else None
        replayable = rng.random() < 0.85 if inputs else rng.random() < 0.4
        if admitted and overwritten is not None:
            overwritten = overwritten if self.values[overwritten].storage.replayable else None
        held = rng.random() < 0.5
        if deferred:
            overwritten, replayable, held = None, True, True
        call = Call(
            self.calls, "op", rng.randint(0, 9), [self.values[n] for n in inputs], replayable
        )
        self.calls += 1
        call.workspace = 0 if rng.random() < 0.7 else rng.randint(1, 6)
        flags = REPLAYABLE * replayable | HELD * held | ADMITTED * admitted
        flags |= DEFERRED * deferred
        words = [0, call.id, call.cost, flags, call.workspace, len(inputs), *inputs]
        made = self.draw_outputs(call, [] if deferred else inputs, overwritten)
        words += [len(made) // 3, *made]
        words += [1, made[0], overwritten] if overwritten is not None else [0]
        if admitted:
            lent = self.values[overwritten].storage.nbytes if overwritten is not None else 0
            room = self.make_room(call.nbytes - lent + call.workspace)
            if not room or not all(value.defined for value in call.inputs):
                self.undo(call, made)
                return
        self.seen.add("admit" if admitted else "defer" if deferred else "call")
        self.words.extend(words)
        if deferred:
            self.engine.defer(call)
            fits = self.perform([])
        elif admitted:
            freed = self.engine.admit(call, held=held)
            fits = self.perform([Free(storage.id) for storage in freed])
        else:
            fits = self.perform(self.engine.call(call, held=held))
        if not fits:
            for number in made[::3]:
                del self.values[number]
        elif overwritten is not None:
            self.lose(self.values[overwritten].storage)

    def lose(self, storage: Storage) -> None:
        """Release all references to an overwritten `storage`, unless it can be recomputed."""
        if storage.replayable:
            return
        named = [number for number, value in self.values.items() if value.storage is storage]
        while storage.references:
            self.event("release", named[0], 0, self.engine.release(storage))
        for number in named:
            del self.values[number]
            self.event("let", number, 0)

    def draw_outputs(self, call: Call, inputs: list[int], overwritten: int | None) -> list[int]:
        """Draw the outputs of a call.

        If the call overwrites an input, the first output takes over the storage of that input. A
        call that makes a view makes nothing else and has one input, as in the runtime.

        Returns:
            Number, storage and bytes of each output, one after the other.
        """
        rng = self.rng
        if inputs and overwritten is None and rng.random() < 0.2:
            (base,) = {*inputs} if len({*inputs}) == 1 else {None}
            if base is not None and self.values[base].defined:
                return self.number(call.views(self.values[base].storage), base, -1)
        made: list[int] = []
        for position in range(rng.choice([0, 1, 1, 1, 2, 3]) or overwritten is not None):
            takes_over = position == 0 and overwritten is not None
            nbytes = self.values[overwritten].storage.nbytes if takes_over else rng.randint(0, 6)
            value = call.makes(self.storages, nbytes)
            made += self.number(value, self.storages, nbytes)
            self.storages += 1
            if takes_over:
                call.overwrites = [(value, self.values[overwritten])]
        return made

    def number(self, value: Value, storage: int, nbytes: int) -> list[int]:
        self.values[self.numbers] = value
        self.numbers += 1
        return [self.numbers - 1, storage, nbytes]

    def undo(self, call: Call, made: list[int]) -> None:
        """Remove the outputs of a `call` that did not take place."""
        for number in made[::3]:
            value = self.values.pop(number)
            if value.storage.values[0] is not value:
                value.storage.values.remove(value)
                if value.storage.makers[-1] is call:
                    value.storage.makers.pop()


def reported(actions: Iterable[Action]) -> list[int]:
    """Encode actions as the native engine does."""
    return [_word(action) for action in actions]


def _word(action: Action) -> int:
    match action:
        case Free(storage):
            return 8 * storage
        case Compute(op, in_place):
            return 8 * op + 1 + in_place
        case SwapOut(storage, keep):
            return 8 * storage + 3 + keep
        case SwapIn(storage):
            return 8 * storage + 5
        case Discard(storage):
            return 8 * storage + 6
