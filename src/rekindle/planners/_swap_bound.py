"""How early a program can end at best if it may recompute and swap: the cut relaxation with copies.

Only a bound, no plan: nothing is decoded from its solution. What it leaves out makes it smaller,
never wrong: when within an interval a copy runs, limits of the host's memory, and memory between
the cuts.
"""

from __future__ import annotations

from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._problem import Problem
from rekindle.planners._relaxation import Bandwidth, Relaxation
from rekindle.planners._sequence import timeline


def swap_bound(
    problem: Problem,
    budget: Bytes,
    bandwidth: Bandwidth,
    *,
    cuts: int = 6,
    time_limit: float = 30.0,
) -> Nanoseconds | None:
    """No run of `problem` within `budget` bytes ends before so many ns; None: there is none at all.

    `cuts`: so many moments at which memory counts, the peak of keep-all and others spread evenly.
    """
    memory = timeline(problem, range(len(problem))).memory
    spread = (len(problem) * number // cuts for number in range(1, cuts))
    chosen = {int(memory.argmax()), *spread}
    relaxation = Relaxation(problem, sorted(chosen), budget, bandwidth=bandwidth)
    solution = relaxation.model.solve(time_limit=time_limit)
    if solution.infeasible:
        return None
    late = max(0.0, solution.bound) * relaxation.tick
    return problem.compute_ns + int(late * (1 - 1e-6))
