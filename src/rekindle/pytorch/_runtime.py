"""The online driver: what PyTorch does becomes events of the engine, its actions are performed.

The rules are those of the design (R1 to R12); code that serves one names it. The mechanism: a
dispatch mode sees every operator and records recipes, saved-tensor hooks give autograd handles in
the place of tensors. The runtime owns the memory behind handles, so dropping it frees it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any, final

import torch
from torch import Tensor

from rekindle._types import Bytes, OpId, StorageId
from rekindle.engine import Call, Engine, NoRoom, Storage, Value
from rekindle.policies import Policy
from rekindle.pytorch._capture import Capture
from rekindle.pytorch._explain import Snapshot, out_of_budget, snapshot
from rekindle.pytorch._handle import Handle
from rekindle.pytorch._memory import EXOTIC, UNWRITTEN, ZEROED, Memory, Table, version_of
from rekindle.pytorch._operators import Operator
from rekindle.pytorch._replay import Recipe, generator_of, run_again
from rekindle.pytorch._signature import (
    PLAIN_TENSORS,
    Arguments,
    Signature,
    geometry_of,
    signature_of,
    tensors_in,
)
from rekindle.schedule import Action, Compute, Free, Recorder


@final
class Runtime:
    """Everything that belongs to one `rekindle.budget(...)`. Lives as long as its last handle."""

    def __init__(self, budget: Bytes | None, policy: Policy, device: torch.device) -> None:
        self.engine = Engine(budget, policy)
        self.table = Table()
        self.device = device
        self.lock = threading.RLock()
        self.busy = False  #: operators run now are the runtime's own
        self.never_recompute = 0  #: depth of `rekindle.never_recompute()`
        self.evictions = 0  #: of what somebody may still ask for
        self.recomputations = 0
        self.recorder: Recorder | None = None
        self.capture: Capture | None = None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  #: those that made a step inside
        self.at_peak = Snapshot()
        self._held: dict[Storage, None] = {}  #: replayable, and maybe kept by the program (R1)
        self._next_op = 0
        self._next_storage = 0

    # -- operators ------------------------------------------------------------------------------

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of the program within the budget, and records how to run it again."""
        with self.lock:
            if self.table.deaths or self.table.released:
                self._settle_deaths()
            arguments = Arguments(operator, args, kwargs)
            signature = signature_of(operator, arguments.key)
            inputs = [self._known(tensor) for tensor in arguments.tensors]
            recording = (
                torch.is_grad_enabled()
                and not arguments.opaque
                and not operator.opaque
                and not self.never_recompute
            )
            written = self._written(operator, arguments, inputs, args, kwargs)
            if any(storage.payload.flags for storage in inputs):
                recording &= self._look_twice(operator, arguments, inputs, written)
            if operator.indexing and recording:
                self._keep_indices(arguments, inputs)
            fixed = [inputs[p] for p in written if not inputs[p].replayable and inputs[p].consumers]
            if fixed:  # R4
                self._poll()
                for storage in fixed:
                    self._perform(self.engine.forget(storage))
            needed = signature.needed
            if needed < 0:
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    needed = signature.predict(arguments.extras)
            if self.engine.memory + needed > self.engine.budget:
                self._make_room(needed, operator)
            random = None
            if operator.random and recording:  # R5
                generator = generator_of(arguments.tensors, arguments.extras)
                random = (generator, generator.get_state())
            started = perf_counter_ns()
            result = operator.func(*args, **kwargs)
            if not signature.priced():
                signature.sample(started)
            self._register(
                operator, arguments, signature, inputs, written, fixed, random, recording, result
            )
            return result

    def _written(
        self,
        operator: Operator,
        arguments: Arguments,
        inputs: list[Storage],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[int, ...]:
        """Which of the tensors the operator writes; hidden writes too (R3, R6)."""
        targets: list[Tensor] = []
        if operator.statistics:
            targets += [args[p] for p in operator.written_statistics(args) if args[p] is not None]
        else:
            for position, name in operator.written:
                target = args[position] if position < len(args) else kwargs.get(name)
                targets += tensors_in(target)
        if not targets:
            return ()
        identities = {id(target) for target in targets}
        return tuple(
            position
            for position, tensor in enumerate(arguments.tensors)
            if id(tensor) in identities
        )

    def _look_twice(
        self,
        operator: Operator,
        arguments: Arguments,
        inputs: list[Storage],
        written: tuple[int, ...],
    ) -> bool:
        """Whether the call may be recorded although an input is special (R4)."""
        may_record = True
        for position, storage in enumerate(inputs):
            flags: int = storage.payload.flags
            if flags & EXOTIC:
                may_record = False
            if not flags & (UNWRITTEN | ZEROED):
                continue
            reads = position not in written or not operator.overwriting
            covers = geometry_of(arguments.tensors[position]).span == storage.nbytes
            if flags & UNWRITTEN and (reads or not covers):
                self._seal(storage)  # what is in there came from where nobody saw it
            elif flags & ZEROED and position not in written:
                self._seal(storage)
            storage.payload.flags &= ~(UNWRITTEN | ZEROED)
        return may_record

    def _seal(self, storage: Storage) -> None:
        if self.capture is not None:
            self.capture.sealed(storage)
        self._perform(self.engine.seal(storage))

    def _keep_indices(self, arguments: Arguments, inputs: list[Storage]) -> None:
        """Masks and indices that decide a shape are decided once (R8)."""
        for tensor, storage in zip(arguments.tensors, inputs, strict=True):
            if not tensor.dtype.is_floating_point and storage.replayable and not storage.pinned:
                self._pin(storage)

    def _pin(self, storage: Storage) -> None:
        if self.capture is not None:
            self.capture.pinned(storage)
        self._perform(self.engine.pin(storage.values[0]))
        self._held.pop(storage, None)

    def _register(
        self,
        operator: Operator,
        arguments: Arguments,
        signature: Signature,
        inputs: list[Storage],
        written: tuple[int, ...],
        fixed: list[Storage],
        random: Any,
        recording: bool,
        result: Any,
    ) -> None:
        fresh: list[tuple[int, Tensor, torch.UntypedStorage, int]] = []
        for position, tensor in enumerate(tensors_in(result)):
            if tensor.layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
                continue
            home = tensor.untyped_storage()
            address = home._cdata
            if self.table.find(address) is None and all(address != f[3] for f in fresh):
                fresh.append((position, tensor, home, address))
        accounted = False
        if written:
            accounted = self._written_over(
                operator, arguments, signature, inputs, written, fixed, random, recording
            )
            if fresh:  # results beside what was written: the call cannot be run again for them
                recording &= operator.statistics
        positions = tuple(position for position, *_ in fresh)
        if signature.fresh is None:
            signature.learn(positions, sum(home.nbytes() for _, _, home, _ in fresh))
        if not fresh:
            if not accounted:
                self._admit(self._call(operator, signature, False))
            return
        # Not the same results as last time: it does not depend on its arguments alone.
        exotic = any(geometry_of(tensor).exotic for _, tensor, _, _ in fresh)
        recording &= signature.fresh == positions and not exotic
        call = self._call(operator, signature, recording)
        if accounted:
            call.cost = 0
        if recording:
            dropped = written if operator.statistics else ()
            self._link(call, arguments, inputs, dropped)
            call.payload = Recipe(signature, arguments.extras, (), dropped, random)
        flags = UNWRITTEN if operator.empty else ZEROED if operator.zeros else 0
        for _, tensor, home, address in fresh:
            storage = self._new_storage(call, self._counted(home), operator.name)
            memory: Memory = storage.payload
            memory.origin = weakref.ref(tensor)
            memory.flags = flags
            if exotic:
                memory.flags |= EXOTIC
            if operator.routing and not tensor.dtype.is_floating_point:
                storage.pinned = True  # R8
            self.table.settle(storage, home, address)
        self._admit(call)

    def _written_over(
        self,
        operator: Operator,
        arguments: Arguments,
        signature: Signature,
        inputs: list[Storage],
        written: tuple[int, ...],
        fixed: list[Storage],
        random: Any,
        recording: bool,
    ) -> bool:
        """The values that were written are other values now (R3).

        A source that nothing was made from just stays a source.

        Returns whether the engine was told of a call.
        """
        changed = {inputs[p]: p for p in reversed(written)}
        replaced = [storage for storage in changed if storage.replayable or storage in fixed]
        for storage in changed:
            if storage not in replaced:
                storage.payload.version = -1
                if operator.resizes:
                    self._resized(storage)
        if not replaced:
            return False
        recording = recording and all(storage.replayable for storage in changed)
        call = self._call(operator, signature, recording)
        overwrites: list[tuple[Value, Value]] = []
        for old in sorted(replaced, key=lambda storage: changed[storage]):
            new = self._new_storage(call, old.nbytes, operator.name)
            overwrites.append((new.values[0], old.values[0]))
            new.payload.flags = ZEROED if operator.zeros else 0
        call.overwrites = overwrites
        if recording:
            self._link(call, arguments, inputs, ())
            targets = tuple(sorted(changed.values()))
            call.payload = Recipe(signature, arguments.extras, targets, (), random)
        for output, source in overwrites:
            target = arguments.tensors[changed[source.storage]]
            self._move(source.storage, output.storage, target, hidden=operator.statistics)
        self._admit(call)
        for output, _ in overwrites:
            if operator.resizes:
                self._resized(output.storage)
        return True

    def _move(self, old: Storage, new: Storage, target: Tensor, *, hidden: bool) -> None:
        """`new` is where `old` was. Handles of `old` follow if no version counter noticed (R7)."""
        before: Memory = old.payload
        after: Memory = new.payload
        self.table.succeed(old, new)
        self._held.pop(old, None)
        after.origin, after.version = before.origin, -1
        origin = before.origin() if before.origin is not None else None
        if not hidden and (origin is None or _share_version(origin, target)):
            before.overwritten = True
            after.owned = None
        else:  # .data or running statistics: plain PyTorch computes with what is there now
            before.successor = new
            if self.capture is not None:
                for _ in range(old.references):
                    self.capture.retained(new)
                    self.capture.released(old)
            new.references, old.references = old.references, 0
            if not new.references:
                after.owned = None

    def _resized(self, storage: Storage) -> None:
        memory: Memory = storage.payload
        self.engine.resize(storage, self._counted(memory.home()))

    def _call(self, operator: Operator, signature: Signature, replayable: bool) -> Call:
        self._next_op += 1
        return Call(OpId(self._next_op - 1), operator.name, signature.cost, (), replayable)

    def _new_storage(self, call: Call, nbytes: Bytes, site: str) -> Storage:
        storage = call.makes(StorageId(self._next_storage), nbytes).storage
        self._next_storage += 1
        storage.payload = memory = Memory()
        memory.site = site
        return storage

    def _link(
        self, call: Call, arguments: Arguments, inputs: list[Storage], dropped: tuple[int, ...]
    ) -> None:
        """What a recipe reads must stay what it is, and sources must stay at all."""
        call.inputs = kept = []
        now = self.engine.clock
        for position, storage in enumerate(inputs):
            storage.last_access = now
            if position in dropped:
                continue
            kept.append(storage.values[0])
            memory: Memory = storage.payload
            if memory.version < 0:
                memory.version = max(0, memory.current_version())
            if memory.owned is None and not storage.replayable:
                memory.owned = arguments.tensors[position].untyped_storage()

    def _admit(self, call: Call) -> None:
        if self.engine.memory > 1.02 * self.at_peak.memory:
            self.at_peak = snapshot(self.engine, self.table, self.optimizers)
        if self.capture is not None:
            self.capture.called(call)
        if self.recorder is not None:
            first = Compute(call.id, in_place=bool(call.overwrites))
            self.recorder.acted(first, self.engine.clock, self.engine.memory)
        for storage in self.engine.admit(call, held=True):
            self._let_go(storage)
        for storage in call.made:
            if storage.replayable:
                self._held[storage] = None

    # -- tensors --------------------------------------------------------------------------------

    def meet(self, tensor: Tensor) -> None:
        """A view of `tensor` is made, which costs nothing; but its memory counts from now on."""
        if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
            home = tensor.untyped_storage()
            if self.table.find(home._cdata) is None:
                with self.lock:
                    self._settle_deaths()
                    self._adopt(tensor, home)

    def _known(self, tensor: Tensor) -> Storage:
        """The engine's storage of `tensor`; one that was never seen is a source."""
        home = tensor.untyped_storage()
        found = self.table.find(home._cdata)
        return found if found is not None else self._adopt(tensor, home)

    def _adopt(self, tensor: Tensor, home: torch.UntypedStorage) -> Storage:
        counted = self._counted(home)
        if self.engine.memory + counted > self.engine.budget:
            self._make_room(counted, None)
        call = Call(OpId(self._next_op), "source", 0, (), replayable=False)
        self._next_op += 1
        storage = self._new_storage(call, counted, "source")
        memory: Memory = storage.payload
        origin = tensor if tensor._base is None else tensor._base
        memory.origin = weakref.ref(origin)
        memory.version = version_of(origin)
        if geometry_of(tensor).exotic:
            memory.flags |= EXOTIC
        self.table.settle(storage, home, home._cdata)
        self._admit(call)
        return storage

    def _counted(self, home: torch.UntypedStorage) -> Bytes:
        """Bytes of `home` as far as they are on the device that the budget is for."""
        return home.nbytes() if home.device.type == self.device.type else 0

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of `tensor` (R1)."""
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return tensor
        with self.lock:
            if self.table.deaths or self.table.released:
                self._settle_deaths()
            storage = self._known(tensor)
            memory: Memory = storage.payload
            if memory.flags:
                if memory.flags & EXOTIC:
                    return tensor
                self._seal(storage)
                memory.flags = 0
            if memory.owned is None:
                memory.owned = tensor.untyped_storage()
            if self.capture is not None:
                self.capture.retained(storage)
            self.engine.retain(storage)
            version = memory.current_version()
            if memory.version < 0:
                memory.version = max(0, version)
            return Handle(self.table.released, storage, geometry_of(tensor), version)

    def unpack(self, handle: Any) -> Tensor:
        """The tensor that `handle` stands for, brought back if need be."""
        if type(handle) is not Handle:
            return handle
        with self.lock:
            if self.table.deaths or self.table.released:
                self._settle_deaths()
            storage = handle.current()
            memory: Memory = storage.payload
            self._check_version(handle, memory)
            if storage.replayable:
                if not storage.resident:
                    self._poll()
                if self.capture is not None:
                    self.capture.used(storage)
                self._perform(self.engine.use(storage.values[0]))
                self._held[storage] = None
            assert memory.owned is not None
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                return handle.geometry.of(memory.owned)

    def _check_version(self, handle: Handle, memory: Memory) -> None:
        """Autograd's own check is off under hooks (R7)."""
        now = memory.current_version()
        if memory.overwritten or (handle.version >= 0 and now not in (-1, handle.version)):
            shape = list(handle.geometry.size)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{handle.geometry.dtype} {shape}], which is output of "
                f"{memory.site}, is at version {now}; expected version {handle.version} instead. "
                "Hint: enable anomaly detection to find the operation that failed to compute its "
                "gradient, with torch.autograd.set_detect_anomaly(True)."
            )

    # -- memory ---------------------------------------------------------------------------------

    def _make_room(self, needed: Bytes, operator: Operator | None) -> None:
        self._poll()
        self._perform(self.engine.make_room(needed), operator)

    def _poll(self) -> None:
        """Finds out which values the program has let go of; dead ones have told so themselves."""
        for storage in list(self._held):
            if storage.references and not self.table.is_held(storage):
                self._drop(storage)

    def _settle_deaths(self) -> None:
        """Acts on what happened meanwhile: handles that died, memory that is gone."""
        deaths, released = self.table.deaths, self.table.released
        while deaths or released:
            if released:
                self._release(released.popleft())
                continue
            death = deaths.popleft()
            storage = death.storage
            if storage.payload.watch is death:
                self.table.vacate(storage)
                self._drop(storage)
            self._let_go_of_idle()

    def _drop(self, storage: Storage) -> None:
        self._held.pop(storage, None)
        if self.capture is not None:
            self.capture.dropped(storage)
        self._perform(self.engine.drop(storage))

    def _release(self, storage: Storage) -> None:
        while storage.payload.successor is not None:
            storage = storage.payload.successor
        if self.capture is not None:
            self.capture.released(storage)
        self._perform(self.engine.release(storage))
        needed = storage.references or (storage.consumers and not storage.replayable)
        if storage.held and not needed:
            storage.payload.owned = None  # the program alone keeps it, or nobody
        self._let_go_of_idle()

    def _let_go_of_idle(self) -> None:
        idle = self.engine.idle
        while idle:
            storage = idle.pop()
            if not storage.references and not storage.consumers:
                storage.payload.owned = None

    # -- actions --------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action], operator: Operator | None = None) -> None:
        iterator = iter(actions)
        while True:
            try:
                action = next(iterator, None)
            except NoRoom as shortage:
                name = operator.name if operator else shortage.call.name if shortage.call else ""
                raise out_of_budget(
                    shortage, self.engine, self.table, self.optimizers, name
                ) from None
            if action is None:
                return
            subject = self.engine.subject
            if type(action) is Compute:
                assert isinstance(subject, Call)
                self._compute(subject, action.in_place)
                self.recomputations += 1
            else:
                assert isinstance(subject, Storage)
                self.evictions += not subject.dead
                self._let_go(subject)
                continue
            if self.recorder is not None:
                self.recorder.acted(action, self.engine.clock, self.engine.memory)

    def _let_go(self, storage: Storage) -> None:
        self.table.vacate(storage)
        self._held.pop(storage, None)
        if self.recorder is not None:
            self.recorder.acted(Free(storage.id), self.engine.clock, self.engine.memory)

    def _compute(self, call: Call, in_place: bool) -> None:
        busy, self.busy = self.busy, True
        try:
            tensors = run_again(call, in_place=in_place)
        finally:
            self.busy = busy
        if in_place:
            for (output, source), _ in zip(call.overwrites, tensors, strict=True):
                self.table.succeed(source.storage, output.storage)
            return
        for tensor, storage in zip(tensors, call.made, strict=True):
            if not storage.resident:
                home = tensor.untyped_storage()
                memory: Memory = storage.payload
                memory.owned = home
                memory.origin = None
                memory.version = 0
                self.table.settle(storage, home, home._cdata)

    def keep(self, tensor: Tensor) -> None:
        """The memory of `tensor` is never let go."""
        with self.lock:
            self._settle_deaths()
            storage = self._known(tensor)
            self._pin(storage)


def _share_version(origin: Tensor, target: Tensor) -> bool:
    """Whether a write through `target` moves the version counter of `origin`.

    Views have the counter of their base, `.data` has its own. `detach()` shares it and shows in no
    attribute: a step of the one that moves the other does.
    """
    if target is origin or target._base is origin:
        return True
    version, before = target._version, origin._version
    torch._C._increment_version([target])  # type: ignore[attr-defined]
    shared = origin._version != before
    torch._C._autograd._unsafe_set_version_counter((target,), (version,))  # type: ignore[attr-defined]
    return shared
