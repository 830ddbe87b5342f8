"""What operators and autograd do under a budget becomes events of the engine.

The rules are those of the design (R1 to R12); code that serves one names it. The mechanism: a
dispatch mode sees every operator and records recipes, saved-tensor hooks give autograd handles in
the place of tensors. The runtime owns the memory behind handles, so dropping it frees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from rekindle.engine import Call, Storage, Value
from rekindle.pytorch.online._cuda import EventPrices
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._handle import Handle, kept, modified, with_counter_of
from rekindle.pytorch.online._history import LONGEST_CHAIN
from rekindle.pytorch.operators import (
    COMPILED,
    COUNT_BYTES,
    PLAIN_TENSORS,
    STRIDED,
    UNTAGGED_RANDOM,
    Invocation,
    Operator,
    Recipe,
    Signature,
    bytes_of_dynamic,
    check_higher_order,
    generator_of,
    region_of,
    signature_of,
    tensors_in,
    written_by,
)
from rekindle.pytorch.tensors import (
    COUNTERS,
    EXOTIC,
    NOTICED,
    UNWRITTEN,
    ZEROED,
    Memory,
    Table,
    geometry_of,
    is_exotic,
    share_version,
    site,
    unread,
    version_of,
)


@final
class Runtime:
    """Everything that belongs to one `rekindle.budget(...)`. Lives as long as its last handle."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._events = EventPrices() if driver.device.type == "cuda" else None
        self._look_back_at = LONGEST_CHAIN  #: storages made until then
        self.never_recompute = 0  #: depth of `rekindle.never_recompute()`
        #: While an optimizer's step runs unseen: what is to be called if it failed.
        self.interrupted: Callable[[], None] | None = None
        self.without_grad = False  #: what is made with grad mode off has recipes as well

    # -- operators ------------------------------------------------------------------------------

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of the program within the budget, and records how to run it again."""
        driver = self.driver
        engine = driver.engine
        with self.driver.lock:
            if driver.table.deaths or driver.table.released:
                driver.settle()
            if driver.capture is not None:
                driver.poll()  # a trace says when the program lets go, not when somebody asks
            invocation = Invocation(operator, args, kwargs)
            signature = invocation.signature = signature_of(operator, invocation.key)
            recording = (
                (torch.is_grad_enabled() or (self.without_grad and invocation.outside_grad_mode()))
                and not invocation.opaque
                and not operator.opaque
                and not self.never_recompute
            )
            if not recording and self._may_only_count(invocation):
                if driver.watcher is not None:
                    driver.watcher.meets(signature)
                if engine.memory + signature.needed > engine.budget:
                    driver.make_room(signature.needed, operator.name)
                try:
                    result = operator.func(*args, **kwargs)
                except torch.OutOfMemoryError as out:
                    result = driver.rescue(partial(operator.func, *args, **kwargs), out)
                made = None if operator.returns_written else result
                driver.count(operator.name, signature.cost, made)
                return result
            if driver.storages_made > self._look_back_at:
                driver.forget_history()
                known = sum(1 for _ in engine.storages)
                self._look_back_at = driver.storages_made + max(LONGEST_CHAIN, known)
            special = 0
            for tensor in invocation.tensors:
                storage = driver.known(tensor)
                special |= storage.payload.flags
                invocation.inputs.append(storage)
            if driver.watcher is not None:
                driver.watcher.meets(signature)
            if operator.writes:
                self._find_written(invocation, args, kwargs)
            if special:
                recording &= self._look_twice(invocation)
            if operator.indexing and recording:
                self._keep_indices(invocation)
            for storage in invocation.fixed:
                driver.forget(storage)
            needed = signature.needed
            if needed < 0:
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    needed = signature.predict(invocation.extras)
            if engine.memory + needed > engine.budget:
                if operator.dynamic:
                    driver.make_room(COUNT_BYTES, operator.name)
                    needed = min(needed, bytes_of_dynamic(operator, args))
                driver.make_room(needed, operator.name)
            if operator.random and recording:  # R5
                device = kwargs.get("device")
                generator = generator_of(invocation.tensors, invocation.extras, device)
                invocation.random = (generator, generator.get_state())
            try:
                if signature.priced:
                    result = operator.func(*args, **kwargs)
                else:
                    result = self._priced(signature, args, kwargs)
            except torch.OutOfMemoryError as out:
                result = driver.rescue(partial(operator.func, *args, **kwargs), out)
            except BaseException:
                if invocation.written:  # a part of it, maybe: what is there is what counts
                    self._written_over(invocation, False, hidden=True)
                raise
            self._register(invocation, recording, result)
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
        if home is None or driver.table.lives(home._cdata):
            return operator.func(*args, **kwargs)
        with driver.lock:
            driver.settle()
            driver.make_room(driver.counted(home), "a tensor of yours")
            result = operator.func(*args, **kwargs)
            driver.known(result).payload.version = -1  # autograd counts this write afterwards
        return result

    def stepped(self, optimizer: Any) -> None:
        """An optimizer made a step: one step of the program is over."""
        self.driver.optimizers.add(optimizer)
        if self.driver.watcher is not None:
            self.driver.watcher.step()

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
            watch = driver.table.watches.get(tensor.untyped_storage()._cdata)
            storage = driver.known(tensor) if watch is None else watch.storage
            if storage is None:
                continue
            memory: Memory = storage.payload
            if memory.flags or (writes and not unread(storage)):
                return False
            if writes:
                memory.version = -1
        return True

    def _priced(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operator and takes the time."""
        func = signature.operator.func
        if self._events is not None:
            return self._events.run(signature, func, args, kwargs)
        started = perf_counter_ns()
        result = func(*args, **kwargs)
        signature.sample(perf_counter_ns() - started)
        return result

    def _find_written(
        self, invocation: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Which of the tensors the operator writes; hidden writes too (R3, R6)."""
        operator = invocation.operator
        identities = {id(target) for target in written_by(operator, args, kwargs)}
        for position, tensor in enumerate(invocation.tensors):
            if id(tensor) in identities:
                invocation.written += (position,)
                storage = invocation.inputs[position]
                if not storage.replayable and storage.consumers:
                    invocation.fixed += (storage,)

    def _look_twice(self, invocation: Invocation) -> bool:
        """Whether the call may be recorded although an input is special (R4)."""
        may_record = True
        for position, storage in enumerate(invocation.inputs):
            flags: int = storage.payload.flags
            if flags & EXOTIC:
                may_record = False
            if not flags & (UNWRITTEN | ZEROED):
                continue
            written = position in invocation.written
            reads = not written or not invocation.operator.overwriting
            covers = geometry_of(invocation.tensors[position]).span == storage.nbytes
            if flags & UNWRITTEN and (reads or not covers):
                self.driver.seal(storage)  # what is in there came from where nobody saw it
            elif flags & ZEROED and not written:
                self.driver.seal(storage)
            storage.payload.flags &= ~(UNWRITTEN | ZEROED)
        return may_record

    def _keep_indices(self, invocation: Invocation) -> None:
        """Masks and indices that decide a shape are decided once (R8)."""
        for tensor, storage in zip(invocation.tensors, invocation.inputs, strict=True):
            if not tensor.dtype.is_floating_point and storage.replayable and not storage.pinned:
                self.driver.pin(storage)

    def _register(self, invocation: Invocation, recording: bool, result: Any) -> None:
        """Tells the engine what the operator made, and how it can be made again."""
        driver = self.driver
        operator, signature = invocation.operator, invocation.signature
        made = _made_by(driver.table, result)
        positions = tuple([position for position, _, _ in made])
        exotic = 0
        for _, tensor, _ in made:
            if is_exotic(tensor.dtype):
                exotic = EXOTIC
        if signature.fresh is None:
            nbytes = sum(home.nbytes() for _, _, home in made)
            signature.learn(positions, nbytes, exotic=bool(exotic))
        cost = signature.cost
        if invocation.written:
            if self._written_over(invocation, recording, hidden=operator.statistics):
                cost = 0  # the engine knows
            # Results beside what was written: the call cannot be run again for them.
            recording &= operator.statistics
        elif signature.fresh != positions:
            recording = False  # not the same as last time: it does not depend on arguments alone
        if operator.separating:
            invocation.inputs[0].payload.flags |= COUNTERS
        if not made:
            if cost:
                driver.account(operator.name, cost)
            return
        recording &= not exotic
        call = driver.new_call(operator.name, cost, recording)
        if recording:
            dropped = invocation.written  # running statistics
            self._link(call, invocation, dropped)
            call.payload = Recipe(invocation, (), dropped)
        for _, tensor, home in made:
            storage = driver.new_storage(call, driver.counted(home))
            memory: Memory = storage.payload
            memory.origin = weakref.ref(tensor)
            memory.flags = operator.content | exotic
            if operator.routing and not tensor.dtype.is_floating_point:
                storage.pinned = True  # R8
            driver.table.settle(storage, home, home._cdata)
        driver.admit(call)

    def _written_over(self, invocation: Invocation, recording: bool, *, hidden: bool) -> bool:
        """The values that were written are other values now (R3); `hidden`: no counter tells.

        A source that nothing was made from just stays a source. Returns whether the engine was told
        of a call.
        """
        driver = self.driver
        operator, signature = invocation.operator, invocation.signature
        changed = {invocation.inputs[p]: p for p in reversed(invocation.written)}
        replaced: list[tuple[int, Storage]] = []
        for storage, position in changed.items():
            memory: Memory = storage.payload
            # Whether handles are to notice, nobody could tell once the program's tensor is gone.
            unknown = storage.references and memory.witness is None
            if storage.replayable or unknown or storage in invocation.fixed:
                replaced.append((position, storage))
            else:
                memory.version = -1
                if operator.resizes:
                    driver.resized(storage)
        if not replaced:
            return False
        recording &= all(storage.replayable for storage in changed)
        call = driver.new_call(operator.name, signature.cost, recording)
        overwrites: list[tuple[Value, Value]] = []
        for position, old in sorted(replaced, key=lambda pair: pair[0]):
            new = driver.new_storage(call, old.nbytes)
            overwrites.append((new.values[0], old.values[0]))
            new.payload.flags = operator.content | (old.payload.flags & COUNTERS)
            untold = hidden or (operator.name in UNTAGGED_RANDOM and position > 0)
            self._move(old, new, invocation.tensors[position], hidden=untold)
        call.overwrites = overwrites
        if recording:
            self._link(call, invocation, ())
            targets = tuple(sorted(changed.values()))
            call.payload = Recipe(invocation, targets, ())
        driver.admit(call)
        if operator.resizes:
            for output, _ in overwrites:
                driver.resized(output.storage)
        return True

    def _move(self, old: Storage, new: Storage, target: Tensor, *, hidden: bool) -> None:
        """`new` is where `old` was. Handles of `old` follow if no version counter noticed (R7)."""
        before: Memory = old.payload
        after: Memory = new.payload
        self.driver.succeed(old, new)
        after.origin, after.witness, after.version = before.origin, before.witness, -1
        origin = before.counted()
        parts = before.flags & COUNTERS
        noticed = not hidden and (not parts if origin is None else share_version(origin, target))
        if noticed and not parts:
            before.overwritten = True
            after.disown()
        else:  # .data or running statistics: plain PyTorch computes with what is there now
            if noticed or before.flags & NOTICED:
                after.flags |= NOTICED
            before.successor = new
            self.driver.hand_over(old, new)

    def _link(self, call: Call, invocation: Invocation, dropped: tuple[int, ...]) -> None:
        """What a recipe reads must stay what it is, and sources must stay at all."""
        call.inputs = inputs = []
        now = self.driver.engine.clock
        for position, storage in enumerate(invocation.inputs):
            if position in dropped:
                continue
            inputs.append(storage.values[0])
            storage.last_access = now
            memory: Memory = storage.payload
            if memory.version < 0:
                memory.version = max(0, memory.current_version())
            at_home = memory.watch is not None  # not if this very call wrote over it
            if memory.owned is None and at_home and (storage.pinned or not storage.replayable):
                memory.owned = invocation.tensors[position].untyped_storage()

    # -- autograd -------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of `tensor` (R1)."""
        if self.interrupted is not None:
            self.interrupted()
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return kept(tensor)
        with self.driver.lock:
            if self.driver.table.deaths or self.driver.table.released:
                self.driver.settle()
            storage = self.driver.known(tensor)
            memory: Memory = storage.payload
            if memory.flags:
                if memory.flags & EXOTIC:
                    return kept(tensor)
                if memory.flags & (UNWRITTEN | ZEROED):
                    self.driver.seal(storage)
                    memory.flags &= ~(UNWRITTEN | ZEROED)
            geometry = geometry_of(tensor)
            if memory.owned is None:
                memory.owned = tensor.untyped_storage()
            if memory.alias is None or memory.aliased is not geometry:
                memory.aliased = geometry
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    memory.alias = tensor.detach()
            self.driver.retain(storage)
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
            if memory.flags & COUNTERS:
                handle.witness = witness = with_counter_of(tensor)
                handle.version = witness._version
            return handle

    def unpack(self, handle: Any) -> Tensor:
        """The tensor that `handle` stands for, brought back if need be."""
        if type(handle) is not Handle:
            tensor, version = handle
            if version_of(tensor) != version:
                raise modified(tensor.dtype, tensor.shape, "a tensor", tensor._version, version)
            return tensor
        with self.driver.lock:
            if self.driver.table.deaths or self.driver.table.released:
                self.driver.settle()
            storage = handle.current()
            memory: Memory = storage.payload
            self._check_version(handle, storage)
            moved = handle.moved(storage)
            if moved is not None:
                return moved
            if storage.replayable or not storage.held:
                self.driver.use(storage)
            home = memory.home()
            alias = memory.alias if memory.aliased is handle.geometry else None
            # What a node writes there others are to notice: it shares the counter that they ask.
            counted = handle.witness
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                if alias is None or home.nbytes() != storage.nbytes:
                    alias = handle.geometry.of(home)
                    counted = counted if counted is not None else memory.counted()
                if counted is None:
                    return alias.detach()
                lent = counted.detach()
                lent.data = alias
                return lent

    def _check_version(self, handle: Handle, storage: Storage) -> None:
        """Autograd's own check is off under hooks (R7)."""
        memory: Memory = storage.payload
        witness = handle.witness
        now = memory.current_version() if witness is None else witness._version
        noticed = memory.overwritten or (witness is None and memory.flags & NOTICED)
        if noticed or (handle.version >= 0 and now not in (-1, handle.version)):
            geometry = handle.geometry
            raise modified(geometry.dtype, geometry.size, site(storage), now, handle.version)


def _made_by(table: Table, result: Any) -> list[tuple[int, Tensor, torch.UntypedStorage]]:
    """The tensors in a result that have memory of their own, each with its position."""
    if type(result) is Tensor and result.layout is STRIDED:  # as nearly always
        home = result.untyped_storage()
        return [] if table.lives(home._cdata) else [(0, result, home)]
    made: list[tuple[int, Tensor, torch.UntypedStorage]] = []
    seen: list[int] = []
    for position, tensor in enumerate(tensors_in(result)):
        if type(tensor) in PLAIN_TENSORS and tensor.layout is STRIDED:
            home = tensor.untyped_storage()
            address = home._cdata
            if address not in seen and not table.lives(address):
                seen.append(address)
                made.append((position, tensor, home))
    return made
