"""Replay a journal of the native engine on the Python engine, and compare what both do.

A journal is the engine's log: events (such as an operator call) and the actions that followed
(such as freeing a storage).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from rekindle.engine import Call, Engine, NoRoom, Storage, Value
from rekindle.policies import Advised, Policy, Swap
from rekindle.schedule import Action, Compute, Discard, Free, SwapIn, SwapOut

KINDS = (
    "reads makes views overwrites takes call admit defer hold use pin retain release drop gone "
    "forget seal spoil account resize require make_room shrink evict set_evictable_while_held "
    "lock unlock mark unmark clear listen uncounted ahead prefetch planned save fetch discards "
    "measured swap_out_failed swap_in_failed copy_lost written outdated step anticipate "
    "compute free swap_out swap_in "
    "discard"
)
REPLAYABLE, HELD = 1, 2
ACTIONS = ("compute", "free", "swap_out", "swap_in", "discard")
# events that may also occur while the engine handles another event
NESTED = ("measured", "swap_out_failed", "swap_in_failed", "copy_lost", "outdated")


class Entry(NamedTuple):
    """An entry of the native core's journal (native/engine/journal.h)."""

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
    """The Python engine, driven by the entries of a journal.

    Args:
        budget: The budget in bytes.
        policy: The policy of both engines.
        advised: True if a learned plan told the native engine what to evict.
        driven: True if the journal comes from a real training. The driver (the runtime's caller of
            the engine) then also changed some storages without an event.
        swap: The swap settings of both engines.
    """

    def __init__(
        self,
        budget: int | None,
        policy: Policy,
        *,
        advised: bool = False,
        driven: bool = False,
        swap: Swap | None = None,
    ) -> None:
        self.engine = Engine(budget, Advised(policy) if advised else policy, swap=swap)
        self.driven = driven
        self.storages: dict[int, Storage] = {}
        self.reported: list[Entry] = []  # inputs and outputs of the next operator call
        self.going_on: Iterator[Action] = iter(())  # remaining actions of the last event
        self.instead: list[Action] = []  # what the driver does in place of a failed copy

    def compare(self, words: Iterable[int]) -> int:
        """Assert that both engines take equal actions, with equal clocks and memory sizes.

        Returns:
            The number of compared actions.
        """
        compared = 0
        for entry in entries(words):
            if entry.kind in ACTIONS:
                assert entry == self.action(), "the engine in Python does something else"
                compared += 1
            elif entry.kind in NESTED:
                if not entry.flags:  # the entry is not nested in another event
                    self.end()
                self.copied(entry)
            else:
                self.end()
                self.event(entry)
        self.end()
        return compared

    def action(self) -> Entry | None:
        """Return the next action of the Python engine for the last event, or None."""
        engine = self.engine
        action = self.instead.pop() if self.instead else self.next()
        match action:
            case None:
                return None
            case Compute(op, in_place):
                reported = ("compute", op, 0, int(in_place))
            case SwapOut(storage, keep):
                reported = ("swap_out", storage, 0, int(keep))
            case Free(storage):
                reported = ("free", storage, 0, 0)
            case SwapIn(storage):
                reported = ("swap_in", storage, 0, 0)
            case Discard(storage):
                reported = ("discard", storage, 0, 0)
        return Entry(*reported, engine.clock, engine.memory)

    def next(self) -> Action | None:
        with suppress(NoRoom):  # if the native engine did not fail here, the journals differ
            return next(self.going_on, None)
        return None

    def end(self) -> None:
        """Finish the last event: assert that no action of the Python engine is left."""
        left = self.action()
        assert left is None, f"only the engine in Python did {left}"
        self.engine.idle.clear()

    def copied(self, entry: Entry) -> None:
        """Tell the Python engine about a failed, lost or outdated copy, or a measured bandwidth.

        This may happen during an event or between two events.
        """
        assert self.engine.host is not None
        if entry.kind == "measured":
            rates = {"out_bytes_per_s": entry.id, "in_bytes_per_s": entry.number}
            self.engine.host.measured(**rates)
            return
        storage = self.storages[entry.id]
        if entry.kind == "outdated":
            self.engine.host.outdated.add(storage)
            return
        stays = getattr(self.engine, entry.kind)(storage)
        if entry.kind == "swap_out_failed" and not stays:
            self.instead.append(Free(storage.id))

    def event(self, entry: Entry) -> None:
        if entry.kind in ("reads", "makes", "views", "overwrites", "takes"):
            self.reported.append(entry)
            return
        engine = self.engine
        match entry.kind:
            case "call" | "admit" | "defer":
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
            case "prefetch":
                self.perform(
                    engine.prefetch(entry.number if entry.number < 2**62 else float("inf"))
                )
            case "planned":
                engine.follow_plan(entry.number > 0)
            case "step":
                engine.step()
            case "ahead" | "discards" | "anticipate":
                self.perform(getattr(engine, entry.kind)())
            case "make_room" | "shrink":
                self.perform(getattr(engine, entry.kind)(entry.number))
            case "evict":
                self.perform(engine.evict([self.storages[entry.id]]))
            case "set_evictable_while_held":
                storage = self.storages[entry.id]
                engine.set_evictable_while_held(storage, entry.flags > 0, last=entry.flags == 2)
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

    def call(self, entry: Entry) -> None:
        reported, self.reported = self.reported, []
        inputs = [self.value(each) for each in reported if each.kind == "reads"]
        call = Call(entry.id, "", entry.number, inputs, bool(entry.flags & REPLAYABLE))
        made: dict[int, Value] = {}
        for each in reported:
            if each.kind == "makes":
                made[each.id] = call.makes(each.id, each.number)
                self.storages[each.id] = made[each.id].storage
            elif each.kind == "views":
                call.views(self.storages[each.id])
            elif each.kind == "takes":
                call.workspace = each.number
        call.overwrites = [
            (made[each.id], next(v for v in inputs if v.storage.id == each.number))
            for each in reported
            if each.kind == "overwrites"
        ]
        held = bool(entry.flags & HELD)
        if entry.kind == "call":
            self.perform(self.engine.call(call, held=held))
        elif entry.kind == "defer":
            self.engine.defer(call)
        else:
            if self.driven:
                self.prepare(call)
            freed = self.engine.admit(call, held=held)
            self.perform([Free(storage.id) for storage in freed])

    def prepare(self, call: Call) -> None:
        """Change the call's storages as the runtime's driver does before an operator runs."""
        for value in call.inputs:
            value.storage.last_access = self.engine.clock
        for output, source in call.overwrites:  # handles now refer to the new version
            output.storage.references, source.storage.references = source.storage.references, 0

    def value(self, entry: Entry) -> Value:
        return self.storages[entry.id].values[entry.number]

    def perform(self, actions: Iterable[Action]) -> None:
        self.going_on = iter(actions)
