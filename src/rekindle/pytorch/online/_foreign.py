"""Memory that others than PyTorch may write without a word is the input of no recipe (R4).

An environment fills its array of observations again, a loader its buffer; what was computed from
them would be computed from something else. So an operator that reads such memory has a recipe with
a private copy of it, or none: whichever keeps fewer bytes, its results or the copy. A copy serves
for as long as what it is of has not changed. Weights are too large for that and seldom written:
their checksum is taken when recipes begin to read them, and has to be the same when one runs again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle._types import Bytes
from rekindle.engine import Storage
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._owners import is_weight
from rekindle.pytorch.online._recording import move
from rekindle.pytorch.operators import Invocation, checksum
from rekindle.pytorch.tensors import COUNTERS, FOREIGN, Memory, privately, whole


def with_private_inputs(driver: Driver, invocation: Invocation, needed: Bytes) -> bool:
    """Puts copies in the place of what others may write; False: the results are kept instead.

    `needed`: bytes of the results.
    """
    foreign: dict[Storage, Tensor] = {}
    for position, storage in enumerate(invocation.inputs):
        if storage.payload.flags & FOREIGN:
            if position in invocation.written or driver.device.type != "cpu":
                return False  # on a device a copy into the buffer may still be under way
            foreign.setdefault(storage, invocation.tensors[position])
    weights = {storage for storage, tensor in foreign.items() if is_weight(tensor)}
    copies = {each: _copy_of(each) for each in foreign if each not in weights}
    kept = needed + sum(invocation.inputs[p].nbytes for p in invocation.written)
    if sum(each.nbytes for each, copy in copies.items() if copy is None) > kept:
        return False
    for storage in weights:
        memory: Memory = storage.payload
        if memory.checksum is None or not storage.consumers:
            memory.checksum = checksum(memory.home())
    for storage, copy in copies.items():
        private = _copied(driver, invocation, storage) if copy is None else copy
        for position, each in enumerate(invocation.inputs):
            if each is storage:
                invocation.inputs[position] = private
    return True


def given_away(driver: Driver, home: torch.UntypedStorage) -> None:
    """From now on others may write to `home`: what recipes made of what is there is safe.

    To the engine somebody wrote over it, unseen. What the program computes next it computes from
    whatever is there then; a value that was there before can be recomputed.
    """
    if driver.work.mine:
        return
    with driver.lock:
        driver.settle()
        watch = driver.table.watch_at(home._cdata)
        if watch is None:
            return
        storage = driver.known_at(watch)
        memory: Memory = storage.payload
        if memory.flags & FOREIGN:
            return
        if not storage.replayable:
            if storage.consumers:
                driver.forget(storage)
            memory.flags |= FOREIGN
            return
        call = driver.new_call("given away", 0, False)
        new = driver.new_storage(call, storage.nbytes)
        new.payload.flags = FOREIGN | (memory.flags & COUNTERS)
        move(driver, storage, new, None)
        call.overwrites = [(new.values[0], storage.values[0])]
        driver.admit(call)


def _copy_of(storage: Storage) -> Storage | None:
    """A copy made before, if it still is one."""
    memory: Memory = storage.payload
    copy = memory.copy
    watch = None if copy is None else copy.payload.watch
    if copy is None or not copy.resident or watch is None or watch() is None:
        return None
    one, other = whole(memory.home()), whole(copy.payload.home())
    with privately():
        return copy if torch.equal(one, other) else None


def _copied(driver: Driver, invocation: Invocation, storage: Storage) -> Storage:
    memory: Memory = storage.payload
    driver.make_room(storage.nbytes, "a copy of memory that others may write")
    with driver.work.going_on():
        tensor = whole(memory.home()).clone()
    memory.copy = copy = driver.known(tensor)
    invocation.private.append(tensor)  # until a recipe has it
    return copy
