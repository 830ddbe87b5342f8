"""What an operator made and wrote is told to the engine, with the recipe to make it again."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from rekindle.engine import Call, Storage, Value
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._handle import with_counter_of
from rekindle.pytorch.operators import (
    STRIDED,
    UNTAGGED_RANDOM,
    Invocation,
    Recipe,
    is_plain,
    tensors_in,
    written_by,
)
from rekindle.pytorch.tensors import (
    COUNTERS,
    EXOTIC,
    FOREIGN,
    NOTICED,
    UNSEEN,
    UNWRITTEN,
    ZEROED,
    Memory,
    Table,
    geometry_of,
    is_exotic,
    parts_of,
    share_version,
)


def note_if_it_strays(driver: Driver, tensor: Tensor) -> None:
    """`tensor` is saved, or written: if it is a view that `tensor.data = ...` gave memory of its
    own, the version counter of its base, which it still has, does not tell of the base alone."""
    base = tensor._base
    if base is None or not is_plain(type(base)) or base.layout is not STRIDED:
        return
    if base.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        driver.known(base).payload.strays = True


def find_written(
    driver: Driver, invocation: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Which of the tensors the operator writes; hidden writes too (R3, R6)."""
    operator = invocation.operator
    targets = list(written_by(operator, args, kwargs))
    identities = {id(target) for target in targets}
    sparse: set[int] = set()  # addresses
    if invocation.opaque:
        sparse = {part.untyped_storage()._cdata for each in targets for part in parts_of(each)}
    for position, tensor in enumerate(invocation.tensors):
        if id(tensor) in identities or (sparse and tensor.untyped_storage()._cdata in sparse):
            invocation.written += (position,)
            note_if_it_strays(driver, tensor)
            storage = invocation.inputs[position]
            if not storage.replayable and storage.consumers:
                invocation.fixed += (storage,)


def look_twice(driver: Driver, invocation: Invocation) -> bool:
    """Whether the call may be recorded although an input is special (R4)."""
    may_record = True
    for position, storage in enumerate(invocation.inputs):
        flags: int = storage.payload.flags
        if flags & EXOTIC:
            may_record = False
            continue
        if not flags & UNSEEN:
            continue
        written = position in invocation.written
        reads = not written or not invocation.operator.overwriting
        covers = geometry_of(invocation.tensors[position]).span == storage.payload.size
        if flags & UNWRITTEN and (reads or not covers):
            driver.seal(storage)  # what is in there came from where nobody saw it
        elif flags & ZEROED and not written:
            driver.seal(storage)
        storage.payload.flags &= ~UNSEEN
    return may_record


def keep_indices(driver: Driver, invocation: Invocation) -> None:
    """Masks and indices that decide a shape are decided once (R8)."""
    for tensor, storage in zip(invocation.tensors, invocation.inputs, strict=True):
        if not tensor.dtype.is_floating_point and storage.replayable and not storage.pinned:
            driver.pin(storage)


def register(driver: Driver, invocation: Invocation, recording: bool, result: Any) -> None:
    """Tells the engine what the operator made, and how it can be made again."""
    operator, signature = invocation.operator, invocation.signature
    made = _made_by(driver.table, result)
    positions = tuple([position for position, _, _ in made])
    exotic = foreign = 0
    for _, tensor, home in made:
        if is_exotic(tensor):
            exotic = EXOTIC
        if not home.resizable():  # PyTorch did not allocate it
            recording, foreign = False, FOREIGN
    if signature.fresh is None:
        counted = torch.UntypedStorage.nbytes if driver.streams is None else driver.counted
        nbytes = sum(counted(home) for _, _, home in made)
        signature.learn(positions, nbytes, exotic=bool(exotic))
    cost = signature.cost
    if invocation.written:
        if written_over(driver, invocation, recording, hidden=operator.unannounced):
            cost = 0  # the engine knows
        # Results beside what was written: the call cannot be run again for them.
        recording &= operator.statistics
    elif signature.fresh != positions:
        recording = False  # not the same as last time: it does not depend on arguments alone
    if operator.separating:
        invocation.inputs[0].payload.flags |= COUNTERS
    if not made:
        if cost:
            driver.account(operator.name, cost, signature.workspace)
        return
    recording &= not exotic
    if exotic or operator.opaque:  # it may go on reading: a quantized tensor has scales in them
        for storage in invocation.inputs:
            storage.payload.returnable = False
    call = driver.new_call(operator.name, cost, recording, signature.workspace)
    if recording:
        dropped = invocation.written  # running statistics
        _link(driver, call, invocation, dropped)
        call.payload = Recipe(invocation, (), dropped)
    for _, tensor, home in made:
        storage = driver.new_storage(call, driver.counted(home))
        memory: Memory = storage.payload
        memory.origin = weakref.ref(tensor)
        memory.flags = operator.content | exotic | foreign
        if driver.resort is not None:
            memory.returnable = recording and is_returnable(tensor)
        if operator.routing and not tensor.dtype.is_floating_point:
            storage.pinned = True  # R8
        driver.table.settle(storage, home, home._cdata)
    driver.admit(call)


def is_returnable(tensor: Tensor) -> bool:
    """Whether a result of an operator may be let go while the program holds it.

    What has lengths and indices stays: functions that are composed of operators read it before any
    of them runs. So does a single number.
    """
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 0


def written_over(driver: Driver, invocation: Invocation, recording: bool, *, hidden: bool) -> bool:
    """The values that were written are other values now (R3); `hidden`: no counter tells.

    A source that nothing was made from just stays a source. Returns whether the engine was told
    of a call.
    """
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
    call = driver.new_call(operator.name, signature.cost, recording, signature.workspace)
    overwrites: list[tuple[Value, Value]] = []
    for position, old in sorted(replaced, key=lambda pair: pair[0]):
        new = driver.new_storage(call, old.nbytes)
        overwrites.append((new.values[0], old.values[0]))
        new.payload.flags = operator.content | (old.payload.flags & COUNTERS)
        untold = hidden or (operator.name in UNTAGGED_RANDOM and position > 0)
        move(driver, old, new, invocation.tensors[position], hidden=untold)
    call.overwrites = overwrites
    if recording:
        _link(driver, call, invocation, ())
        targets = tuple(sorted(changed.values()))
        call.payload = Recipe(invocation, targets, ())
    driver.admit(call)
    if operator.resizes:
        for output, _ in overwrites:
            driver.resized(output.storage)
    return True


def changed_unseen(driver: Driver, name: str, old: Storage) -> Storage:
    """What is where `old` is, which has a recipe, is about to change, and nobody will know how.

    Returns what will be there. The value that was there can still be computed, for what needs it.
    """
    call = driver.new_call(name, 0, False)
    new = driver.new_storage(call, old.nbytes)
    call.overwrites = [(new.values[0], old.values[0])]
    move(driver, old, new, None, hidden=True)
    memory: Memory = new.payload
    origin = memory.program_tensor()
    if new.references and memory.witness is None and origin is not None:
        memory.witness = with_counter_of(origin)  # who writes there next may put the counter back
    driver.admit(call)
    return new


def move(
    driver: Driver, old: Storage, new: Storage, target: Tensor | None, *, hidden: bool = False
) -> None:
    """`new` is where `old` was; `target`: through which it was written, None: unseen.

    Handles of `old` follow if no version counter noticed (R7).
    """
    before: Memory = old.payload
    after: Memory = new.payload
    driver.succeed(old, new)
    after.origin, after.witness, after.version = before.origin, before.witness, -1
    after.returnable, after.strays = before.returnable, before.strays
    origin = before.counted()
    parts = before.flags & COUNTERS
    if target is None or hidden:
        noticed = False
    else:
        noticed = not parts if origin is None else share_version(origin, target)
    if noticed and not parts:
        before.overwritten = True
        after.disown()
    else:  # .data or running statistics: plain PyTorch computes with what is there now
        if noticed or before.flags & NOTICED:
            after.flags |= NOTICED
        before.successor = new
        driver.hand_over(old, new)


def _link(driver: Driver, call: Call, invocation: Invocation, dropped: tuple[int, ...]) -> None:
    """What a recipe reads must stay what it is, and sources must stay at all."""
    call.inputs = inputs = []
    now = driver.engine.clock
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
            memory.owned = memory.home()


def _made_by(table: Table, result: Any) -> list[tuple[int, Tensor, torch.UntypedStorage]]:
    """The tensors in a result that have memory of their own, each with its position."""
    if type(result) is Tensor and result.layout is STRIDED:  # as nearly always
        home = result.untyped_storage()
        return [(0, result, home)] if table.watch_at(home._cdata) is None else []
    made: list[tuple[int, Tensor, torch.UntypedStorage]] = []
    seen: list[int] = []
    for position, tensor in enumerate(tensors_in(result)):
        if is_plain(type(tensor)) and tensor.layout is STRIDED:
            home = tensor.untyped_storage()
            address = home._cdata
            if address not in seen and table.watch_at(address) is None:
                seen.append(address)
                made.append((position, tensor, home))
    return made
