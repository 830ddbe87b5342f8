"""Compute a lower bound for programs that recompute and swap, by the cut relaxation with copies.

This module gives only a bound and no plan. The relaxation (`_relaxation.py`) ignores the times of
copies within an interval, limits of the host's memory, and memory between the cuts. The bound is
therefore lower than it could be, but it is valid.
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
    """Return a lower bound (ns) for the time at which any run within a budget ends.

    Args:
        problem: The operators and storages to plan, made from a trace.
        budget: The budget (bytes).
        bandwidth: The bandwidth to the host and back.
        cuts: The number of cuts, moments at which memory is constrained: the peak of the run
            without evictions, and others spread evenly.
        time_limit: The most seconds for the solver.

    Returns:
        The bound, or None if no run fits the budget.
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
