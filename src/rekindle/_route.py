"""Plan a recorded training step in a separate process of lower priority than the training process.

Usage: `python -m rekindle._route BUDGET SECONDS NICENESS [HOST OUT IN]`. The runtime starts this
process to make learned plans in the background. The process reads the trace from standard input. It
writes a first plan after a tenth of SECONDS, because a quick plan already saves most of the time
that a plan can save. Then it writes each better plan that it finds. A plan is one line of standard
output.

With HOST (bytes of host memory), OUT and IN (bytes per second), plans may also swap. A plan that
swaps is written only if it saves enough time compared to the best plan that only recomputes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TextIO

from rekindle._planners import LONGEST, Online, WarmCuts, unless_endless
from rekindle.engine import Route
from rekindle.planners import Plan, Problem, Status
from rekindle.planners.given import steps_of
from rekindle.policies import DEFAULT, Swap
from rekindle.trace.formats import native

QUICK = 0.1  # share of SECONDS for the first plan
SLACK = 0.9  # share of the bandwidth that plans may use, because the program needs some of it, too
WORTH = 0.01  # time that a plan that swaps must save, as a share of the program's own time
GAP = 0.001  # a plan that swaps is good enough if it costs at most this share above its bound


def main(
    trace: TextIO, plans: TextIO, budget: int, seconds: float, swap: Swap | None = None
) -> None:
    """Plan a trace within `budget` bytes, for about `seconds`; write each better plan to `plans`.

    With `swap`, a plan that swaps is made after the first plan that only recomputes.
    """
    from rekindle.planners.cuts import Cuts

    problem = Problem.of(native.read(trace))
    run = Online(DEFAULT, limit=LONGEST).schedule(problem, budget)
    warm = () if run is None else (steps_of(problem, run),)
    best: Plan | None = None
    for number, share in enumerate((QUICK, 1 - QUICK), start=1):
        if number > 1 and swap is not None:
            mixed = _with_copies(problem, budget, share * seconds, swap)
            if mixed is not None and (best is None or _saves(mixed, best)):
                _write_plan(plans, mixed, problem)
                return
        plan = unless_endless(Cuts(share * seconds, warm_start=warm).plan(problem, budget))
        if plan.schedule is None:
            continue
        # The second search starts from the first plan, so its plan never costs more than the first
        # plan. If the costs differ, the second plan is better.
        if best is None or plan.recompute_ns != best.recompute_ns:
            _write_plan(plans, plan, problem)
        if plan.status is Status.OPTIMAL and (swap is None or not plan.recompute_ns):
            break
        best, warm = plan, (steps_of(problem, plan.schedule),)
    else:
        if best is None:
            sys.exit(f"no plan within {budget} bytes")


def _with_copies(problem: Problem, budget: int, seconds: float, swap: Swap) -> Plan | None:
    """Return a plan that may swap at 90 % of the bandwidth `swap`; None if none was found."""
    out, back = int(SLACK * swap.out_bytes_per_s), int(SLACK * swap.in_bytes_per_s)
    slower = replace(swap, out_bytes_per_s=max(1, out), in_bytes_per_s=max(1, back))
    plan = WarmCuts(seconds, GAP, slower).plan(problem, budget)
    return None if plan.schedule is None else plan


def _saves(mixed: Plan, alone: Plan) -> bool:
    """Return True if `mixed` (with swapping) saves enough time compared with `alone` (without)."""
    assert mixed.cost_ns is not None
    assert alone.cost_ns is not None
    return alone.cost_ns - mixed.cost_ns > WORTH * alone.compute_ns


def _write_plan(plans: TextIO, plan: Plan, problem: Problem) -> None:
    """Write the plan as one line. Readers wait for the end of the line."""
    assert plan.schedule is not None
    assert plan.recompute_ns is not None
    route = replace(
        Route.of(problem.trace, plan.schedule),
        recompute_ns=plan.recompute_ns + plan.waiting_ns,
        bound_ns=plan.bound_ns - plan.compute_ns,
    )
    plans.write(json.dumps(route.as_numbers()) + "\n")
    plans.flush()


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(int(sys.argv[3]))
    rates = [int(number) for number in sys.argv[4:7]]
    copies = Swap(None if rates[0] < 0 else rates[0], rates[1], rates[2]) if rates else None
    with open(os.dup(1), "w", encoding="utf-8") as plans:
        # Standard output is for plans only: what a library prints goes to standard error.
        os.dup2(2, 1)
        main(sys.stdin, plans, int(sys.argv[1]), float(sys.argv[2]), copies)
