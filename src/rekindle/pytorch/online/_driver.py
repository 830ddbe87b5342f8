"""Performs the engine's actions on torch's memory, and tells it what became of that memory.

Everything here is about storages; what operators and autograd do with them is for `_runtime`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.engine import Call, NoRoom, Storage
from rekindle.pytorch.devices import accelerator, is_accelerator, is_full
from rekindle.pytorch.online._explain import out_of_budget, out_of_memory
from rekindle.pytorch.online._history import forget_sources, keep_from_now_on, knowing
from rekindle.pytorch.online._neighbors import cheapest_neighbors
from rekindle.pytorch.online._poison import POISONS, poison
from rekindle.pytorch.online._storages import Storages
from rekindle.pytorch.online._turns import let_others_act
from rekindle.pytorch.operators import run_again
from rekindle.pytorch.tensors import Died, Memory, homes_of
from rekindle.schedule import Action, Compute, Free

Result = TypeVar("Result")


class _Less(Exception):
    """There was no room in what the device has shown to have; there is more now, of the budget."""


class Driver(Storages):
    """Performs the engine's actions on memory, and tells it what became of that memory."""

    def succeed(self, old: Storage, new: Storage) -> None:
        """The memory of `old` now holds `new`."""
        self.table.succeed(old, new)
        self._held.pop(old, None)

    def hand_over(self, old: Storage, new: Storage) -> None:
        """Whoever refers to `old` means `new` from now on."""
        if self.capture is not None:
            self.capture.handed_over(old, new)
        new.references, old.references = old.references, 0
        if not new.references:
            new.payload.disown()

    def retain(self, storage: Storage) -> None:
        """One more handle of autograd."""
        if self.capture is not None:
            self.capture.retained(storage)
        self.engine.retain(storage)

    def use(self, storage: Storage) -> None:
        """The program gets the replayable `storage` in its hands, brought back if need be."""
        if not storage.resident:
            self.poll()
            if self.watcher is not None:
                self.watcher.wanting(storage)
        if self.capture is not None:
            self.capture.used(storage)
        self._or_lending(lambda: self.bring(lambda: self._use(storage)))
        if storage.values:
            self._held[storage] = None

    def _use(self, storage: Storage) -> Iterable[Action]:
        """Nothing is to be done where the program has dropped it meanwhile."""
        return self.engine.use(storage.values[0]) if storage.values else ()

    def pin(self, storage: Storage) -> None:
        """`storage` stays as long as anybody needs it."""
        if self.capture is not None:
            self.capture.pinned(storage)
        self.bring(lambda: self.engine.pin(storage.values[0]))
        if storage.consumers:
            storage.payload.owned = storage.payload.home()
        self._held.pop(storage, None)

    def seal(self, storage: Storage) -> None:
        """What is in `storage` came from somewhere else than its operator: it is kept."""
        if self.capture is not None:
            self.capture.sealed(storage)
        self.perform(self.engine.seal(storage))

    def forget(self, source: Storage) -> None:
        """`source` is about to be written: what only it can bring back is saved first (R4)."""
        self.poll()
        self._or_lending(lambda: self.bring(lambda: self.engine.forget(source)))

    def keep_from_now_on(self, tensors: Iterable[Tensor]) -> None:
        """An optimizer will write them, step after step."""
        keep_from_now_on(self, homes_of(tensors))

    def save_what_needs(self, tensors: Iterable[Tensor]) -> None:
        """What can only be computed from the weights as they are is brought back, and stays (R4):
        later there might be no room for it."""
        for home in homes_of(tensors):
            watch = self.table.watch_at(home._cdata)
            storage = None if watch is None else watch.storage
            if storage is not None and storage.consumers and not storage.replayable:
                self.forget(storage)

    def forget_sources(self) -> bool:
        """What is kept for nothing but to compute again what is there goes; whether it did."""
        return forget_sources(self)

    def rescue(self, again: Callable[[], Result], out: RuntimeError, needed: Bytes) -> Result:
        """The device ran out of memory all the same: evicts the cheapest neighbors that make a
        place, then as much as `needed` bytes, then four times that, then all, and tries again each
        time.

        What an operator needs inside itself, and what lies in pieces, no budget counts. `again`
        must be able to start anew. It would come again at the next operator: so from then on the
        budget is what fitted.
        """
        before = self.engine.memory
        for _ in self._make_way(out, needed):
            now = self.engine.memory
            try:
                result = again()
            except RuntimeError as error:
                if not is_full(error):
                    raise
                out = error
            else:
                self.shortfall.fitted(max(now, before // 2) + needed)
                return result
        out.add_note(out_of_memory(self.snapshot()))
        raise out

    def _make_way(self, out: RuntimeError, needed: Bytes) -> Iterator[None]:
        """Evicts more each time that it is asked."""
        if is_accelerator(self.device):
            self.poll()
            piece = min(accelerator.asked_for(out) or needed, needed or sys.maxsize)
            victims = cheapest_neighbors(self.engine, self.device, piece) if piece else []
            if victims:
                self.perform(self.engine.evict(victims))
                yield
        before = self.engine.memory
        step = self.shortfall.step(needed)
        for nbytes in (before - step, before - 4 * step, -1):
            self.poll()
            self.perform(self.engine.shrink(nbytes))
            if is_accelerator(self.device):
                accelerator.empty_cache()
            yield

    # -- memory ---------------------------------------------------------------------------------

    def limit(self, budget: Bytes) -> None:
        """The budget is another one from now on."""
        self.engine.budget = budget
        self.shortfall.forget()

    def make_room(self, needed: Bytes, who: str) -> None:
        """Lets go until `needed` bytes fit, or raises `OutOfBudget`: `who` needs them."""
        self._or_lending(lambda: self._make_room(needed, who))

    def _or_lending(self, step: Callable[[], None]) -> None:
        """Does `step`, and if there is no room for it once more, with what variables hold."""
        if self.resort is None:
            step()
        else:
            self.resort.or_lending(step)

    def _make_room(self, needed: Bytes, who: str) -> None:
        self.poll()
        try:
            self.perform(self.engine.make_room(needed), who)
        except _Less:
            self._make_room(needed, who)
        except OutOfBudget:
            if not self.forget_sources():
                raise
            self.perform(self.engine.make_room(needed), who)

    def clear(self, wanted: Bytes) -> None:
        """Lets go until `wanted` bytes fit, or until nothing is left to let go."""
        engine = self.engine
        most = engine.budget - wanted
        if engine.memory > most:
            self.poll()
            self.perform(engine.shrink(most))
            if engine.memory > most and self.forget_sources():
                self.perform(engine.shrink(most))

    def poll(self) -> None:
        """Finds out which values the program has let go of; dead ones have told so themselves."""
        self._ask_allocator()
        for storage in list(self._held):
            if storage.references and not self.table.is_held(storage):
                self._drop(storage)

    def _ask_allocator(self) -> None:
        if self._outside is not None:
            known = self.engine.memory - self._outside.nbytes
            given_out = accelerator.allocated(self.device)
            self.engine.resize(self._outside, max(0, given_out - known))

    def settle(self) -> None:
        """Acts on what happened meanwhile: handles that died, memory that is gone."""
        table = self.table
        deaths, released = table.deaths, table.released
        uncounted = 0
        while deaths or released:
            if released:
                self._release(released.popleft())
                continue
            death = deaths.popleft()
            storage = death.storage
            if storage is None:
                table.leave(death)
                uncounted += death.nbytes
                if self.capture is not None:
                    self.capture.uncounted(id(death))
            elif storage.payload.watch is death:
                self._gone(storage)
            if self.engine.idle:
                self._let_go_of_idle()
        if uncounted:
            self.engine.account(0, -uncounted)

    def _gone(self, storage: Storage) -> None:
        """The memory of `storage` is free: the program alone held it."""
        if not storage.resident:  # it was let go while the program held it
            self.table.leave(storage.payload.watch)
            storage.payload.watch = None
            if self.table.shells is not None:
                self.table.shells.dropped()
            if storage.references:
                self._drop(storage)
                return
        self._held.pop(storage, None)
        if self.capture is not None:
            self.capture.dropped(storage)
        for superfluous in self.engine.gone(storage):
            self._let_go(superfluous)

    def close(self) -> None:
        """The context is over: from now on what dies is acted on at once."""
        with self.lock:
            self.settle()
            for storage in knowing(self.engine):
                if not storage.references and not storage.consumers:
                    storage.payload.origin = None  # which `swap_tensors` would mind
            if self.watcher is not None:
                self.watcher.close()
                self.watcher = None
        driver = weakref.ref(self)

        def late() -> None:
            found = driver()
            if found is not None:
                found._settle_unless_busy()

        self.table.deaths.late = self.table.released.late = late

    def _settle_unless_busy(self) -> None:
        """Nothing happens amid an action, in this thread or another: the next one makes up."""
        lock: Any = self.lock
        if not lock._is_owned() and lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                lock.release()

    def __del__(self) -> None:
        """Nobody can ask for anything. What refers to each other in circles lets go of memory."""
        self.table.deaths.late = self.table.released.late = None
        for storage in self.engine.storages:
            storage.payload.disown()

    def _drop(self, storage: Storage) -> None:
        self._held.pop(storage, None)
        if self.capture is not None:
            self.capture.dropped(storage)
        self.perform(self.engine.drop(storage))

    def _release(self, storage: Storage) -> None:
        storage = self.current(storage)
        if self.capture is not None:
            self.capture.released(storage)
        self.perform(self.engine.release(storage))
        self.disown(storage)

    def current(self, storage: Storage) -> Storage:
        """Where the value of `storage`, or what took its place unnoticed, lives now."""
        while storage.payload.successor is not None:
            storage = storage.payload.successor
        return storage

    def own(self, storage: Storage) -> None:
        """The memory of `storage`, which is resident, stays although the program drops it."""
        memory: Memory = storage.payload
        if memory.owned is None:
            memory.owned = memory.home()

    def disown(self, storage: Storage) -> None:
        """One reason less to keep the memory of `storage`: if there is none, it is let go."""
        stays = storage.pinned or not storage.replayable  # as long as something is made from it
        needed = storage.references or (storage.consumers and stays)
        if storage.held and not needed:
            storage.payload.disown()  # the program alone keeps it, or nobody
        if self.engine.idle:
            self._let_go_of_idle()

    def _let_go_of_idle(self) -> None:
        idle = self.engine.idle
        while idle:
            storage = idle.pop()
            if not storage.references and not storage.consumers:
                storage.payload.disown()

    # -- actions --------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action], who: str = "") -> None:
        """Does what the engine says, one action after the other."""
        if not actions:
            return
        iterator = iter(actions)
        while True:
            try:
                action = next(iterator, None)
            except NoRoom as shortage:
                if self.shortfall.as_given():
                    raise _Less from None
                name = who or (shortage.call.name if shortage.call else "")
                raise self._refusal(shortage, name) from None
            if action is None:
                for storage in self.engine.take_bereft():  # kept like a source from now on
                    self.own(storage)
                return
            subject = self.engine.subject
            if type(action) is Compute:
                assert isinstance(subject, Call)
                self._compute(subject, action.in_place)
                if self.audit is not None:
                    self.audit.made_again(subject)
                self.recomputations += 1
            else:
                assert isinstance(subject, Storage)
                self.evictions += not subject.dead
                self._let_go(subject)
                continue
            if self.recorder is not None:
                self.recorder.acted(action, self.engine.clock, self.engine.memory)

    def bring(self, events: Callable[[], Iterable[Action]]) -> None:
        """Likewise, where something may have to be computed again. If what that reads died amid
        it, which nobody can prevent, or what the device had was too little, it begins anew."""
        while True:
            actions = events()
            try:
                return self.perform(actions)
            except (Died, _Less) as reason:
                if isinstance(actions, Generator):
                    actions.close()  # it has locked what it was to read
                if type(reason) is _Less:
                    with self.shortfall.insisting():
                        return self.bring(events)
                if not self._hear_of_deaths():
                    raise

    def _hear_of_deaths(self) -> bool:
        """Acts on what died, also where nobody was told yet; whether anything had."""
        dead = [each for each in self.engine.storages if each.resident and _is_dead(each)]
        self.settle()
        for storage in dead:
            if storage.resident and _is_dead(storage):
                self._gone(storage)  # its death will be announced, to nobody
        return bool(dead)

    def _evicted_bytes(self) -> Bytes:
        """Bytes of evicted values that the program or autograd still has."""
        away = (each for each in self.engine.storages if not (each.resident or each.dead))
        return sum(each.nbytes for each in away)

    def _refusal(self, shortage: NoRoom, name: str) -> OutOfBudget:
        error = out_of_budget(shortage, self.snapshot(), name, self._evicted_bytes())
        self.refused = self.operators_run, copy(error)
        return error

    def _let_go(self, storage: Storage) -> None:
        self.vacate(storage)
        if storage.payload.watch is None:  # else the program has it, though it is empty
            self._held.pop(storage, None)
        if self.recorder is not None:
            self.recorder.acted(Free(storage.id), self.engine.clock, self.engine.memory)

    def vacate(self, storage: Storage) -> None:
        """What is in `storage` is gone from memory, as soon as nothing on the device reads it."""
        memory: Memory = storage.payload
        watch = memory.watch if POISONS or self.streams is not None else None
        home = None if watch is None else watch()
        if home is not None:  # else the program let go of it just now
            if POISONS and not self._is_read(storage):
                with nullcontext() if self.streams is None else self.streams.in_order():
                    poison(home)
            if self.streams is not None:
                self.streams.keep_until_read(home)
        self.table.vacate(storage)

    def _is_read(self, storage: Storage) -> bool:
        """Whether anybody may still read what is in the memory of `storage`."""
        return self.table.is_held(storage)

    def _run_again(self, call: Call, in_place: bool) -> list[Tensor]:
        if self.streams is None:
            return run_again(call, in_place=in_place)
        with self.streams.in_order():
            tensors = run_again(call, in_place=in_place)
            for tensor in tensors:
                self.streams.keep_until_read(tensor.untyped_storage())
            return tensors

    def _compute(self, call: Call, in_place: bool) -> None:
        again = partial(self._run_again, call, in_place)
        if call.payload.signature.operator.foreign:
            again = partial(let_others_act, self.lock, again)
        try:
            with self.work.going_on():
                try:
                    tensors = again()
                except RuntimeError as out:
                    half_done = in_place and not call.payload.signature.operator.starts_anew
                    if half_done or not is_full(out):
                        raise
                    tensors = self.rescue(again, out, call.nbytes)
        except BaseException:
            if in_place:  # who knows what is in there now
                for _, source in call.overwrites:
                    self.perform(self.engine.spoil(source.storage))
            raise
        if in_place:
            self.table.written_over(call)
        else:
            self.table.returned(call, tensors)


def _is_dead(storage: Storage) -> bool:
    """Whether the program alone kept its memory, and does no longer."""
    watch = storage.payload.watch
    return watch is not None and watch() is None
