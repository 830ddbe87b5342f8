"""Define `rekindle.simulate`: check the user's arguments, replay a trace, convert engine errors."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import get_args

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument, OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes
from rekindle.engine import NoRoom
from rekindle.policies import Policy, Swap, policy_of, speed
from rekindle.schedule import Record
from rekindle.simulator._native import Core
from rekindle.simulator._placement import AllocatorName, Device, Repair
from rekindle.simulator._replay import Run
from rekindle.trace import Trace
from rekindle.trace.formats import load


def simulate(
    trace: Trace | str | PathLike[str],
    *,
    budget: str | Bytes | None = None,
    policy: Policy | type[Policy] | str | None = None,
    swap: Swap | None = None,
    allocator: AllocatorName | None = None,
    device_memory: str | Bytes | None = None,
    repair: Repair = "window",
    core: Core = "auto",
) -> Record:
    """Replay a trace within a budget, with the evictions that the runtime would choose.

    Args:
        trace: A `Trace`, or the path of a file that holds one.
        budget: Bytes, or text ("6GiB"). Default: no limit.
        policy: The policy that selects storages to evict: one of `rekindle.policies`, or its name.
            Default: `Thrifty()`.
        swap: Evicted values may also be swapped out to the host, at this bandwidth.
        allocator: Simulate addresses too, by a model of PyTorch's CUDA allocator: "native" or
            "expandable" (`expandable_segments:True`); or by "pages", a model of an allocator that
            Rekindle does not have yet: large blocks own whole pages, wherever these are. The record
            then has `rounding` and `fragmentation`.
        device_memory: The bytes that this allocator may reserve. Default: no limit.
        repair: How to select storages to evict if enough bytes are free but not contiguous: the
            cheapest "window" of neighbors in memory (Coop, NeurIPS 2023), or those with the lowest
            "score", one after another.
        core: "native" runs the engine in C++, "python" in Python; both give the same record. "auto"
            uses the native core if it is available. With an allocator only Python works.

    Returns:
        A `Record`: actions, peak, recomputation, overhead.

    Raises:
        OutOfBudget: Some operator does not fit into the budget.

    Example:
        ```python
        trace = rekindle.capture(step)
        for share in (0.9, 0.7, 0.5):
            record = rekindle.simulate(trace, budget=int(share * peak))
            print(f"{share:.0%}: {record.overhead:.1%} more time")
        ```
    """
    checks.kind(
        trace,
        (Trace, str, PathLike),
        "a trace, or the path of a trace file",
        "rekindle.simulate({}, budget=...)",
        "rekindle.capture(step)",
    )
    checks.one_of(core, get_args(Core), "rekindle.simulate(trace, core={})")
    speed(swap, "rekindle.simulate(trace, swap={})")
    if budget is not None:
        budget = parse_bytes(budget, line="rekindle.simulate(trace, budget={})")
    found = trace if isinstance(trace, Trace) else load(Path(trace))
    device = _device(allocator, device_memory, repair, swap)
    run = Run(found, budget, policy_of(policy), swap=swap, device=device, core=core)
    try:
        run.go()
    except NoRoom as error:
        operator = error.call.name if error.call else ""
        held = error.memory
        unplaced = run.placement is not None and error is run.placement.refusal
        raise OutOfBudget(
            f"{operator or 'the program'} needs "
            f"{format_bytes(error.needed)}{' in one piece' * unplaced}, but {format_bytes(held)} "
            f"of the {format_bytes(error.budget)} cannot be evicted; write "
            f"rekindle.simulate(trace, budget={held + error.needed}) or more",
            needed=error.needed,
            budget=error.budget,
            held={"in use": held},
            smallest_budget=held + error.needed,
            operator=operator,
        ) from None
    return run.record()


def _device(
    allocator: AllocatorName | None,
    memory: str | Bytes | None,
    repair: Repair,
    swap: Swap | None,
) -> Device | None:
    """Check the arguments about the allocator. Return the device, or None without an allocator."""
    checks.one_of(allocator, (None, *get_args(AllocatorName)), "rekindle.simulate(allocator={})")
    checks.one_of(repair, get_args(Repair), "rekindle.simulate(trace, repair={})")
    if memory is None:
        return None if allocator is None else Device(allocator, repair=repair)
    nbytes = parse_bytes(memory, line="rekindle.simulate(trace, device_memory={})")
    if allocator is None:
        raise InvalidArgument(
            f"rekindle.simulate(trace, device_memory={memory!r}): got no allocator=, without "
            "which no device memory is simulated; write rekindle.simulate(trace, "
            f'allocator="native", device_memory={memory!r})'
        )
    if swap is not None:
        raise Unsupported(
            "rekindle.simulate(swap=..., device_memory=...): the simulated allocator does not "
            "know values on their way to the host; leave out device_memory= or swap="
        )
    return Device(allocator, nbytes, repair)
