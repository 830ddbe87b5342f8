"""Says in words who holds the memory, and what to do when there is not enough."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle._units import format_bytes
from rekindle.engine import Engine, NoRoom, Storage
from rekindle.pytorch.tensors import Memory, Table, site

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
INPUTS = "inputs and buffers"
PROGRAM = "held by your code"
SAVED = "saved for backward"
KEPT = "kept, cannot be recomputed"
IN_USE = "in use by the operator"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, PROGRAM, SAVED, KEPT, IN_USE)

_HERE = str(Path(__file__).resolve().parents[2])
_TORCH = str(Path(torch.__file__).resolve().parent)


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


def snapshot(engine: Engine, table: Table, optimizers: Iterable[Any]) -> Snapshot:
    """Who holds memory now. Walks every storage: not for every operator."""
    gradients, state = _addresses(engine, optimizers)
    categories: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    holders: dict[StorageId, Holder] = {}
    for storage in engine.storages:
        if storage.resident and storage.nbytes:
            category, parameter = _category(storage, table, gradients, state)
            categories[category] += storage.nbytes
            maker = storage.makers[0].id if storage.makers else None
            holders[storage.id] = Holder(category, storage.nbytes, maker, parameter)
            if category in (SAVED, PROGRAM, KEPT):
                sites[site(storage)] += storage.nbytes
    for number, watch in enumerate(table.only_counted(), 1):
        category, parameter = _known_at(watch.address, gradients, state) or (IN_USE, 0)
        categories[category] += watch.nbytes
        holders[StorageId(-number)] = Holder(category, watch.nbytes, None, parameter)
    ordered = {name: categories[name] for name in CATEGORIES if categories[name]}
    most = sites.most_common(5)
    return Snapshot(engine.memory, engine.clock, users_line(), ordered, most, holders)


def _addresses(engine: Engine, optimizers: Iterable[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Identities of the storages that hold gradients, and optimizer state: ids of parameters."""
    gradients: dict[int, int] = {}
    state: dict[int, int] = {}
    for storage in engine.storages:
        memory: Memory = storage.payload
        origin = memory.program_tensor()
        grad = origin.grad if origin is not None and origin.is_leaf else None
        if grad is not None and grad.layout is torch.strided:
            gradients[grad.untyped_storage()._cdata] = id(origin)
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for entry in entries.values():
                if isinstance(entry, torch.Tensor) and entry.layout is torch.strided:
                    state[entry.untyped_storage()._cdata] = id(parameter)
    return gradients, state


def _category(
    storage: Storage, table: Table, gradients: dict[int, int], state: dict[int, int]
) -> tuple[str, int]:
    """The category, and the id of the parameter that it belongs to, if any."""
    memory: Memory = storage.payload
    watch = memory.watch
    if watch is not None and (known := _known_at(watch.address, gradients, state)):
        return known
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


def _known_at(
    address: int, gradients: dict[int, int], state: dict[int, int]
) -> tuple[str, int] | None:
    """What the program itself says about the memory there, and the id of the parameter."""
    if address in gradients:
        return GRADIENTS, gradients[address]
    return (OPTIMIZER, state[address]) if address in state else None


def users_line() -> str:
    """The innermost line of the running program that is neither torch's nor ours: "file:line"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@final
class _Strides:
    """How far beyond what an operator needs it is worth to go, once budgets named before came too
    short: what is known of the program ends here, and each attempt may cost a whole step.

    Steps double, as in galloping search (Bentley and Yao, 1976), so that their number grows as the
    logarithm of what is missing; capped, so that no more than `1 / CAP` is given away at the end.
    """

    CAP = 4
    MOST = 64  #: budgets that are remembered

    def __init__(self) -> None:
        self._named: dict[Bytes, Bytes] = {}  # budgets, and the stride that led to each

    def beyond(self, budget: Bytes, smallest: Bytes) -> Bytes:
        """The budget to name when `budget` did not do and `smallest` gets past this operator."""
        before = self._named.get(budget)
        stride = 0 if before is None else max(2 * before, smallest - budget)
        worth_trying = smallest + min(stride, smallest // self.CAP)
        for named in (smallest, worth_trying):
            self._named.pop(named, None)
            self._named[named] = stride
        while len(self._named) > self.MOST:
            del self._named[next(iter(self._named))]
        return worth_trying


_strides = _Strides()


def out_of_budget(shortage: NoRoom, now: Snapshot, operator: str) -> OutOfBudget:
    """The error for `shortage`: what was needed, who holds the rest, which budget would do."""
    smallest = shortage.memory + shortage.needed
    worth_trying = _strides.beyond(shortage.budget, smallest)
    where = now.where
    needs = f"{operator or 'this program'} needs {format_bytes(shortage.needed)} more"
    used = f"{format_bytes(shortage.memory)} of a budget of {format_bytes(shortage.budget)}"
    lines = [
        f"{needs}, and nothing is left to evict: {used} cannot be recomputed or is in use",
        f"  at {where}" if where else "  (in the backward pass)",
        *table_of(now.categories),
        f"The smallest budget that gets past this: rekindle.budget({smallest})",
    ]
    if worth_trying > smallest:
        lines.append(
            f"The last one came too short, too; rather try rekindle.budget({worth_trying})"
        )
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


def out_of_memory(engine: Engine, table: Table, optimizers: Iterable[Any]) -> str:
    """What to add to the device's own error when it comes in spite of the budget."""
    now = snapshot(engine, table, optimizers)
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
