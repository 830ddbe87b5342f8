"""What operators and autograd do under a budget becomes events of the engine.

The rules are those of the design (R1 to R12); code that serves one names it. The mechanism: a
dispatch mode sees every operator and records recipes, saved-tensor hooks give autograd handles in
the place of tensors. The runtime owns the memory behind handles, so dropping it frees it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from rekindle.engine import Storage
from rekindle.pytorch.devices import accelerator, is_accelerator, is_full
from rekindle.pytorch.online._cuda import EventPrices
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._foreign import with_private_inputs
from rekindle.pytorch.online._handle import (
    Handle,
    count_from,
    kept,
    modified,
    unpack_kept,
    with_counter_of,
)
from rekindle.pytorch.online._history import LONGEST_CHAIN, forget_history
from rekindle.pytorch.online._leaves import leaves, unwatched
from rekindle.pytorch.online._recording import (
    find_written,
    keep_indices,
    look_twice,
    note_if_it_strays,
    register,
    written_over,
)
from rekindle.pytorch.online._turns import let_others_act
from rekindle.pytorch.online._undo import Undo
from rekindle.pytorch.operators import (
    COMPILED,
    COUNT_BYTES,
    PLAIN_TENSORS,
    Invocation,
    Operator,
    Positions,
    Signature,
    bytes_of_dynamic,
    check_higher_order,
    recomputed_in_a_graph,
    region_of,
    signature_of,
    tensors_in,
)
from rekindle.pytorch.operators import operator as operator_of
from rekindle.pytorch.tensors import (
    COUNTERS,
    EXOTIC,
    FOREIGN,
    NOTICED,
    UNSEEN,
    Memory,
    geometry_of,
    privately,
    site,
    unread,
    version_of,
)


@final
class Runtime:
    """Everything that belongs to one `rekindle.budget(...)`. Lives as long as its last handle."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        leaves.come_back_for(self)
        self._events = EventPrices() if is_accelerator(driver.device) else None
        self._look_back_at = LONGEST_CHAIN  #: storages made until then
        self.never_recompute = 0  #: depth of `rekindle.never_recompute()`
        #: While an optimizer's step runs unseen: what is to be called if it failed.
        self.interrupted: Callable[[], None] | None = None
        self.without_grad = False  #: what is made with grad mode off has recipes as well
        self._positions = Positions()
        self._no_recipes = 1  # for how many reasons it has none

    # -- operators ------------------------------------------------------------------------------

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of the program within the budget, and records how to run it again."""
        driver = self.driver
        engine = driver.engine
        with self.driver.lock:
            if driver.streams is not None:
                if accelerator.is_capturing():
                    return operator.func(*args, **kwargs)
                driver.streams.see()
            if driver.table.deaths or driver.table.released:
                driver.settle()
            if driver.capture is not None:
                driver.poll()  # a trace says when the program lets go, not when somebody asks
            func = operator.func
            if driver.work.thread:  # for an operator that waits for this thread
                return func(*args, **kwargs)
            if operator.foreign:
                func = partial(let_others_act, driver.lock, func)
            invocation = Invocation(operator, args, kwargs)
            place = None if driver.streams is None else driver.place_of(invocation.tensors)
            signature = invocation.signature = signature_of(operator, invocation.key, place)
            recording = (
                (
                    torch.is_grad_enabled()
                    or (
                        (self.without_grad or operator.differentiated)
                        and invocation.outside_grad_mode()
                    )
                )
                and not invocation.opaque
                and not operator.opaque
                and not self.never_recompute
                and not (operator.doubt and operator.may_differ(args, invocation.tensors))
            )
            if not recording and self._may_only_count(invocation):
                if driver.watcher is not None:
                    driver.watcher.meets(invocation)
                needed = signature.needed
                if not driver.stepping:
                    needed += signature.workspace
                if engine.memory + needed > engine.budget:
                    driver.make_room(needed, operator.name)
                if operator.random:
                    invocation.random = operator.drawn(
                        invocation.tensors, invocation.extras, kwargs
                    )
                try:
                    result = func(*args, **kwargs)
                except RuntimeError as out:
                    result = self._rescued(invocation, func, args, kwargs, out)
                made = None if operator.returns_written else result
                driver.count(signature, made)
                if engine.memory > engine.budget:  # more than anybody could know
                    driver.make_room(0, operator.name)
                return result
            if driver.storages_made > self._look_back_at:
                forget_history(driver)
                known = len(engine.storages)
                self._look_back_at = driver.storages_made + max(LONGEST_CHAIN, known)
            special = 0
            for tensor in invocation.tensors:
                storage = driver.known(tensor)
                special |= storage.payload.flags
                invocation.inputs.append(storage)
            if driver.watcher is not None:
                driver.watcher.meets(invocation)
            if operator.writes:
                find_written(driver, invocation, args, kwargs)
            if special:
                recording &= look_twice(driver, invocation)
            if operator.indexing and recording:
                keep_indices(driver, invocation)
            for storage in invocation.fixed:
                driver.forget(storage)
            needed = signature.needed
            if needed < 0:
                with privately():
                    needed = signature.predict(invocation.extras)
            if operator.counted_first:
                with privately():
                    exact = bytes_of_dynamic(operator, args)
                needed = needed if exact == sys.maxsize else exact
            if special & FOREIGN and recording:
                recording = with_private_inputs(driver, invocation, needed)
            inside = 0 if driver.stepping else signature.workspace
            if engine.memory + needed + inside > engine.budget:
                if operator.dynamic:
                    driver.make_room(COUNT_BYTES, operator.name)
                    needed = min(needed, bytes_of_dynamic(operator, args))
                driver.make_room(needed + inside, operator.name)
            if driver.workspaces is not None and not (signature.watched or signature.priced):
                driver.clear(needed + driver.workspaces.guess(signature))
            if operator.random:  # R5
                invocation.random = operator.drawn(invocation.tensors, invocation.extras, kwargs)
            try:
                try:
                    if signature.priced:
                        result = func(*args, **kwargs)
                    else:
                        result = self._priced(signature, func, args, kwargs)
                except RuntimeError as out:
                    result = self._rescued(invocation, func, args, kwargs, out)
            except BaseException:
                if invocation.written:  # a part of it, maybe: what is there is what counts
                    written_over(driver, invocation, False, hidden=True)
                raise
            if invocation.random and recording:  # no budget counts what a recipe keeps
                note = self._positions.note
                invocation.noted = tuple((of, note(state)) for of, state in invocation.random)
            register(driver, invocation, recording, result)
            if engine.memory > engine.budget and not operator.writes:
                driver.make_room(0, operator.name)  # more than anybody could know
            return result

    def run_whole(
        self, higher: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a higher-order operator, which shows nothing of what it does: its results are kept,
        and counted when they are there. But compiled code is an operator like any other (R12)."""
        if higher.name() == COMPILED:
            region: Any = region_of(args[0])  # says of itself what an `Operator` does
            arguments = tuple(args[1])
            args[1].clear()  # PyTorch's way to let go of them
            with torch.set_grad_enabled(region.training):
                return self.run(region, arguments, {})
        check_higher_order(higher)
        result = higher(*args, **kwargs)
        for tensor in tensors_in(result):
            self.driver.meet(tensor)
        return result

    def set_memory(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `set_`: a tensor moves to other memory, which maybe no operator made, as that of a
        batch from another process."""
        driver = self.driver
        driver.known(args[0]).payload.version = -1  # its counter moves, but what is there does not
        source = kwargs.get("source", args[1] if len(args) > 1 else None)
        home = source.untyped_storage() if isinstance(source, Tensor) else source
        if home is None or driver.table.watch_at(home._cdata) is not None:
            return operator.func(*args, **kwargs)
        with driver.lock:
            driver.settle()
            driver.make_room(driver.counted(home), "a tensor of yours")
            result = operator.func(*args, **kwargs)
            driver.known(result).payload.version = -1  # autograd counts this write afterwards
        return result

    def record_without_grad(self, record: bool) -> None:
        """One reason less, or one more, that what is made with grad mode off has no recipe."""
        self._no_recipes += -1 if record else 1
        self.without_grad = not self._no_recipes

    def mark(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A range of the profiler begins or ends: nothing to do here."""
        return operator.func(*args, **kwargs)

    def not_of_the_program(self) -> AbstractContextManager[Any]:
        """Inside, a mode of our own has what operators do; without one they would be seen."""
        return nullcontext()

    def unseen(self, func: Any, *args: Tensor) -> Tensor:
        """Runs an operator of our own, whose result stays and counts."""
        self.never_recompute += 1
        try:
            with torch.no_grad():
                return self.run(operator_of(func), args, {})
        finally:
            self.never_recompute -= 1

    def undo(self, optimizer: Any, *, copies: bool) -> Undo:
        """Puts back what a step of `optimizer` writes, if it fails."""
        return Undo(self, optimizer, copies=copies)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer made a step: one step of the program is over."""
        self.driver.owners.optimizers.add(optimizer)
        if self.driver.watcher is not None:
            self.driver.watcher.step()
        driver = self.driver
        driver.steps.over(driver.evictions, driver.recomputations, driver.lost_ns)

    def _may_only_count(self, invocation: Invocation) -> bool:
        """Whether the bytes and the time of a call that is not recorded are all that matters.

        So it is unless it writes what recipes read or made, or reads what needs a second look; and
        unless everything is written down. What it makes becomes a source when somebody reads it
        for a recipe, or saves it. Sources that it may write and nothing was made from need no
        recipe saved first (R4), only their version is not known any more.
        """
        signature, driver = invocation.signature, self.driver
        if not (signature.ordinary and signature.priced) or driver.capture is not None:
            return False
        writes = invocation.operator.writes
        for tensor in invocation.tensors:
            watch = driver.table.watch_at(tensor.untyped_storage()._cdata)
            storage = driver.known(tensor) if watch is None else watch.storage
            if storage is None:
                continue
            memory: Memory = storage.payload
            if memory.flags & ~FOREIGN or (writes and not unread(storage)):
                return False
            if writes:
                memory.version = -1
                note_if_it_strays(driver, tensor)
        return True

    def _priced(
        self,
        signature: Signature,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the operator, takes the time, and asks what it took inside itself."""
        workspaces = self.driver.workspaces
        if workspaces is None:
            return self._timed(signature, func, args, kwargs)
        return workspaces.watch(signature, lambda: self._timed(signature, func, args, kwargs))

    def _timed(
        self,
        signature: Signature,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._events is not None:
            return self._events.run(signature, func, args, kwargs)
        started = perf_counter_ns()
        result = func(*args, **kwargs)
        signature.sample(perf_counter_ns() - started)
        return result

    def _rescued(
        self,
        invocation: Invocation,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: RuntimeError,
    ) -> Any:
        """What the operator gives when it is called once more, with less in memory, if that is
        what it is short of."""
        if not (is_full(out) and invocation.operator.starts_anew):
            raise out

        def again() -> Any:
            for generator, state in invocation.random:
                generator.set_state(state)
            return func(*args, **kwargs)

        return self.driver.rescue(again, out, invocation.signature.needed)

    # -- autograd -------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of `tensor` (R1)."""
        if self.interrupted is not None:
            self.interrupted()
        with self.driver.lock, unwatched():
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                return kept(tensor)
            if self._is_capturing():
                return kept(tensor)
            if self.driver.table.deaths or self.driver.table.released:
                self.driver.settle()
            if self.driver.resort is not None:
                self.driver.resort.bring_back(tensor)
            storage = self.driver.known(tensor)
            memory: Memory = storage.payload
            if memory.flags:
                if memory.flags & EXOTIC:
                    return kept(tensor)
                if memory.flags & UNSEEN:
                    self.driver.seal(storage)
                    memory.flags &= ~UNSEEN
            geometry = geometry_of(tensor)
            if memory.owned is None:
                memory.owned = tensor.untyped_storage()
            if memory.alias is None or memory.aliased is not geometry:
                memory.aliased = geometry
                with privately():
                    memory.alias = tensor.detach()
            self.driver.retain(storage)
            note_if_it_strays(self.driver, tensor)
            origin = memory.program_tensor()
            unknown = origin is None and memory.flags & COUNTERS  # there are several counters
            if memory.witness is None and not (storage.replayable or unknown):
                memory.witness = with_counter_of(tensor if origin is None else origin)
                if origin is None:  # another counter from now on
                    memory.version = version_of(memory.witness)
            version = memory.current_version()
            if memory.version < 0:
                memory.version = max(0, version)
            handle = Handle(self.driver.table.released, storage, geometry, version)
            if origin is tensor:
                handle.saved = memory.origin
                if not tensor.requires_grad and _has_attributes(tensor):
                    handle.kept = tensor
            if memory.flags & COUNTERS:
                handle.witness = witness = with_counter_of(tensor)
                handle.version = witness._version
            return handle

    def unpack(self, handle: Any) -> Tensor:
        """The tensor that `handle` stands for, brought back if need be."""
        with self.driver.lock, unwatched():
            if type(handle) is not Handle:
                return unpack_kept(handle)
            if self.driver.table.deaths or self.driver.table.released:
                self.driver.settle()
            storage = handle.current()
            memory: Memory = storage.payload
            self._check_version(handle, storage)
            moved = handle.moved(storage)
            if moved is not None:
                return moved
            if storage.replayable or not storage.held:
                if not storage.resident and self._is_capturing():
                    raise recomputed_in_a_graph(site(storage))
                self.driver.use(storage)
            if handle.kept is not None:
                return handle.kept
            home = memory.home()
            alias = memory.alias if memory.aliased is handle.geometry else None
            # What a node writes there others are to notice: it shares the counter that they ask.
            counted = handle.witness
            with privately():
                if alias is None or home.nbytes() != memory.size:
                    alias = handle.geometry.of(home)
                    counted = counted if counted is not None else memory.counted()
                    if counted is None and handle.version >= 0:
                        count_from(alias, handle.version)
                if counted is None:
                    return alias.detach()
                lent = counted.detach()
                lent.data = alias
                return lent

    def _is_capturing(self) -> bool:
        """Whether the device writes a graph: nothing that it is told happens now."""
        return self.driver.streams is not None and accelerator.is_capturing()

    def _check_version(self, handle: Handle, storage: Storage) -> None:
        """Autograd's own check is off under hooks (R7)."""
        memory: Memory = storage.payload
        witness = handle.witness
        now = memory.current_version() if witness is None else witness._version
        noticed = memory.overwritten or (witness is None and memory.flags & NOTICED)
        if noticed or (handle.version >= 0 and now not in (-1, handle.version)):
            geometry = handle.geometry
            raise modified(geometry.dtype, geometry.size, site(storage), now, handle.version)


def _has_attributes(tensor: Tensor) -> bool:
    """Whether there is more to a tensor that needs no gradient than its values."""
    return type(tensor) is not Tensor or bool(tensor.__dict__)
