"""Says in words who holds the memory, and what to do when there is not enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle._units import format_bytes
from rekindle.engine import Engine, NoRoom, Storage
from rekindle.pytorch.online._owners import Owners
from rekindle.pytorch.online._too_small import too_small
from rekindle.pytorch.online._users_line import users_line
from rekindle.pytorch.tensors import Memory, Table, site

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
INPUTS = "inputs and buffers"
PROGRAM = "held by your code"
SAVED = "saved for backward"
KEPT = "kept, cannot be recomputed"
IN_USE = "in use by the operator"
#: What the one budget is that an error names.
PAST_THIS = "The smallest budget that gets past this operator, a later one may need more"
PAST_MORE = "The last budget named was too small as well, this one has room for later operators"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, PROGRAM, SAVED, KEPT, IN_USE)


class Holder(NamedTuple):
    """One storage at one moment, and where it belongs: to the operator that made it, and (what is
    a parameter, its gradient or the optimizer's state) to a parameter by its id, else 0."""

    category: str
    nbytes: Bytes
    op: OpId | None
    parameter: int


@final
@dataclass(slots=True)
class Snapshot:
    """Who held memory at one moment: bytes by category, and the operators that made the most."""

    memory: Bytes = 0
    clock: Nanoseconds = 0
    where: str = ""
    categories: dict[str, Bytes] = field(default_factory=dict)
    sites: list[tuple[str, Bytes]] = field(default_factory=list)
    holders: dict[StorageId, Holder] = field(default_factory=dict)


def snapshot(engine: Engine, table: Table, owners: Owners) -> Snapshot:
    """Who holds memory now. Walks every storage: not for every operator."""
    known = _known(engine, owners)
    categories: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    holders: dict[StorageId, Holder] = {}
    for storage in engine.storages:
        if storage.resident and storage.nbytes:
            category, parameter = _category(storage, table, known)
            categories[category] += storage.nbytes
            maker = storage.makers[0].id if storage.makers else None
            holders[storage.id] = Holder(category, storage.nbytes, maker, parameter)
            if category in (SAVED, PROGRAM, KEPT):
                sites[site(storage)] += storage.nbytes
    for number, watch in enumerate(table.only_counted(), 1):
        category, parameter = known.get(watch.address, (IN_USE, 0))
        categories[category] += watch.nbytes
        holders[StorageId(-number)] = Holder(category, watch.nbytes, None, parameter)
    ordered = {name: categories[name] for name in CATEGORIES if categories[name]}
    most = sites.most_common(5)
    return Snapshot(engine.memory, engine.clock, users_line(), ordered, most, holders)


def _known(engine: Engine, owners: Owners) -> dict[int, tuple[str, int]]:
    """What the program itself says about memory, by the identity of the storage: the category, and
    the id of the parameter that it belongs to, or 0."""
    found: dict[int, tuple[str, int]] = {}

    def note(tensor: Tensor | None, category: str, parameter: int) -> None:
        if tensor is not None and tensor.layout is torch.strided:
            with suppress(NotImplementedError, RuntimeError):  # some have none yet, or hide it
                found[tensor.untyped_storage()._cdata] = category, parameter

    for said in told_by(owners):
        note(*said)
    for storage in engine.storages:
        origin: Tensor | None = storage.payload.program_tensor()
        if origin is not None and origin.is_leaf:
            note(origin.grad, GRADIENTS, id(origin))
    return found


def told_by(owners: Owners) -> Iterator[tuple[Tensor | None, str, int]]:
    """What modules and optimizers say about tensors: the category, and the id of the parameter that
    each belongs to, or 0."""
    for buffer in owners.buffers:
        yield buffer, INPUTS, 0
    for parameter in owners.parameters:
        yield parameter, PARAMETERS, id(parameter)
        yield parameter.grad if parameter.is_leaf else None, GRADIENTS, id(parameter)
    for optimizer in owners.optimizers:
        for parameter, entries in optimizer.state.items():
            for entry in entries.values():
                yield entry if isinstance(entry, Tensor) else None, OPTIMIZER, id(parameter)


def _category(
    storage: Storage, table: Table, known: Mapping[int, tuple[str, int]]
) -> tuple[str, int]:
    """The category, and the id of the parameter that it belongs to, if any."""
    memory: Memory = storage.payload
    watch = memory.watch
    if watch is not None and watch.address in known:
        return known[watch.address]
    if storage.replayable and not storage.pinned:
        if memory.watch is not None and table.is_held(storage):
            return PROGRAM if storage.references else IN_USE, 0
        return SAVED, 0
    origin = memory.program_tensor()
    if origin is not None and origin.is_leaf and origin.requires_grad:
        return PARAMETERS, id(origin)
    if site(storage) == "source":
        return INPUTS, 0
    return KEPT if storage.references or storage.consumers or storage.pinned else IN_USE, 0


def out_of_budget(shortage: NoRoom, now: Snapshot, operator: str, evicted: Bytes) -> OutOfBudget:
    """Return the error for `shortage`: what was needed, who holds the rest, which budget would do.

    Args:
        shortage: What was asked for.
        now: Who holds memory now.
        operator: Who asked.
        evicted: Bytes of values that plain PyTorch would hold now. So no budget is named that is
            larger than its peak.
    """
    smallest = shortage.memory + shortage.needed
    worth_trying = too_small.beyond(shortage.budget, smallest, smallest + evicted)
    where = now.where
    needs = f"{operator or 'this program'} needs {format_bytes(shortage.needed)} more"
    if not shortage.needed:  # a smaller budget was set, or more was made than could be known
        needs = f"{operator or 'this program'} finds the budget exceeded"
    used = f"{format_bytes(shortage.memory)} of a budget of {format_bytes(shortage.budget)}"
    lines = [
        f"{needs}, and nothing is left to evict: {used} cannot be recomputed or is in use",
        f"  at {where}" if where else "  (in the backward pass)",
        *table_of(now.categories),
        "What whole steps need: error.rehearse(), or rekindle.profile(step).smallest_budget",
        f"{PAST_THIS if worth_trying == smallest else PAST_MORE}: rekindle.budget({worth_trying})",
    ]
    message = "\n".join(lines)
    return OutOfBudget(
        message,
        needed=shortage.needed,
        budget=shortage.budget,
        held=now.categories,
        smallest_budget=smallest,
        worth_trying=worth_trying,
        operator=operator,
        where=where,
    )


def out_of_memory(now: Snapshot) -> str:
    """What to add to the device's own error when it comes in spite of the budget."""
    lines = [
        f"Everything that may be evicted has been; {format_bytes(now.memory)} are left:",
        *table_of(now.categories),
        "The device has less room than the budget says: make the batch smaller",
    ]
    return "\n".join(lines)


def table_of(categories: Mapping[str, Bytes]) -> list[str]:
    """Aligned lines, one a category."""
    width = max((len(name) for name in categories), default=0)
    return [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in categories.items()]
