"""Says in words who holds the memory, and what to do when there is not enough."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, format_ns
from rekindle.engine import Engine, NoRoom, Storage
from rekindle.pytorch._memory import Memory, Table, site

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
INPUTS = "inputs and buffers"
PROGRAM = "held by your code"
SAVED = "saved for backward"
KEPT = "kept, cannot be recomputed"
IN_USE = "in use by the operator"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, PROGRAM, SAVED, KEPT, IN_USE)

_HERE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)


@final
@dataclass(slots=True)
class Snapshot:
    """Who held memory at one moment: bytes by category, and the operators that made the most."""

    memory: Bytes = 0
    clock: Nanoseconds = 0
    where: str = ""
    categories: dict[str, Bytes] = field(default_factory=dict)
    sites: list[tuple[str, Bytes]] = field(default_factory=list)


def snapshot(engine: Engine, table: Table, optimizers: Iterable[Any]) -> Snapshot:
    """Who holds memory now. Walks every storage: not for every operator."""
    gradients, state = _addresses(engine, optimizers)
    categories: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    for storage in engine.storages:
        if storage.resident and storage.nbytes:
            category = _category(storage, table, gradients, state)
            categories[category] += storage.nbytes
            if category in (SAVED, PROGRAM, KEPT):
                sites[site(storage)] += storage.nbytes
    for watch in table.only_counted():
        category = _category_at(watch.address, gradients, state) or IN_USE
        categories[category] += watch.nbytes
    ordered = {name: categories[name] for name in CATEGORIES if categories[name]}
    return Snapshot(engine.memory, engine.clock, users_line(), ordered, sites.most_common(5))


def _addresses(engine: Engine, optimizers: Iterable[Any]) -> tuple[set[int], set[int]]:
    """Identities of the storages that hold gradients, and optimizer state."""
    gradients: set[int] = set()
    state: set[int] = set()
    for storage in engine.storages:
        memory: Memory = storage.payload
        origin = memory.program_tensor()
        grad = origin.grad if origin is not None and origin.is_leaf else None
        if grad is not None and grad.layout is torch.strided:
            gradients.add(grad.untyped_storage()._cdata)
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            for entry in entries.values():
                if isinstance(entry, torch.Tensor) and entry.layout is torch.strided:
                    state.add(entry.untyped_storage()._cdata)
    return gradients, state


def _category(storage: Storage, table: Table, gradients: set[int], state: set[int]) -> str:
    memory: Memory = storage.payload
    if memory.watch is not None and (known := _category_at(memory.watch.address, gradients, state)):
        return known
    if storage.replayable and not storage.pinned:
        if memory.watch is not None and table.is_held(storage):
            return PROGRAM if storage.references else IN_USE
        return SAVED
    origin = memory.program_tensor()
    if origin is not None and origin.is_leaf and origin.requires_grad:
        return PARAMETERS
    if site(storage) == "source":
        return INPUTS
    return KEPT if storage.references or storage.consumers or storage.pinned else IN_USE


def _category_at(address: int, gradients: set[int], state: set[int]) -> str:
    """What the program itself says about the memory there; empty: nothing."""
    return GRADIENTS if address in gradients else OPTIMIZER if address in state else ""


def users_line() -> str:
    """The innermost line of the running program that is neither torch's nor ours: "file:line"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def out_of_budget(
    shortage: NoRoom, engine: Engine, table: Table, optimizers: Iterable[Any], operator: str
) -> OutOfBudget:
    """The error for `shortage`: what was needed, who holds the rest, which budget would do."""
    now = snapshot(engine, table, optimizers)
    smallest = shortage.memory + shortage.needed
    where = now.where
    needs = f"{operator or 'this program'} needs {format_bytes(shortage.needed)} more"
    used = f"{format_bytes(shortage.memory)} of a budget of {format_bytes(shortage.budget)}"
    lines = [
        f"{needs}, and nothing is left to let go: {used} cannot be recomputed or is in use",
        f"  at {where}" if where else "  (in the backward pass)",
        *table_of(now.categories),
        f"The smallest budget that gets past this: rekindle.budget({smallest})",
    ]
    message = "\n".join(lines)
    return OutOfBudget(
        message,
        needed=shortage.needed,
        budget=shortage.budget,
        held=now.categories,
        smallest_budget=smallest,
        operator=operator,
        where=where,
    )


def out_of_memory(engine: Engine, table: Table, optimizers: Iterable[Any]) -> str:
    """What to add to the device's own error when it comes in spite of the budget."""
    now = snapshot(engine, table, optimizers)
    lines = [
        f"Everything that may be let go has been; {format_bytes(now.memory)} are left:",
        *table_of(now.categories),
        "The device has less room than the budget says: make the batch smaller",
    ]
    return "\n".join(lines)


def table_of(categories: Mapping[str, Bytes]) -> list[str]:
    """Aligned lines, one a category."""
    width = max((len(name) for name in categories), default=0)
    return [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in categories.items()]


def report(
    engine: Engine, budget: Bytes | None, peak: Snapshot, evictions: int, recomputations: int
) -> str:
    """The text of `run.report()`."""
    share = engine.recompute_ns / engine.compute_ns if engine.compute_ns else 0.0
    limit = "none" if budget is None else format_bytes(budget)
    used = "" if budget is None else f"   {engine.peak / budget:.1%} of budget"
    lines = [
        f"budget          {limit:>11}",
        f"peak            {format_bytes(engine.peak):>11}{used}",
        f"evictions       {evictions:>11}",
        f"recomputations  {recomputations:>11}",
        f"time lost       {format_ns(engine.recompute_ns):>11}   {share:.1%} of the computation",
    ]
    if peak.categories:
        at = f", at {peak.where}" if peak.where else ""
        after = format_ns(peak.clock)
        lines += ["", f"near the peak ({format_bytes(peak.memory)}, after {after}{at}):"]
        lines += table_of(peak.categories)
    if peak.sites:
        lines += ["", "most of what was saved came from:"]
        lines += table_of(dict(peak.sites))
    return "\n".join(lines)
