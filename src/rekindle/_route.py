"""Plan a recorded training step in a process of its own, below the training process in priority.

Usage: `python -m rekindle._route FOLDER BUDGET SECONDS NICENESS`. The runtime starts this process
to make learned plans in the background. The process reads FOLDER/trace.jsonl and writes each better
plan as FOLDER/route-N.json. A plan file is complete as soon as it exists. The first plan is made in
a tenth of SECONDS, because a quick plan already brings most of the gain.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from rekindle._planners import LONGEST, Online
from rekindle.engine import Route
from rekindle.planners import Plan, Problem, Status
from rekindle.planners.given import steps_of
from rekindle.policies import DEFAULT
from rekindle.trace.formats import native

QUICK = 0.1  # share of SECONDS for the first plan


def main(folder: Path, budget: int, seconds: float) -> None:
    """Plan the trace in `folder` within `budget` bytes, for about `seconds`."""
    from rekindle.planners.cuts import Cuts

    with (folder / "trace.jsonl").open(encoding="utf-8") as file:
        problem = Problem.of(native.read(file))
    run = Online(DEFAULT, limit=LONGEST).schedule(problem, budget)
    warm = () if run is None else (steps_of(problem, run),)
    best: Plan | None = None
    for number, share in enumerate((QUICK, 1 - QUICK), start=1):
        plan = Cuts(share * seconds, warm_start=warm).plan(problem, budget)
        if plan.schedule is None:
            continue
        # The second search starts from the first plan, so its plan never costs more. A different
        # cost therefore means a better plan.
        if best is None or plan.recompute_ns != best.recompute_ns:
            route = Route.of(problem.trace, plan.schedule)
            _write(folder / f"route-{number}.json", replace(route, **_figures(plan)))
        if plan.status is Status.OPTIMAL:
            break
        best, warm = plan, (steps_of(problem, plan.schedule),)
    else:
        if best is None:
            sys.exit(f"no plan within {budget} bytes")


def _figures(plan: Plan) -> dict[str, int]:
    assert plan.recompute_ns is not None
    return {"recompute_ns": plan.recompute_ns, "bound_ns": plan.bound_ns - plan.compute_ns}


def _write(path: Path, route: Route) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(route.as_numbers()), encoding="utf-8")
    unfinished.rename(path)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(int(sys.argv[4]))
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
