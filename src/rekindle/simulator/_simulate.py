"""One simulated run, for users: budgets as they write them, errors as they know them."""

from __future__ import annotations

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes
from rekindle.engine import RIGHT, NoRoom, Rules
from rekindle.policies import DEFAULT, Policy, Swap
from rekindle.schedule import Record
from rekindle.simulator._native import Core
from rekindle.simulator._replay import Run
from rekindle.trace import Trace


def simulate(
    trace: Trace,
    *,
    budget: str | Bytes | None = None,
    policy: Policy | None = None,
    rules: Rules = RIGHT,
    swap: Swap | None = None,
    core: Core = "auto",
) -> Record:
    """What would happen if the program of `trace` ran within `budget` bytes (None: no limit).

    `policy` decides what to let go, by default `Thrifty()`, as under `rekindle.budget`. With `swap`
    what is let go may go to the host, by ways of that bandwidth, each one copy at a time and beside
    computation. Raises `OutOfBudget` where the budget cannot be kept.

    `core` says which engine decides: the "native" one (`Unsupported` where it cannot), the one in
    "python", or "auto": the faster that is there. The record is the same, to the last bit.
    """
    if budget is not None:
        budget = parse_bytes(budget, line="rekindle.simulate(trace, budget={})")
    run = Run(trace, budget, policy or DEFAULT, rules, swap=swap, core=core)
    try:
        run.go()
    except NoRoom as error:
        operator = error.call.name if error.call else ""
        held = error.memory
        raise OutOfBudget(
            f"{operator or 'the program'} needs {format_bytes(error.needed)} where "
            f"{format_bytes(held)} of {format_bytes(error.budget)} cannot be evicted",
            needed=error.needed,
            budget=error.budget,
            held={"in use": held},
            smallest_budget=held + error.needed,
            operator=operator,
        ) from None
    return run.record()
