"""A journal of the native engine, replayed on the engine in Python: does that act the same?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rekindle.engine import Call, Engine, NoRoom, Storage, Value
from rekindle.policies import Advised, Policy
from rekindle.schedule import Action, Compute, Free

KINDS = (
    "reads makes views overwrites takes call admit use pin retain release drop gone forget seal "
    "spoil account resize require make_room shrink let_return lock unlock mark unmark clear listen "
    "uncounted compute free"
)
REPLAYABLE, HELD = 1, 2


class Entry(NamedTuple):
    """As in native/engine/journal.h."""

    kind: str
    id: int
    number: int
    flags: int
    clock: int
    memory: int


def entries(words: Iterable[int]) -> Iterator[Entry]:
    kinds, numbers = KINDS.split(), iter(words)
    for kind, *rest in zip(*[numbers] * 6, strict=True):
        yield Entry(kinds[kind], *rest)


class Replay:
    """The engine in Python, told what the journal tells. `driven`: by a driver, which does some
    things to storages by itself."""

    def __init__(
        self, budget: int | None, policy: Policy, *, advised: bool = False, driven: bool = False
    ) -> None:
        self.engine = Engine(budget, Advised(policy) if advised else policy)
        self.driven = driven
        self.storages: dict[int, Storage] = {}
        self.told: list[Entry] = []  # of the call that is to come
        self.acted: list[Entry] = []

    def compare(self, words: Iterable[int]) -> int:
        """Asserts that each action is the same, at the same clock and memory. Returns how many."""
        compared = 0
        waiting: list[Entry] = []
        for entry in entries(words):
            if entry.kind in ("compute", "free"):
                assert waiting, f"only the native engine did {entry}"
                expected = waiting.pop(0)
                assert entry == expected
                compared += 1
            else:
                assert not waiting, f"only the engine in Python did {waiting[0]}"
                self.acted = waiting
                self.event(entry)
        assert not waiting, f"only the engine in Python did {waiting[0]}"
        return compared

    def event(self, entry: Entry) -> None:
        if entry.kind in ("reads", "makes", "views", "overwrites", "takes"):
            self.told.append(entry)
            return
        engine = self.engine
        match entry.kind:
            case "call" | "admit":
                self.call(entry)
            case "use" | "pin" | "require":
                value = self.storages[entry.id].values[entry.number]
                self.perform(getattr(engine, entry.kind)(value))
            case "gone":
                freed = engine.gone(self.storages[entry.id])
                self.perform([Free(storage.id) for storage in freed])
            case "account":
                engine.account(entry.id, entry.number, entry.flags)
            case "resize":
                engine.resize(self.storages[entry.id], entry.number)
            case "make_room" | "shrink":
                self.perform(getattr(engine, entry.kind)(entry.number))
            case "let_return":
                storage = self.storages[entry.id]
                engine.let_return(storage, entry.flags > 0, last=entry.flags == 2)
            case "mark" | "unmark":
                assert engine.advice is not None
                getattr(engine.advice, entry.kind)(self.storages[entry.id])
            case "clear":
                assert engine.advice is not None
                engine.advice.clear(engine.clock)
            case "listen":
                engine.listen()
            case _:
                self.perform(getattr(engine, entry.kind)(self.storages[entry.id]) or ())
        engine.idle.clear()

    def call(self, entry: Entry) -> None:
        told, self.told = self.told, []
        inputs = [self.value(each) for each in told if each.kind == "reads"]
        call = Call(entry.id, "", entry.number, inputs, bool(entry.flags & REPLAYABLE))
        made: dict[int, Value] = {}
        for each in told:
            if each.kind == "makes":
                made[each.id] = call.makes(each.id, each.number)
                self.storages[each.id] = made[each.id].storage
            elif each.kind == "views":
                call.views(self.storages[each.id])
            elif each.kind == "takes":
                call.workspace = each.number
        call.overwrites = [
            (made[each.id], next(v for v in inputs if v.storage.id == each.number))
            for each in told
            if each.kind == "overwrites"
        ]
        held = bool(entry.flags & HELD)
        if entry.kind == "call":
            self.perform(self.engine.call(call, held=held))
        else:
            if self.driven:
                self.prepare(call)
            freed = self.engine.admit(call, held=held)
            self.perform([Free(storage.id) for storage in freed])

    def prepare(self, call: Call) -> None:
        """What a driver does before it admits a call."""
        for value in call.inputs:
            value.storage.last_access = self.engine.clock
        for output, source in call.overwrites:  # handles mean what is there now
            output.storage.references, source.storage.references = source.storage.references, 0

    def value(self, entry: Entry) -> Value:
        return self.storages[entry.id].values[entry.number]

    def perform(self, actions: Iterable[Action]) -> None:
        try:
            for action in actions:
                engine = self.engine
                if isinstance(action, Compute):
                    told = ("compute", action.op, 0, int(action.in_place))
                else:
                    assert isinstance(action, Free)
                    told = ("free", action.storage, 0, 0)
                self.acted.append(Entry(*told, engine.clock, engine.memory))
        except NoRoom:
            pass  # the native engine had none either, or its journal goes on otherwise
