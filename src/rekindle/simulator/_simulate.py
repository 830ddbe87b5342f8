"""One simulated run, for users: budgets as they write them, errors as they know them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import get_args

from rekindle import _checks as checks
from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes
from rekindle.engine import RIGHT, NoRoom, Rules
from rekindle.policies import Policy, Swap, policy_of, speed
from rekindle.schedule import Record
from rekindle.simulator._native import Core
from rekindle.simulator._replay import Run
from rekindle.trace import Trace
from rekindle.trace.formats import load


def simulate(
    trace: Trace | str | PathLike[str],
    *,
    budget: str | Bytes | None = None,
    policy: Policy | type[Policy] | str | None = None,
    rules: Rules = RIGHT,
    swap: Swap | None = None,
    core: Core = "auto",
) -> Record:
    """What would happen if the program of `trace` ran within `budget` bytes (None: no limit).

    trace: what a program did, or the path of a file that holds it. `policy`, one or the name of
    one, decides what to evict, by default `Thrifty()`, as under `rekindle.budget`. With `swap` what
    is evicted may go to the host, by ways of that bandwidth, each one copy at a time and beside
    computation. Raises `OutOfBudget` where the budget cannot be kept.

    `core` says which engine decides: the "native" one (`Unsupported` where it cannot), the one in
    "python", or "auto": the faster that is there. The record is the same, to the last bit.
    """
    checks.kind(
        trace,
        (Trace, str, PathLike),
        "a trace, or the path of one",
        "rekindle.simulate({}, budget=...)",
        "rekindle.capture(step)",
    )
    checks.kind(rules, Rules, "rules", "rekindle.simulate(trace, rules={})", "Rules()")
    checks.one_of(core, get_args(Core), "rekindle.simulate(trace, core={})")
    speed(swap, "rekindle.simulate(trace, swap={})")
    if budget is not None:
        budget = parse_bytes(budget, line="rekindle.simulate(trace, budget={})")
    found = trace if isinstance(trace, Trace) else load(Path(trace))
    run = Run(found, budget, policy_of(policy), rules, swap=swap, core=core)
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
